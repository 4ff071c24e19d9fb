"""What a build of several nodes tells: nodes, workers, slices, bytes, time left, and the slowest slice."""

from __future__ import annotations

import pytest

from raysvc.builds import build_progress
from raysvc.builds.build_progress import BuildMeter
from raysvc.cache.manifest import Receipt
from raysvc.cache.part_info import PartInfo
from raysvc.chat.row_counts import RowCounts
from raysvc.job.config import JobConfig
from raysvc.pipelines.sources.slices import Slice
from raysvc.progress import Tick

ROWS, NUM_SLICES, NUM_BYTES, BEGAN = 100, 5, 50_000_000, 1_000_000.0


def receipt(index: int, host: str, pid: int, began: float, took: float) -> Receipt:
    meta = {
        "row_counts": RowCounts(rows_in=ROWS, rows_written=ROWS).to_json(),
        "examples": [],
        "worker": {"host": host, "pid": pid, "began_s": BEGAN + began, "seconds": took},
    }
    return Receipt(index, PartInfo(f"part-{index}", ROWS, 7 * ROWS, 1, "", 0, ""), {}, meta)


def test_a_build_of_several_nodes_names_nodes_workers_slices_bytes_and_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = BEGAN
    monkeypatch.setattr(build_progress, "time", type("Clock", (), {"time": staticmethod(lambda: now)}))
    job = JobConfig(source={"path": "rows.jsonl"}, tokenizer="tokenizer")
    slices = [Slice(index, index * ROWS, ROWS, ()) for index in range(NUM_SLICES)]
    ticks: list[Tick] = []
    meter = BuildMeter(ticks.append, slices, [receipt(0, "a", 9, -50, 40)], job, NUM_BYTES)
    now += 3  # a cluster is waited for
    meter.waiting("2 CPUs")
    assert (ticks[-1].waiting, ticks[-1].done, ticks[-1].facts) == ("2 CPUs", ROWS, {"resumed rows": ROWS})
    now += 2
    meter.add(receipt(1, "a", 1, began=3, took=2.0))
    assert "nodes" not in ticks[-1].facts, "one worker"
    meter.add(receipt(2, "b", 1, began=3, took=4.5))  # another process, though it has the same number
    now += 2
    meter.add(receipt(3, "b", 2, began=4, took=3.0))
    assert ticks[-1].facts == {
        "rows/s": 75,  # 300 rows of this build in 4 s of work
        "tokens/s": 525,
        "MB/s": 7.5,
        "ETA": "1 s",
        "nodes": 2,
        "workers": 3,
        "slices": "4/5",
        "MB": "40/50",
        "slowest": "slice 2 (4.5 s on b)",
        "resumed rows": ROWS,
    }
    now += 9  # longer than twice the pause of five seconds since `a` brought something, and not of `b`
    meter.waiting("")
    assert (ticks[-1].facts["nodes"], ticks[-1].facts["workers"]) == (1, 1), "of two the node may be gone"
    meter.add(receipt(4, "a", 1, began=5, took=1.0))
    assert (ticks[-1].facts["nodes"], ticks[-1].facts["workers"]) == (2, 3), "workers may pause so long"
    meter.finish()
    assert ticks[-1].final
    assert "ETA" not in ticks[-1].facts
    assert (ticks[-1].done, ticks[-1].total, ticks[-1].facts["slices"]) == (500, 500, "5/5")
