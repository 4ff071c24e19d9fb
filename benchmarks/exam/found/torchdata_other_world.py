"""A state of torchdata's StatefulDistributedSampler, taken on two ranks, loads on three without a word: rows are never seen."""

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

ROWS = list(range(204))


def loader(rank: int, world: int, batch_size: int) -> StatefulDataLoader:
    sampler = StatefulDistributedSampler(ROWS, num_replicas=world, rank=rank, shuffle=True, seed=7)
    return StatefulDataLoader(ROWS, batch_size=batch_size, sampler=sampler)


seen, states = [], []
for rank in range(2):  # 4 steps of 24 rows
    one = loader(rank, 2, 12)
    batches = iter(one)
    seen += [row for _ in range(4) for row in next(batches).tolist()]
    states.append(one.state_dict())
assert len(set(seen)) == 96
for rank in range(3):  # the other 108 rows, 24 a step
    one = loader(rank, 3, 8)
    one.load_state_dict(states[0])
    seen += [row for batch in one for row in batch.tolist()]
lost = len(set(ROWS) - set(seen))
print(f"{lost} of {len(ROWS)} rows were never seen, and nothing was said")
# the state counts the rows that one rank gave, and each of three ranks skips as many as each of two had given
assert lost == 48
