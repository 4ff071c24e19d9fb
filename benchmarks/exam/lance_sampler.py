"""Lance's torch dataset: fragments' batches dealt to ranks, in an order by seed and epoch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epochs import converted, ids, long_rows, numbers
from words import LONG, long_number

VERSION = f"pylance {importlib.metadata.version('pylance')}"
PROMISE = "samplers deal fragments or batches to ranks, randomized by a seed and an epoch"
SETTINGS = "lance.torch.data.LanceDataset, ShardedBatchSampler(rank, world_size, randomize, seed), set_epoch"
_NO_STATE = "neither the data set nor its samplers have a state to save"
NOT_OFFERED = dict.fromkeys(
    ("middle", "end", "twice", "workers", "ranks", "world", "added", "replaced", "packed", "mixture"),
    _NO_STATE,
)


def _record(row: Any, kind: Any) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(row, LONG)], schema=kind)


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        import lance
        import pyarrow as pa

        with converted(rows, ".lance") as (folder, is_old):
            if is_old:
                if o.get("long"):
                    kind = pa.schema({"row": pa.list_(pa.int32(), LONG)})
                    some = (_record(row, kind) for row in long_rows(rows))
                    lance.write_dataset(some, str(folder), schema=kind)
                else:
                    values = ids(rows) if o.get("ids") else numbers(rows)
                    lance.write_dataset(pa.table({"row": values}), str(folder))
        self.o, self.data = o, lance.dataset(str(folder))

    def batches(self) -> Iterator[list[int]]:
        from lance.sampler import ShardedBatchSampler
        from lance.torch.data import LanceDataset

        o = self.o
        sampler = ShardedBatchSampler(o["rank"], o["world_size"], randomize=o["shuffle"], seed=o["seed"])
        for epoch in range(o["epochs"]):
            sampler.set_epoch(epoch)
            more = (
                {"to_tensor_fn": lambda batch, **_: batch.to_pydict()} if o.get("ids") else {}
            )  # ragged rows
            data = LanceDataset(
                self.data, batch_size=o["batch_size"], columns=["row"], sampler=sampler, **more
            )
            for batch in data:
                if o.get("long"):
                    yield [*map(long_number, batch["row"] if isinstance(batch, dict) else batch)]
                    continue
                if more:
                    yield batch["row"]
                    continue
                yield (batch["row"] if isinstance(batch, dict) else batch).reshape(-1).tolist()


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
