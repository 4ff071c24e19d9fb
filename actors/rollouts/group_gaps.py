"""Finds what of a spool is gone though nobody forgot it: the name of each record counts those before it.

    groups/000000000042.g1.17t12e7s40.<uid>-<digest>.arrow    17 tables and 12 records of events are older; the newest record of a
                                                              step, that of step 7, is number 40

Always true:
- a file of groups or columns that was forgotten is not missed, nor are events that a snapshot replaced, nor a step below `kept_from`;
- every other one is, once a record that was written after it is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import reduce
from itertools import groupby
from typing import NamedTuple

_NAME = re.compile(r"(?:(\d+)\.)?(\d+)\.g\d+\.(\d+)t(\d+)e(?:(\d+)s(\d+))?\.")
MOST_NAMED = 20  # gaps
_NONE = (-1, -1)


class Counts(NamedTuple):
    """What was written before a record.

    Attributes:
        tables: files of groups and of columns.
        events: records of events.
        step: (number, step) of the newest record of a step.
    """

    tables: int = 0
    events: int = 0
    step: tuple[int, int] = _NONE

    def __str__(self) -> str:
        number, step = self.step
        return f"{self.tables}t{self.events}e" + ("" if self.step == _NONE else f"{step}s{number}")

    def after(self, path: str) -> Counts:
        """Returns the counts of who was written after this record too; one whose name counts nothing changes nothing."""
        if (found := _Record.of(path)) is None:
            return self
        tables, events, step = found.behind()
        return Counts(max(self.tables, tables), max(self.events, events), max(self.step, step))


class _Record(NamedTuple):
    folder: str
    number: int
    step: int  # -1: not of a step
    before: Counts

    @classmethod
    def of(cls, path: str) -> _Record | None:
        folder, _, name = path.partition("/")
        if (found := _NAME.match(name)) is None:
            return None
        step, number, tables, events, last, its = (int(part or -1) for part in found.groups())
        return cls(folder, number, step if folder == "steps" else -1, Counts(tables, events, (its, last)))

    def behind(self) -> Counts:
        tables, events, step = self.before
        is_table = self.folder in ("groups", "columns")
        own = step if self.step < 0 else (self.number, self.step)
        return Counts(tables + is_table, events + (self.folder == "events"), own)


def gaps(paths: Iterable[str], kept_from: int, snapshot: str | None) -> list[str]:
    """Returns what is missing, a line each.

    Args:
        paths: folder and name of all records that are there, and of the tables that were forgotten.
        kept_from: no step below is asked for again.
        snapshot: the newest record that says all that the events before it said.
    """
    paths = list(paths)
    records = [found for path in paths if (found := _Record.of(path)) is not None]
    behind = reduce(Counts.after, paths, Counts())
    first = None if snapshot is None else _Record.of(f"events/{snapshot}")
    tables = set(range(behind.tables)) - {
        each.before.tables for each in records if each.folder in ("groups", "columns")
    }
    events = set(range(0 if first is None else first.before.events, behind.events)) - {
        each.before.events for each in records if each.folder == "events"
    }
    lines = _runs(tables, [(each.before.tables, each.number) for each in records], "groups or columns")
    lines += _runs(events, [(each.before.events, each.number) for each in records], "events")
    said = {each.before.step for each in records} - {(each.number, each.step) for each in records}
    lines += [
        f"the record of step {step}, number {number}" for number, step in sorted(said) if step >= kept_from
    ]
    return lines[:MOST_NAMED]


def _runs(missing: set[int], known: list[tuple[int, int]], what: str) -> list[str]:
    """Lines for ordinals that nothing has; `known` is what (records before it, number) each record says."""
    lines = []
    for _, run in groupby(enumerate(sorted(missing)), lambda pair: pair[1] - pair[0]):
        ordinals = [ordinal for _, ordinal in run]
        begin = max((number + 1 for count, number in known if count <= ordinals[0]), default=0)
        end = min(number - 1 for count, number in known if count > ordinals[-1])
        files = "file" if len(ordinals) == 1 else "files"
        lines.append(f"{len(ordinals)} {files} of {what}, of numbers {begin} to {end}")
        if len(lines) == MOST_NAMED:
            break
    return lines
