"""torchdata's StatefulDataLoader over a list, with its stateful distributed sampler."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = f"torchdata {importlib.metadata.version('torchdata')}"
PROMISE = "StatefulDataLoader: state_dict and load_state_dict, also with workers, without reading the rows before again"
SETTINGS = "map-style dataset, StatefulDistributedSampler (drop_last=False), set_epoch before each epoch"


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        data = [json.loads(line)["row"] for line in rows.read_text().splitlines()]
        self.epoch, self.epochs = 0, o["epochs"]
        self.sampler = StatefulDistributedSampler(
            data, num_replicas=o["world_size"], rank=o["rank"], shuffle=o["shuffle"], seed=o["seed"]
        )
        self.loader = StatefulDataLoader(
            data, batch_size=o["batch_size"], sampler=self.sampler, num_workers=o["workers"]
        )

    def batches(self) -> Iterator[list[int]]:
        for epoch in range(self.epoch, self.epochs):
            self.epoch = epoch
            self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                yield batch.tolist()

    def save(self) -> Any:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self.sampler.set_epoch(self.epoch)
        self.loader.load_state_dict(state["loader"])


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
