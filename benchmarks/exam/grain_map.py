"""Grain's MapDataset: shuffle, repeat, a slice a rank, batch. `grain_elastic` builds on it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from epochs import converted, ids, long_rows, numbers, sources
from words import cut_all, long_number

VERSION = f"grain {importlib.metadata.version('grain')}"
PROMISE = "iterators checkpoint with get_state and set_state; random access makes resuming exact"
SETTINGS = "MapDataset.source.seed.shuffle.repeat[rank::world].batch; mp_prefetch for workers; FirstFitPackIterDataset; mix"
NOT_OFFERED = {"world": "another number of ranks is for ElasticIterator, see `grain_elastic`"}
IMPORTS = ("grain",)


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        import grain

        if o.get("long"):
            self.iterator = iter(self.stream(_array_records(rows), o))
            return
        streams = []
        for path in sources(rows, o):
            one = grain.MapDataset.source(_padded(path) if o.get("ids") else numbers(path)).seed(o["seed"])
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
            packs = stream.map(lambda row: {"ids": row["ids"][: row["length"]]})
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


def _array_records(rows: Path) -> Any:
    """Rows of a stream in the format that grain reads at random."""
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    with converted(rows, ".records") as (folder, is_old):
        file = folder / "rows"
        if is_old:
            folder.mkdir()
            writer = ArrayRecordWriter(str(file), "group_size:1")
            for row in long_rows(rows):
                writer.write(row.tobytes())
            writer.close()
    source = grain.sources.ArrayRecordDataSource(str(file))
    return grain.MapDataset.source(source).map(lambda text: np.frombuffer(text, np.int32))


def _padded(rows: Path) -> list[dict[str, Any]]:
    """Rows of one shape: batches are made of such."""
    width = 12
    return [{"ids": np.pad(one, (0, width - len(one))), "length": len(one)} for one in ids(rows)]


def _rows(batch: Any) -> list[Any]:
    if not isinstance(batch, dict):
        return [*map(long_number, batch)] if batch.ndim > 1 else list(batch.tolist())
    of = batch.get("ids_segment_ids")
    if of is None:
        of = np.arange(batch["ids"].shape[1]) < batch["length"][:, None]
    return cut_all(batch["ids"].tolist(), of.tolist())


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
