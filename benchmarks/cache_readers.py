"""Readers of an entry on a local disk, each run by `benchmarks/cache.py` in a process of its own.

python benchmarks/cache_readers.py raysvc ENTRY
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import numpy as np
from cache_entries import BATCH, Times, Watch, memory_mb, run_one

Opened = tuple[int, Callable, Callable]


def measured(imports: Callable[[], object], open_: Callable[[], Opened]) -> Times:
    """Time and memory of opening, one random batch and a scan; `open_` gives rows, read and scan."""
    imports()
    before, watch = memory_mb(), Watch()
    num_rows, read, scan = open_()
    opened, opened_cpu = watch.lap()
    read(np.random.default_rng(0).integers(0, num_rows, BATCH))
    first, first_cpu = watch.lap()
    total = scan()
    scanned, _ = watch.lap()
    times = {"open": opened, "batch": first, "start_cpu": opened_cpu + first_cpu, "scan": scanned}
    after = memory_mb()
    return {**times, **{name: after[name] - before[name] for name in after}, "total": total}


def read_raysvc(path: str) -> Times:
    """This project."""

    def imports() -> None:
        import pyarrow.compute  # noqa: F401

        import raysvc.cache.entry
        import raysvc.cache.find
        import raysvc.cache.gather
        import raysvc.cache.parts  # noqa: F401

    def open_() -> Opened:
        from raysvc.cache.find import open_finished

        entry = open_finished(path)

        def scan() -> int:
            batches = (
                entry.read(entry.row_ids(at, min(at + BATCH, len(entry))))
                for at in range(0, len(entry), BATCH)
            )
            return sum(
                int(b.tokens["input_ids"].sum(dtype=np.int64) + b.tokens["loss_mask"].sum()) for b in batches
            )

        return entry.num_rows, entry.read, scan

    return measured(imports, open_)


def read_datasets(path: str) -> Times:
    """`datasets`, memory-mapped, with numpy as its format."""

    def imports() -> None:
        import datasets  # noqa: F401

    def open_() -> Opened:
        import datasets

        data = datasets.load_from_disk(path).with_format("numpy")

        def scan() -> int:
            batches = (data[at : at + BATCH] for at in range(0, len(data), BATCH))
            return sum(
                int(ids.sum(dtype=np.int64) + mask.sum())
                for b in batches
                for ids, mask in zip(b["input_ids"], b["loss_mask"], strict=True)
            )

        return len(data), lambda ids: data[ids], scan

    return measured(imports, open_)


def read_to_list(path: str) -> Times:
    """`datasets.load_from_disk(...).to_list()`: all rows as Python objects."""

    def imports() -> None:
        import datasets  # noqa: F401

    def open_() -> Opened:
        import datasets

        rows = datasets.load_from_disk(path).to_list()
        return (
            len(rows),
            lambda ids: [rows[i] for i in ids],
            lambda: sum(sum(r["input_ids"]) + sum(r["loss_mask"]) for r in rows),
        )

    return measured(imports, open_)


def read_streaming(path: str) -> Times:
    """mosaicml-streaming, its own format, not shuffled."""

    def imports() -> None:
        stub_torchvision()
        import streaming  # noqa: F401

    def open_() -> Opened:
        import streaming

        data = streaming.StreamingDataset(local=path, shuffle=False, batch_size=BATCH)

        def scan() -> int:
            rows = (data[i] for i in range(len(data)))
            return sum(int(r["input_ids"].sum(dtype=np.int64) + r["loss_mask"].sum()) for r in rows)

        return len(data), lambda ids: [data[int(i)] for i in ids], scan

    return measured(imports, open_)


def write_streaming(path: str, out: str) -> Times:
    """The entry's rows in mosaicml-streaming's format."""
    stub_torchvision()
    from streaming import MDSWriter

    from raysvc.cache.find import open_finished

    entry = open_finished(path)
    columns = {"input_ids": "ndarray:int32", "loss_mask": "ndarray:uint8"}
    with MDSWriter(out=out, columns=columns, size_limit=1 << 24) as writer:
        for at in range(0, len(entry), BATCH):
            batch = entry.read(entry.row_ids(at, min(at + BATCH, len(entry))))
            for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
                writer.write({name: batch.tokens[name][a:b] for name in columns})
    return {}


def stub_torchvision() -> None:
    """mosaicml-streaming imports torchvision for images; nothing of it is used here."""
    import transformers.feature_extraction_utils  # noqa: F401  looks for torchvision and must not find the stub

    names = ("", ".datasets", ".transforms", ".transforms.functional")
    for name in names:
        sys.modules[f"torchvision{name}"] = types.ModuleType(f"torchvision{name}")
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_one(
        {
            "raysvc": read_raysvc,
            "datasets, mapped": read_datasets,
            "datasets .to_list()": read_to_list,
            "mosaicml-streaming": read_streaming,
            "write streaming": write_streaming,
        },
        *sys.argv[1:],
    )
