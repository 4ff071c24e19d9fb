"""Entries of random rows for `benchmarks/cache.py`, and what one process measures of itself."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BATCH = 1024
Times = dict[str, float]


def make_table(first_row: int, num_rows: int, mean_length: int) -> Any:
    """Random rows."""
    import pyarrow as pa

    rng = np.random.default_rng(first_row)
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, num_rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = rng.integers(0, 150_000, lengths.sum()).astype(np.int32)
    mask = rng.integers(0, 2, lengths.sum()).astype(np.uint8)
    columns = {
        name: pa.ListArray.from_arrays(offsets, pa.array(v))
        for name, v in (("input_ids", ids), ("loss_mask", mask))
    }
    return pa.table(columns | {"source_row": pa.array(np.arange(first_row, first_row + num_rows))})


def build_entry(store: Any, num_parts: int, rows_per_part: int, mean_length: int) -> str:
    """One entry; its URI."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.writer import EntryWriter

    recipe = {"benchmark": [num_parts, rows_per_part, mean_length]}
    writer = EntryWriter(store, cache_key(recipe))
    tables = (make_table(i * rows_per_part, rows_per_part, mean_length) for i in range(num_parts))
    writer.commit([writer.write_part(i, table, {}) for i, table in enumerate(tables)], recipe, {})
    return writer.uri


def memory_mb() -> Times:
    """Own memory and highest resident memory of this process, MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("anon", "RssAnon"), ("peak", "VmHWM"))}


class Watch:
    """Seconds on the clock and of the processor since it was made or last asked."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Both, and begin again."""
        wall, cpu = time.perf_counter(), time.process_time()
        lap = wall - self._wall, cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        return lap


def in_process(python: str, script: str, *arguments: str) -> Times:
    """What a script of this folder prints as its last line, from a fresh process."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{script} {arguments[0]}: {done.stderr[-2000:]}")
    result: Times = json.loads(done.stdout.splitlines()[-1])
    return result


def run_one(measures: Mapping[str, Callable[..., Times]], name: str, *arguments: str) -> None:
    """Measure in this process and print one line."""
    print(json.dumps(measures[name](*arguments)))
