"""What a build tells while it runs: ticks for the progress line, and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raysvc.chat.row_counts import Books
from raysvc.config import JobConfig
from raysvc.metrics import record
from raysvc.progress import Progress, Tick
from raysvc.redact import redacted

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.slices import Slice


class Meter:
    """Turns receipts into ticks and metrics."""

    def __init__(
        self, progress: Progress, slices: Sequence[Slice], done: Iterable[Receipt], source: str
    ) -> None:
        self._progress = progress
        self._source = source
        self._total = sum(piece.num_rows for piece in slices)
        self._begin = time.perf_counter()
        self._rows = {piece.index: piece.num_rows for piece in slices}
        self._done = sum(self._rows[one.slice_index] for one in done)
        self._resumed = self._done
        self._tokens = 0
        self._tick(final=False)

    def add(self, receipt: Receipt) -> None:
        """A slice was finished."""
        self._done += self._rows[receipt.slice_index]
        self._tokens += receipt.part.num_tokens
        self._record(receipt)
        self._tick(final=False)

    def finish(self) -> None:
        """The entry was finished."""
        record("build_seconds", time.perf_counter() - self._begin, source=self._source)
        self._tick(final=True)

    def _record(self, receipt: Receipt) -> None:
        books = Books.from_json(receipt.meta["books"])
        record("build_rows", books.rows_in, source=self._source)
        record("build_tokens", receipt.part.num_tokens, source=self._source)
        record("quarantined_rows", sum(books.quarantined.values()), source=self._source)
        record("dropped_rows", sum(books.dropped.values()), source=self._source)
        record("truncated_rows", books.rows_truncated, source=self._source)
        record("truncated_tokens", books.tokens_truncated, source=self._source)

    def _tick(self, *, final: bool) -> None:
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        rate = (self._done - self._resumed) / seconds
        facts: dict[str, Any] = {"rows/s": round(rate), "tokens/s": round(self._tokens / seconds)}
        if rate > 0 and not final:
            facts["ETA"] = f"{(self._total - self._done) / rate:.0f} s"
        if self._resumed:
            facts["resumed rows"] = self._resumed
        self._progress(Tick("tokenize", self._done, self._total, "rows", facts, final))


def source_tag(job: JobConfig) -> str:
    """A short name of the source for metrics: the dataset, or the last name of the first path."""
    return redacted(job.source.dataset or job.source.path[0]).rstrip("/").rpartition("/")[2]
