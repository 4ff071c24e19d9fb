"""Tables, entries and stand-in stores for the tests of the cache."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from raysvc.cache import names
from raysvc.cache.key import cache_key
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.cache.writer import EntryWriter

RECIPE = {"source": {"files": [{"size": 3, "sha256": "ab"}]}, "format_version": 1}
KEY = cache_key(RECIPE)


def make_table(num_rows: int, seed: int = 0, first_row: int = 0, max_length: int = 9) -> pa.Table:
    """Rows with per-token and per-row columns of several types; some rows are empty."""
    rng = np.random.default_rng([seed, first_row, num_rows])
    lengths = rng.integers(0, max_length + 1, num_rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())

    def per_token(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    return pa.table(
        {
            "input_ids": per_token(rng.integers(0, 1 << 17, total).astype(np.int32)),
            "loss_mask": per_token(rng.integers(0, 2, total).astype(np.uint8)),
            "logprobs": per_token(rng.normal(size=total).astype(np.float32)),
            "source_row": pa.array(np.arange(first_row, first_row + num_rows)),
            "solved": pa.array(rng.integers(0, 2, num_rows).astype(bool)),
            "reward": pa.array(rng.normal(size=num_rows).astype(np.float32)),
            "uid": pa.array([f"prompt-{i // 2}" for i in range(num_rows)], pa.string()),
        }
    )


def make_slices(sizes: tuple[int, ...] = (5, 0, 7), seed: int = 0) -> list[pa.Table]:
    """One table per slice; a size of 0 is a slice whose rows were all dropped."""
    firsts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return [make_table(size, seed, first) for size, first in zip(sizes, firsts, strict=False)]


def build(store: Store, slices: list[pa.Table] | None = None, recipe: dict = RECIPE, **writer_options):
    """Build a whole entry as a driver does: go on from the receipts, write what is missing, commit."""
    slices = make_slices() if slices is None else slices
    writer = EntryWriter(store, cache_key(recipe), **writer_options)
    done = writer.receipts()
    receipts = [
        done.get(index) or writer.write_part(index, table, {"rows": table.num_rows})
        for index, table in enumerate(slices)
    ]
    return writer.commit(receipts, recipe, {"rows": sum(table.num_rows for table in slices)})


def wait_until_unused(root: str | Path | Store, within_s: float = 60.0) -> None:
    """Return once no entry under `root` is marked as used; a thread ends the marks of readers that are let go of."""
    store = open_store(str(root)) if isinstance(root, str | Path) else root
    until = time.monotonic() + within_s
    while marks := _marks(store):
        assert time.monotonic() < until, f"still used: {marks}"
        gc.collect()
        time.sleep(0.01)


def _marks(store: Store) -> list[str]:
    folders = [item.name for item in store.scan() if item.is_folder]
    return [
        f"{folder}/{name}" for folder in folders for name in store.list(folder) if names.USE.fullmatch(name)
    ]
