"""Counts what happens to the rows of one slice, while it happens, and decides whether a build goes on after its first rows.

Always true:
- each source row is counted once, by whichever fate comes first;
- no more than `EXAMPLES` rows of one reason are kept, whatever the number of rows;
- reasons are limited too: beyond `REASONS` of them, faults are counted together;
- where nearly all of the first rows of a build are quarantined, the job is wrong and not the rows, and it ends: after `LEAST` rows,
  and only when more of its rows so far are quarantined than `NEARLY_ALL` and than the job allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raysvc.chat.row_counts import Quarantined, RowCounts, quarantine_exceeded
from raysvc.chat.row_errors import RowDropped, RowFault

EXAMPLES = 50
REASONS = 50
OTHER = "other faults"


class RowCounter:
    """Fates of the rows of one slice.

    Attributes:
        dataset: label for the examples.
        first_rows: of the build; None: the slice is read to its end.
        on_left_out: told of every row that is not written.
    """

    def __init__(
        self,
        dataset: str,
        first_rows: FirstRows | None = None,
        on_left_out: Callable[[int, RowFault | RowDropped], None] | None = None,
    ) -> None:
        self.dataset, self._on_left_out = dataset, on_left_out
        self._first_rows, self._read = first_rows, 0
        self._dropped: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()
        self._examples: list[Quarantined] = []
        self._normalized: Counter[str] = Counter()
        self._truncated = self._reasoning_removed = self._kept_by_turns = 0
        self._endless_turns = self._endless_rows = 0

    @property
    def count(self) -> int:
        """Rows that were left out so far."""
        return self._dropped.total() + self._quarantined.total()

    @property
    def examples(self) -> tuple[Quarantined, ...]:
        """A few quarantined rows of each reason."""
        return tuple(self._examples)

    def read(self, rows: int) -> None:
        """Counts so many more rows that have been written, dropped or quarantined.

        Raises:
            QuarantineExceeded: nearly all of the first rows were quarantined.
        """
        self._read += rows
        if self._first_rows is not None:
            self._first_rows.check(self._read, self._quarantined, self._examples)

    def leave_out(self, source_row: int, why: RowFault | RowDropped) -> None:
        """Count a row that is not written."""
        if self._on_left_out is not None:
            self._on_left_out(source_row, why)
        if isinstance(why, RowDropped):
            self._dropped[why.reason] += 1
            return
        reason = why.reason if why.reason in self._quarantined or len(self._quarantined) < REASONS else OTHER
        self._quarantined[reason] += 1
        if self._quarantined[reason] <= EXAMPLES:
            detail = why.detail if reason == why.reason else str(why)
            self._examples.append(Quarantined(source_row, reason, detail, self.dataset))

    def note(self, changes: Iterable[str]) -> None:
        """Count a written row whose messages were brought into normal form."""
        self._normalized.update(changes)

    def remove_reasoning(self, messages: int, kept_by_turns: int) -> None:
        """Count trained messages that are written without their reasoning, and how many of them were seen to keep it as turns."""
        self._reasoning_removed += messages
        self._kept_by_turns += kept_by_turns

    def leave_open(self, turns: int, rows: int) -> None:
        """Count trained turns that are written without an end, and rows that have no other ones."""
        self._endless_turns += turns
        self._endless_rows += rows

    def truncate(self, rows: int) -> None:
        """Count rows that are written with tokens cut away."""
        self._truncated += rows

    def row_counts(self, written: int, rendered: int, trained: int, context: int) -> RowCounts:
        """Row counts of the slice, checked.

        Args:
            written: source rows that were written.
            rendered: tokens of the written rows before truncation.
            trained: tokens with loss that were written.
            context: tokens without loss that were written.
        """
        row_counts = RowCounts(
            rows_in=written + self.count,
            rows_written=written,
            rows_truncated=self._truncated,
            reasoning_removed=self._reasoning_removed,
            reasoning_kept_by_turns=self._kept_by_turns,
            turns_without_end=self._endless_turns,
            rows_without_end=self._endless_rows,
            dropped=dict(self._dropped),
            quarantined=dict(self._quarantined),
            normalized=dict(self._normalized),
            tokens_rendered=rendered,
            tokens_trained=trained,
            tokens_context=context,
            tokens_truncated=rendered - trained - context,
        )
        row_counts.check()
        return row_counts


LEAST = 1000
NEARLY_ALL = 0.9


@dataclass(frozen=True)
class FirstRows:
    """See the module.

    Attributes:
        max_quarantine: of the job.
        before: rows of the build that come before those that are counted here.
    """

    max_quarantine: float
    before: int = 0

    def check(self, rows: int, quarantined: Mapping[str, int], examples: Sequence[Quarantined]) -> None:
        """Decide by what became of the first `rows` rows.

        Args:
            quarantined: reason -> rows.
            examples: of them.

        Raises:
            QuarantineExceeded: nearly all of them are quarantined.
        """
        if self.before >= LEAST or rows < LEAST:
            return
        count = sum(quarantined.values())
        if count > max(self.max_quarantine, NEARLY_ALL) * (self.before + rows):
            what = f"{count} of the first {rows} rows could not be verified"
            raise quarantine_exceeded(what, quarantined, examples)
