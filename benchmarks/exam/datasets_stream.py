"""HF datasets as a stream, through torchdata's StatefulDataLoader, as its documentation does it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = f"datasets {importlib.metadata.version('datasets')}"
PROMISE = (
    "IterableDataset.state_dict: resumes at the example; what is in the shuffle buffer is lost and refilled"
)
SETTINGS = "4 shards, shuffle(buffer_size=64), split_dataset_by_node, set_epoch, StatefulDataLoader"


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = Dataset.from_json(str(rows), cache_dir=str(rows.parent / "hf")).select_columns(["row"])
        stream = data.to_iterable_dataset(num_shards=4)
        if o["shuffle"]:
            stream = stream.shuffle(seed=o["seed"], buffer_size=64)
        self.stream = split_dataset_by_node(stream, rank=o["rank"], world_size=o["world_size"])
        self.epoch, self.epochs = 0, o["epochs"]
        self.loader = StatefulDataLoader(self.stream, batch_size=o["batch_size"], num_workers=o["workers"])

    def batches(self) -> Iterator[list[int]]:
        for epoch in range(self.epoch, self.epochs):
            self.epoch = epoch
            self.stream.set_epoch(self.epoch)
            for batch in self.loader:
                yield batch["row"].tolist()

    def save(self) -> Any:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self.stream.set_epoch(self.epoch)
        self.loader.load_state_dict(state["loader"])


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
