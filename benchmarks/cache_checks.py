"""What comparing the bytes of local parts costs a scan.

    python benchmarks/cache_checks.py [--rows 1000000] [--repeats 8]

The same scan of one entry with the comparison and with it taken out, in turn, a process each. *cold*: the kernel was told to forget
the files; *warm*: they were read just before. Read the best: all else on the machine adds to the others.

Figures (11-21): the first scan takes 1.04 times one without checksums (aim 1.05).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, show

TOKENS, BATCH = 64, 1024  # of a row, and rows of a read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(*scan(options.child[0], options.child[1] == "checked"))
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        uri = make_entry(Path(folder) / "cache", options.rows, TOKENS)
        os.sync()
        rows: list[dict[str, Any]] = []
        for state in ("warm", "cold"):
            found: dict[str, list[tuple[float, ...]]] = {"unchecked": [], "checked": []}
            for _ in range(options.repeats + 1):
                for how, times in found.items():
                    prepare(uri, state)
                    times.append(child(uri, how))
            rows += [row(state, how, times[1:], found["unchecked"][1:]) for how, times in found.items()]
        show("What comparing the bytes of local parts costs a scan", rows)


def prepare(uri: str, state: str) -> None:
    """Bring the files into memory, or out of it."""
    for path in Path(uri).glob("*.arrow"):
        file = os.open(path, os.O_RDONLY)
        if state == "cold":
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(file, 1 << 22):
                pass
        os.close(file)


def child(uri: str, how: str) -> tuple[float, ...]:
    """Wall and processor seconds of a scan in a process of its own."""
    command = [sys.executable, __file__, "--child", uri, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


def scan(uri: str, checked: bool) -> tuple[float, float]:
    """Read every value of every row once."""
    from raysvc.cache.find import open_finished
    from raysvc.cache.local.blocks import Blocks

    if not checked:
        Blocks._compare = lambda self, blocks: None  # type: ignore[method-assign]
    entry = open_finished(uri)
    wall, processor = time.perf_counter(), time.process_time()
    for at in range(0, len(entry), BATCH):
        rows = entry.read(entry.row_ids(at, min(at + BATCH, len(entry))))
        rows.tokens["input_ids"].sum(dtype=np.int64) + rows.tokens["loss_mask"].sum()
    return time.perf_counter() - wall, time.process_time() - processor


def row(
    state: str, how: str, times: list[tuple[float, ...]], plain: list[tuple[float, ...]]
) -> dict[str, Any]:
    """One line of the table."""
    wall, processor = (min(column) for column in zip(*times, strict=True))
    plain_wall, plain_processor = (min(column) for column in zip(*plain, strict=True))
    return {
        "files": state,
        "scan": how,
        "wall s": round(wall, 3),
        "of unchecked": round(wall / plain_wall, 3),
        "processor s": round(processor, 3),
        "of unchecked (processor)": round(processor / plain_processor, 3),
    }


if __name__ == "__main__":
    main()
