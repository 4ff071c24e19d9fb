"""Grain's MapDataset: shuffle, repeat, a slice a rank, batch. `grain_elastic` builds on it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from epochs import numbers, sources

VERSION = f"grain {importlib.metadata.version('grain')}"
PROMISE = "iterators checkpoint with get_state and set_state; random access makes resuming exact"
SETTINGS = "MapDataset.source.seed.shuffle.repeat[rank::world].batch; mp_prefetch for workers; FirstFitPackIterDataset; mix"
NOT_OFFERED = {"world": "another number of ranks is for ElasticIterator, see `grain_elastic`"}
IMPORTS = ("grain",)


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        import grain

        streams = []
        for path in sources(rows, o):
            one = grain.MapDataset.source(numbers(path)).seed(o["seed"])
            streams.append(one.shuffle() if o["shuffle"] else one)
        both = (
            streams[0]
            if len(streams) == 1
            else grain.MapDataset.mix([one.repeat() for one in streams], [0.5, 0.5])
        )
        self.iterator = iter(self.stream(both if len(streams) > 1 else both.repeat(o["epochs"]), o))

    def stream(self, data: Any, o: dict[str, Any]) -> Any:
        import grain

        stream = data[o["rank"] :: o["world_size"]].to_iter_dataset()
        if o.get("packed"):
            packs = stream.map(lambda row: {"ids": np.full(3 + row % 4, row + 1)})
            stream = grain.experimental.FirstFitPackIterDataset(
                packs, length_struct={"ids": 12}, num_packing_bins=4
            )
        stream = stream.batch(o["batch_size"])
        if o["workers"]:
            stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=o["workers"]))
        return stream

    def batches(self) -> Iterator[list[int]]:
        for batch in self.iterator:
            yield _rows(batch[0] if isinstance(batch, tuple) else batch)

    def save(self) -> Any:
        return self.iterator.get_state()

    def load(self, state: Any) -> None:
        self.iterator.set_state(state)


def _rows(batch: Any) -> list[int]:
    return (
        list(dict.fromkeys(int(row) - 1 for row in batch["ids"].reshape(-1) if row))
        if isinstance(batch, dict)
        else batch.tolist()
    )


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
