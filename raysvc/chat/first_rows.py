"""Decides whether a build goes on after its first rows: where nearly all of them are quarantined, the job is wrong and not the rows.

Always true:
- a build ends early only after `LEAST` rows, and only when more of its rows so far are quarantined than `NEARLY_ALL` and
  than the job allows;
- rows that are not counted here, because other workers have them, are taken for good ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raysvc.chat.row_counts import Quarantined, quarantine_exceeded

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
