"""A step of routed experts (uint8 [L, 94, 8]) from the mapped part to the worker's memory, against one memcpy.

    python benchmarks/payload.py [--mb 1000]

The floor is `numpy.copyto` of the same bytes between memory that is there already; fresh memory is timed beside it,
because a first touch costs more than a copy. Times are CPU seconds of one core, the best of three.

Figures (11-22): 1 GB of per-token columns is read and collated at 0.68 of the speed of memcpy (aim 0.5).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from raysvc.actors.staging.slots import StagingOptions
from raysvc.actors.staging.staging import Staging
from raysvc.cache.entry import Entry
from raysvc.cache.key import cache_key
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.chat.carry import arrow_values
from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan

CELL = (94, 8)
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "experts")


def best(call: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of CPU time."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def entry_of(folder: str, num_bytes: int) -> Entry:
    """Rows of some 1,000 tokens with their experts."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, max(2, num_bytes // 752_000)).astype(np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())
    experts = np.frombuffer(rng.bytes(total * 752), np.uint8).reshape(total, *CELL)
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(
                offsets, pa.array(rng.integers(0, 9, total).astype(np.int32))
            ),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(np.ones(total, np.uint8))),
            "source_row": pa.array(np.arange(len(lengths))),
            "experts": pa.ListArray.from_arrays(offsets, arrow_values(experts)),
        }
    )
    store, recipe = open_store(folder), {"benchmark": "payload"}
    writer = EntryWriter(store, cache_key(recipe))
    writer.commit([writer.write_part(0, table, {})], recipe, {})
    return Entry.open(store, writer.key)


def main() -> None:
    """Print a line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        entry = entry_of(folder, args.mb * 1_000_000)
        config = PlanConfig(batch_size=entry.num_rows, layout="packed", shuffle="none", columns=COLUMNS)
        [mini] = Plan(config, entry.lengths()).step(0, 1).mini_batches

        def collated() -> object:
            return collate_mini_batch(
                entry.read(mini.row_ids), mini, CollateSpec(step=0, mini_index=0, layout="packed", pad_token_id=0,
                columns=COLUMNS)
            )[0]  # fmt: skip

        shard = collated()
        nbytes = shard.arrays["experts"].nbytes  # type: ignore[attr-defined]
        source, target = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        source[:] = 1
        target[:] = 2
        staging, number = Staging(0, "cpu", StagingOptions()), iter(range(100))

        def staged() -> None:
            key = (next(number), 0)
            staging.put(key, shard)  # type: ignore[arg-type]
            staging.take(key, 60.0)
            staging.release()

        seconds = {
            "memcpy, memory that is there": best(lambda: np.copyto(target, source)),
            "memcpy into fresh memory": best(lambda: source.copy()),
            "read and collate": best(collated),
            "staging into a slot of the ring": best(staged),
        }
        floor = seconds["memcpy, memory that is there"]
        fresh = seconds["memcpy into fresh memory"]
        print(f"{nbytes / 1e9:.2f} GB in {entry.num_rows} rows, {entry.num_tokens} tokens")
        for name, value in seconds.items():
            print(
                f"{name:34} {value * 1e3:8.0f} ms  {nbytes / value / 1e9:6.2f} GB/s  "
                f"{floor / value:.2f} of memcpy, {fresh / value:.2f} of one into fresh memory"
            )


if __name__ == "__main__":
    main()
