"""Lance's ShardedBatchSampler, without a filter, takes an epoch and does not use it: each epoch has the order of the first."""

import tempfile

import lance
import pyarrow as pa
from lance.sampler import ShardedBatchSampler
from lance.torch.data import LanceDataset


def order(data: lance.LanceDataset, seed: int, epoch: int) -> list[int]:
    sampler = ShardedBatchSampler(0, 1, randomize=True, seed=seed)
    sampler.set_epoch(epoch)
    rows = LanceDataset(data, batch_size=4, columns=["row"], sampler=sampler)
    return [
        row
        for batch in rows
        for row in (batch["row"] if isinstance(batch, dict) else batch).reshape(-1).tolist()
    ]


with tempfile.TemporaryDirectory() as folder:
    data = lance.write_dataset(pa.table({"row": list(range(203))}), folder)
    orders = [order(data, 7, epoch) for epoch in range(3)]
    assert order(data, 8, 0) != orders[0]
    assert orders[0] != list(range(203))
    print("epochs 0, 1 and 2 of seed 7 have one order")
    assert orders[0] == orders[1] == orders[2]
