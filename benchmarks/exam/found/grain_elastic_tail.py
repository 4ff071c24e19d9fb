"""Grain's ElasticIterator ends at different steps on ranks where rows do not fill the last step; a step that all wait for hangs."""

import grain


def batches(rank: int, world: int) -> list[list[int]]:
    data = grain.MapDataset.source(list(range(203))).seed(7).shuffle()
    shard = grain.sharding.ShardOptions(shard_index=rank, shard_count=world)
    stream = iter(grain.experimental.ElasticIterator(data, 4 * world, shard))
    return [batch.tolist() for batch in stream]


ranks = [batches(rank, 3) for rank in range(3)]
steps = [len(rank) for rank in ranks]
rows = {row for rank in ranks for batch in rank for row in batch}
print(f"steps of the ranks: {steps}; {203 - len(rows)} rows are on none of them")
assert len(set(steps)) > 1
assert len(rows) < 203
