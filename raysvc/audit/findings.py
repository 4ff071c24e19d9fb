"""Defines what an audit found, counted and kept small.

Always true:
- three rows of each defect are kept, and the ids of all that a plan can leave out;
- findings stand in the order of their severity, the commonest first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from raysvc.audit.defects import DEFECTS, SEVERITIES, Severity

ROWS_SHOWN = 3


class ShownRow(NamedTuple):
    """A row with a defect: its address, and a short text."""

    where: str
    text: str


@dataclass(frozen=True)
class DefectFound:
    """A defect that some rows have.

    Attributes:
        defect: name in `DEFECTS`.
        what: is wrong with the rows.
        rows: how many.
        examples: three of them.
        remedy: what to type; `{job}` stands for the job file.
    """

    defect: str
    severity: Severity
    what: str
    rows: int
    examples: tuple[ShownRow, ...]
    remedy: str


@dataclass(frozen=True)
class AuditReport:
    """Holds what was looked at, and found.

    Attributes:
        rows: name of a source -> rows.
        findings: the worst first.
        skipped: defect -> why it was not looked for, or not everywhere.
        odd_ids: rows of the job with an error or a warning, which `plan.rows.exclude` takes; ascending.
    """

    rows: dict[str, int]
    findings: tuple[DefectFound, ...]
    skipped: dict[str, str]
    seconds: float
    odd_ids: tuple[int, ...] = ()


@dataclass
class Findings:
    """Collects them.

    Attributes:
        counts: name of a defect -> rows.
        examples: name -> the first rows.
        ids: of rows that a plan can leave out.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[ShownRow]] = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)

    def add(self, name: str, row_id: int | None, where: str, text: str) -> None:
        """Count a row with a defect.

        Args:
            row_id: None of a row that no plan has.
        """
        self.counts[name] += 1
        if len(examples := self.examples.setdefault(name, [])) < ROWS_SHOWN:
            examples.append(ShownRow(where, text))
        if row_id is not None and DEFECTS[name].severity != "note":
            self.ids.add(row_id)

    def report(self, rows: dict[str, int], skipped: dict[str, str], seconds: float) -> AuditReport:
        """All that was found."""
        found = [self._found(name) for name in self.counts]
        found.sort(key=lambda one: (SEVERITIES.index(one.severity), -one.rows, one.defect))
        return AuditReport(rows, tuple(found), skipped, seconds, tuple(sorted(self.ids)))

    def _found(self, name: str) -> DefectFound:
        defect = DEFECTS[name]
        return DefectFound(
            name, defect.severity, defect.what, self.counts[name], tuple(self.examples[name]), defect.remedy
        )
