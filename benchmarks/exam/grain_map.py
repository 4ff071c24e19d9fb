"""Grain's MapDataset: shuffle, repeat, a slice a rank, batch."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = f"grain {importlib.metadata.version('grain')}"
PROMISE = "iterators checkpoint with get_state and set_state; random access makes resuming exact"
SETTINGS = "MapDataset.source.seed.shuffle.repeat[rank::world].batch; mp_prefetch for workers"


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        import grain

        data = [json.loads(line)["row"] for line in rows.read_text().splitlines()]
        source = grain.MapDataset.source(data).seed(o["seed"])
        if o["shuffle"]:
            source = source.shuffle()
        source = source.repeat(o["epochs"])[o["rank"] :: o["world_size"]]
        stream = source.to_iter_dataset().batch(o["batch_size"])
        if o["workers"]:
            stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=o["workers"]))
        self.iterator = iter(stream)

    def batches(self) -> Iterator[list[int]]:
        for batch in self.iterator:
            yield batch.tolist()

    def save(self) -> Any:
        return self.iterator.get_state()

    def load(self, state: Any) -> None:
        self.iterator.set_state(state)


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
