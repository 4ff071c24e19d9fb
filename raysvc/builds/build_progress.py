"""Defines what a build tells while it runs: ticks for the progress line, and metrics.

Always true:
- a rate is of the work: its clock starts when the first slice does, not when a cluster is asked for;
- a worker that has brought nothing for twice the longest pause of any worker is not counted, nor is its node: it may be gone;
- a build whose first rows are nearly all quarantined ends there, with examples; over slices that are too short to tell
  alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from raysvc.chat.row_counter import FirstRows
from raysvc.chat.row_counts import Quarantined, RowCounts
from raysvc.job.config import JobConfig
from raysvc.metrics import record
from raysvc.progress import Progress, Tick
from raysvc.redact import redacted

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.slices import Slice

LEAST_PAUSE_S = 5.0
FIRST_ROWS = 10_000  # of a build; when so many are known it goes on to its end


class BuildMeter:
    """Turns receipts into ticks and metrics."""

    def __init__(
        self,
        progress: Progress,
        slices: Sequence[Slice],
        done: Collection[Receipt],
        job: JobConfig,
        num_bytes: int,
    ) -> None:
        """Nothing is told yet.

        Args:
            slices: of the whole source.
            done: receipts of an earlier builder.
            job: names the source, and says how many rows may be quarantined.
            num_bytes: of the whole source.
        """
        self._progress, self._source = progress, source_tag(job)
        self._first_rows = FirstRows(job.max_quarantine)
        self._rows = {piece.index: piece.num_rows for piece in slices}
        self._total, self._num_bytes = sum(self._rows.values()), num_bytes
        self._asked = time.time()
        self._work_began: float | None = None  # when the first slice of this build did
        self._resumed = self._done = sum(self._rows[one.slice_index] for one in done)
        self._slices_done = len(done)
        self._tokens = 0
        self._row_counts = RowCounts()
        self._examples: list[Quarantined] = []
        self._heard: dict[tuple[str, int], float] = {}  # of each worker, when it last brought a slice
        self._pause = LEAST_PAUSE_S  # the longest between two slices of a worker
        self._slowest: tuple[float, int, str] = (0.0, 0, "")  # seconds, slice, host

    def waiting(self, what: str) -> None:
        """Nothing is done until `what` is there."""
        self._tick(waiting=what)

    def add(self, receipt: Receipt) -> None:
        """A slice was finished.

        Raises:
            QuarantineExceeded: the first rows are nearly all quarantined.
        """
        self._slices_done += 1
        self._tokens += receipt.part.num_tokens
        self._note_worker(receipt)
        row_counts = RowCounts(**receipt.meta["row_counts"])
        self._done += self._rows.get(receipt.slice_index, row_counts.rows_in)
        self._record(receipt, row_counts)
        self._tick()
        self._check_first_rows(receipt, row_counts)

    def finish(self) -> None:
        """The entry was finished."""
        record("build_seconds", time.time() - self._asked, source=self._source)
        self._tick(final=True)

    def _check_first_rows(self, receipt: Receipt, row_counts: RowCounts) -> None:
        if self._row_counts.rows_in >= FIRST_ROWS:
            return
        self._row_counts += row_counts
        self._examples += [Quarantined(**item) for item in receipt.meta["examples"]]
        self._first_rows.check(self._row_counts.rows_in, self._row_counts.quarantined, self._examples)

    def _note_worker(self, receipt: Receipt) -> None:
        worker = receipt.meta.get("worker")
        if worker is None:
            return
        began = max(float(worker["began_s"]), self._asked)  # clocks of nodes differ
        self._work_began = min(began, self._work_began or began)
        who, now = (worker["host"], worker["pid"]), time.time()
        self._pause = max(self._pause, worker["seconds"], now - self._heard.get(who, now))
        self._heard[who] = now
        self._slowest = max(self._slowest, (worker["seconds"], receipt.slice_index, worker["host"]))

    def _record(self, receipt: Receipt, row_counts: RowCounts) -> None:
        record("build_rows", row_counts.rows_in, source=self._source)
        record("build_tokens", receipt.part.num_tokens, source=self._source)
        record("quarantined_rows", sum(row_counts.quarantined.values()), source=self._source)
        record("dropped_rows", sum(row_counts.dropped.values()), source=self._source)
        record("truncated_rows", row_counts.rows_truncated, source=self._source)
        record("truncated_tokens", row_counts.tokens_truncated, source=self._source)

    def _tick(self, *, final: bool = False, waiting: str = "") -> None:
        facts = {**self._rates(final), **self._where()}
        if self._resumed:
            facts["resumed rows"] = self._resumed
        self._progress(Tick("tokenize", self._done, self._total or None, "rows", facts, final, waiting))

    def _rates(self, final: bool) -> dict[str, Any]:
        if self._work_began is None:
            return {}
        seconds = max(time.time() - self._work_began, 1e-3)
        rate = (self._done - self._resumed) / seconds
        facts: dict[str, Any] = {"rows/s": round(rate), "tokens/s": round(self._tokens / seconds)}
        if self._total == 0:  # nobody knows how many rows there are
            return facts
        facts["MB/s"] = round(self._num_bytes * rate / self._total / 1e6, 1)
        if rate > 0 and not final:
            facts["ETA"] = f"{(self._total - self._done) / rate:.0f} s"
        return facts

    def _where(self) -> dict[str, Any]:
        """Tells of a build of several workers how many are at work, where, and the slice that took longest."""
        if len(self._heard) < 2 or self._total == 0:
            return {}
        working = [who for who, heard in self._heard.items() if time.time() - heard <= 2 * self._pause]
        seconds, index, host = self._slowest
        done = self._num_bytes * self._done / self._total
        return {
            "nodes": len({host for host, _ in working}),
            "workers": len(working),
            "slices": f"{self._slices_done}/{len(self._rows)}",
            "MB": f"{done / 1e6:.0f}/{self._num_bytes / 1e6:.0f}",
            "slowest": f"slice {index} ({seconds:.1f} s on {host})",
        }


def source_tag(job: JobConfig) -> str:
    """A short name of the source for metrics: the dataset, or the last name of the first path."""
    return redacted(job.source.names[0]).rstrip("/").rpartition("/")[2]
