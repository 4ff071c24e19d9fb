"""What the benchmarks share: material that is made here, and how a result is printed."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


def make_entry(
    root: Path, num_rows: int, mean_tokens: int, seed: int = 0, rows_per_part: int | None = None
) -> str:
    """A cache entry of random rows, of about log-normal length; returns its uri."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter

    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean_tokens), 0.5, num_rows), 8, 8 * mean_tokens).astype(np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = rng.integers(3, 1000, int(lengths.sum()), dtype=np.int32)
    mask = (rng.random(len(ids)) < 0.5).astype(np.uint8)
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids)),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
            "source_row": pa.array(np.arange(num_rows)),
        }
    )
    recipe = {"rows": num_rows, "mean_tokens": mean_tokens, "seed": seed}
    writer = EntryWriter(open_store(str(root)), cache_key(recipe))
    starts = range(0, num_rows, rows_per_part or num_rows)
    parts = [
        writer.write_part(number, table.slice(start, rows_per_part), {})
        for number, start in enumerate(starts)
    ]
    writer.commit(parts, recipe, {"vocab_size": 1000, "pad_token_id": 0})
    return writer.uri


def show(title: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Print a Markdown table, and one JSON object as the last line."""
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    date = datetime.date.today().isoformat()
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(
        f"### {title}\n\n{date}, {machine['cpus']} cores, {machine['machine']}, Python {machine['python']}\n"
    )
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(name)) for name in names) + " |")
    print()
    print(
        json.dumps({"title": title, "date": date, "machine": machine, "rows": list(rows), **facts}),
        flush=True,
    )


def quiet_ray(num_cpus: int = 4, object_store_mb: int = 500) -> None:
    """A local Ray for a benchmark."""
    import ray

    store = object_store_mb * 2**20
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=store,
        logging_level="ERROR",
        log_to_driver=False,
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit("this module holds what the benchmarks share; run one of them")
