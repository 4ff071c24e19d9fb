"""Columns that arrive after their rows: which lines say something new, and where each value lies. Pure.

Always true:
- a value that is there stays: a line that comes again changes nothing;
- a line of a group or row that was never put is refused by name, and so is a vector of another length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from raysvc.actors.rollouts.forgotten_keys import Key
from raysvc.actors.rollouts.group_rows import Chunk, GroupRows
from raysvc.errors import SourceError

PLACE = ("uid", "attempt", "row")  # what says which row a line belongs to


def late_names(table: pa.Table) -> list[str]:
    """Full names of the columns of a table of late values."""
    return [name for name in table.column_names if name not in PLACE]


def refuse_lines(
    groups: Mapping[Key, GroupRows],
    is_known: Callable[[Key], bool],
    table: pa.Table,
    coming: Mapping[Key, range],
) -> None:
    """Refuse lines of what is not there.

    Args:
        is_known: whether a group was ever put; one that has no rows any more was trained and forgotten.
        coming: rows that the same put brings.

    Raises:
        SourceError: no such group or row, or a vector that is not as long as its row.
    """
    names = late_names(table)
    lengths = {n: pc.list_value_length(table.column(n)).to_numpy() for n in names if n.startswith("token.")}
    for line, (uid, attempt, row) in enumerate(lines_of(table)):
        group = groups.get((uid, attempt))
        if row in coming.get((uid, attempt), ()):
            continue
        if group is None:
            if is_known((uid, attempt)):
                continue
            raise SourceError(f"group {uid!r}", f"was never put (attempt {attempt})", "put its rows first")
        if not 0 <= row < group.num_rows:
            what = f"has no row {row}, it has {group.num_rows} rows"
            raise SourceError(f"group {uid!r}", what, "put its rows first")
        for name, own in lengths.items():
            if own[line] != group.lengths[row]:
                what = (
                    f"has {own[line]} values in {name[6:]!r} for the {group.lengths[row]} tokens of row {row}"
                )
                raise SourceError(f"group {uid!r}", what, "give every token a value")


def fresh_lines(groups: Mapping[Key, GroupRows], table: pa.Table) -> list[int]:
    """Lines that say something new."""
    names, fresh = late_names(table), []
    for line, (uid, attempt, row) in enumerate(lines_of(table)):
        group = groups.get((uid, attempt))
        if group is not None and any(row not in group.late.get(name, {}) for name in names):
            fresh.append(line)
    return fresh


def add_late(groups: Mapping[Key, GroupRows], chunk: Chunk, table: pa.Table) -> list[Key]:
    """Note where the late values of a table are; returns the groups that got some."""
    names, touched = late_names(table), dict[Key, None]()
    for line, (uid, attempt, row) in enumerate(lines_of(table)):
        if (group := groups.get((uid, attempt))) is not None:
            touched[(uid, attempt)] = None
            for name in names:
                group.late.setdefault(name, {}).setdefault(row, (chunk, line))
    chunk.num_groups = len(touched)
    return list(touched)


def lines_of(table: pa.Table) -> Iterable[tuple[str, int, int]]:
    """uid, attempt and row of each line."""
    return zip(*(table.column(name).to_pylist() for name in PLACE), strict=True)
