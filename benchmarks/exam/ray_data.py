"""Ray Data's iterator: shuffled, split into a stream for each rank."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_alone import prepare as prepare
from words import long_number, parts_of

VERSION = f"ray {importlib.metadata.version('ray')}"
PROMISE = (
    "streaming_split: disjoint parts for ranks; random_shuffle: an order for each execution, repeated by seed"
)
SETTINGS = "random_shuffle(RandomSeedConfig(seed, reseed_after_execution)), preserve_order, streaming_split(equal=True)"
_NO_STATE = "iterators have no state to save: an execution begins at the first row (ray-project/ray#37633)"
NOT_OFFERED = {
    **dict.fromkeys(("middle", "end", "twice", "ranks", "world", "added", "replaced", "mixture", "packed", "pairs"), _NO_STATE),
    "workers": "batches are read ahead by tasks of Ray, whose number is not asked for; and " + _NO_STATE,
}  # fmt: skip


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        import ray
        from ray.data import DataContext
        from ray.data._internal.random_config import RandomSeedConfig

        ray.init(log_to_driver=False, logging_level="ERROR")
        context = DataContext.get_current()
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        self.name = "input_ids" if o.get("ids") else "row"
        self.o, handed = o, rows.with_suffix(f".{os.environ['MASTER_PORT']}")
        if o["rank"] == 0:
            if o.get("long"):
                data = ray.data.read_parquet(parts_of(rows), columns=["input_ids"])
            else:
                data = ray.data.read_json(str(rows), lines=True).select_columns([self.name])
            if o["shuffle"]:
                seed = RandomSeedConfig(seed=o["seed"], reseed_after_execution=True)
                data = data.repartition(8).random_shuffle(seed=seed)
            self.split = data.streaming_split(o["world_size"], equal=True) if o["world_size"] > 1 else [data]
            handed.with_suffix(".new").write_bytes(ray.cloudpickle.dumps(self.split))
            handed.with_suffix(".new").rename(handed)
        while not handed.exists():
            time.sleep(0.1)
        # written by rank 0 a moment ago, in a folder of this run
        self.mine = self.split[0] if o["rank"] == 0 else pickle.loads(handed.read_bytes())[o["rank"]]

    def batches(self) -> Iterator[list[int]]:
        for _ in range(self.o["epochs"]):
            for batch in self.mine.iter_batches(batch_size=self.o["batch_size"]):
                yield [*map(long_number, batch["input_ids"])] if self.o.get("long") else [*batch[self.name]]
        if self.o["world_size"] > 1 and self.o["rank"] == 0:
            time.sleep(
                5
            )  # the coordinator of the split ends with this process; the others are a batch behind


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
