"""One schema for all puts of a server: what a put must look like, decided before anything of it is kept. Pure.

Axes: N sequences of a put, T their tokens.
Always true:
- the first put that is kept fixes the columns and their types; every later put has exactly these, or is refused by name;
- asking whether a put is admitted changes nothing;
- a value that is missing is filled with a declared default, or the put is refused; nothing becomes NaN;
- a column that is declared late is not in the rows: it arrives with them or after them, and is kept apart;
- what is admitted has the same columns in the same order, so tables of several puts are one table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from raysvc.errors import SourceError
from raysvc.rl.group import FIXED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

BUILT = ("attention_mask", "labels", "position_ids", "segment_ids")  # made by collation, of no put


class AdmittedPut(NamedTuple):
    """A put that obeys: its rows, and the late columns that came with it."""

    rows: pa.Table
    late: pa.Table | None


class GroupSpan(NamedTuple):
    """A group in a table: its rows [start, stop), which are rows `first` on of the group; `version` is that of the oldest row, or of the
    newest where `spans_of` is asked for it."""

    key: tuple[str, int]
    start: int
    stop: int
    version: int
    first: int
    closed: bool
    newest: int


@dataclass
class Schema:
    """See the module.

    Attributes:
        needed: columns that are trained, `plan.columns`.
        late: columns that may arrive after their rows.
        defaults: column -> the value of every row, or token, that lacks it.
        types: full name of each column ("token.logprobs", "row.reward") -> its type, as the first put that was kept had it.
        late_types: the same, of columns that came late.
    """

    needed: Sequence[str] = ()
    late: Collection[str] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    types: dict[str, pa.DataType] = field(default_factory=dict)
    late_types: dict[str, pa.DataType] = field(default_factory=dict)

    def admit(self, table: pa.Table) -> AdmittedPut:
        """The put as it is kept.

        Raises:
            SourceError: it breaks a rule; names the group, the column and both types.
        """
        table = with_growth(table)
        _check_fixed(table)
        table = _gathered(table)
        _check_places(table)
        late = [name for name in table.column_names if bare(name) in self.late]
        rows = self._filled(table.drop_columns(late) if late else table)
        known = self.types or self._first(rows)
        self._compare(rows, known)
        rows = rows.select([*FIXED, *known])
        _check_values(rows, [name for name in rows.column_names if name not in ("uid", "attempt", "closed")])
        _check_lengths(rows, rows)
        return AdmittedPut(rows, self._late_part(table, late) if late else None)

    def no_rows(self) -> pa.Table:
        """A table of the columns of a group that is complete, without rows."""
        import pyarrow as pa

        types = {**_fixed_types(), **self.types, **self.late_types}
        return pa.schema(list(types.items())).empty_table()

    def fix(self, admitted: AdmittedPut) -> None:
        """Hold later puts to this one, which is kept.

        Raises:
            SourceError: another put was kept since this one was admitted, and they differ.
        """
        rows, late = admitted
        if self.types:
            self._compare(rows, self.types)
        if late is not None:
            self.fix_late(late)
        self.types = self.types or {
            name: rows.column(name).type for name in rows.column_names if name not in FIXED
        }

    def admit_late(self, table: pa.Table) -> pa.Table:
        """Columns that arrive after their rows, one line per (uid, attempt, row).

        Raises:
            SourceError: a column that was not declared late, or of another type than before.
        """
        names = [name for name in table.column_names if name not in ("uid", "attempt", "row")]
        for name in names:
            if bare(name) not in self.late:
                declared = ", ".join(sorted(self.late)) or "none"
                what = f"{bare(name)!r} is not declared late (declared: {declared})"
                raise SourceError(_group(table, 0), what, "serve with late=..., or put it with its rows")
        self._compare_late(table)
        _check_values(table, names)
        return table

    def fix_late(self, table: pa.Table) -> None:
        """Hold later values of these columns to the types of these, which are kept.

        Raises:
            SourceError: others were kept since, of another type.
        """
        self._compare_late(table)
        self.late_types.update(_late_types(table))

    def _late_part(self, table: pa.Table, late: list[str]) -> pa.Table:
        import pyarrow as pa

        part = table.select(["uid", "attempt", *late]).append_column("row", pa.array(row_numbers(table)))
        _check_lengths(part, table)
        return self.admit_late(part)

    def _compare_late(self, table: pa.Table) -> None:
        for name, dtype in _late_types(table).items():
            if (known := self.late_types.get(name, dtype)) != dtype:
                what = f"has {bare(name)!r} of {_plain(dtype)}, and it is {_plain(known)} on this server"
                raise SourceError(_group(table, 0), what, f"send it as {_plain(known)}")

    def _first(self, rows: pa.Table) -> dict[str, pa.DataType]:
        """The types that the first put fixes.

        Raises:
            SourceError: `plan.columns` names one that it lacks.
        """
        own = {name: rows.column(name).type for name in rows.column_names if name not in FIXED}
        there = {bare(name) for name in own} | {*BUILT, *FIXED, *self.late}
        for name in self.needed:
            if name not in there:
                what = f"has no {name!r}, which plan.columns names"
                raise SourceError(_group(rows, 0), what, "put it, declare it late, or declare a default")
        return dict(sorted(own.items()))

    def _compare(self, rows: pa.Table, known: Mapping[str, pa.DataType]) -> None:
        for name in known:
            if name not in rows.column_names:
                what = f"lacks the column {bare(name)!r}, which other puts have"
                raise SourceError(_group(rows, 0), what, "put it, or serve with a default for it")
        for name in rows.column_names:
            if name in FIXED:
                continue
            if name not in known:
                what = f"has the column {bare(name)!r}, which other puts lack"
                raise SourceError(_group(rows, 0), what, "leave it out, or put it from the first put on")
            if rows.column(name).type != known[name]:
                what = f"has {bare(name)!r} of {_plain(rows.column(name).type)}, other puts of {_plain(known[name])}"
                raise SourceError(_group(rows, 0), what, f"send it as {_plain(known[name])}")

    def _filled(self, rows: pa.Table) -> pa.Table:
        """With defaults where a column, or a value of one, is missing."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for name, value in self.defaults.items():
            full = next((each for each in rows.column_names if bare(each) == name), None)
            if full is None:
                full = next((each for each in self.types if bare(each) == name), f"row.{name}")
                rows = rows.append_column(full, _constant(rows, self.types.get(full, pa.float32()), value))
            elif rows.column(full).null_count and not pa.types.is_list(rows.column(full).type):
                filled = pc.fill_null(rows.column(full), pa.scalar(value, rows.column(full).type))
                rows = rows.set_column(rows.column_names.index(full), full, filled)
        return rows


def with_growth(table: pa.Table) -> pa.Table:
    """Returns the table with `first_row` and `closed`; a table that lacks them has whole groups."""
    import numpy as np
    import pyarrow as pa

    if "first_row" not in table.column_names:
        table = table.append_column("first_row", pa.array(np.zeros(table.num_rows, np.int64)))
    if "closed" not in table.column_names:
        table = table.append_column("closed", pa.array(np.ones(table.num_rows, np.bool_)))
    return table


def _gathered(table: pa.Table) -> pa.Table:
    """With the rows of each (uid, attempt) behind one another, where the first of them stands."""
    import pyarrow as pa

    starts = group_starts(table)
    uids, attempts = table.column("uid"), table.column("attempt")
    order: dict[tuple[str, int], list[int]] = {}
    for start, stop in pairwise(starts):
        order.setdefault((uids[start].as_py(), attempts[start].as_py()), []).extend(range(start, stop))
    if len(order) == len(starts) - 1:
        return table
    return table.take(pa.array([row for rows in order.values() for row in rows]))


def _check_places(table: pa.Table) -> None:
    """Parts of a group in one put say nothing of their places, or follow one another."""
    import numpy as np

    said, numbers = table.column("first_row").to_numpy(), row_numbers(table)
    first = np.zeros(table.num_rows, np.bool_)
    first[group_starts(table)[:-1]] = True
    breaks = ~first & (said != np.roll(said, 1)) & (said != numbers)
    if breaks.any():
        at = int(breaks.argmax())
        what = f"has a part that begins at row {said[at]}, and the part before it ends at row {numbers[at]}"
        raise SourceError(_group(table, at), what, "put its rows in order, none left out")


def row_numbers(table: pa.Table) -> npt.NDArray[np.int64]:
    """Number of each sequence in its group: what its first part said, and counted on from there."""
    import numpy as np

    starts = group_starts(table)
    sizes = np.diff(starts)
    within = np.arange(table.num_rows) - np.repeat(starts[:-1], sizes)
    numbers: npt.NDArray[np.int64] = within + np.repeat(
        table.column("first_row").to_numpy()[starts[:-1]], sizes
    )
    return numbers


def spans_of(table: pa.Table, *, by_newest: bool = False) -> list[GroupSpan]:
    """The groups of a put; `by_newest`: a group is as old as its newest row."""
    starts = group_starts(table)
    uids, attempts = table.column("uid"), table.column("attempt")
    versions = table.column("weight_version").to_numpy()
    firsts, closed = table.column("first_row").to_numpy(), table.column("closed").to_numpy()
    spans = []
    for start, stop in pairwise(starts):
        key = (uids[start].as_py(), attempts[start].as_py())
        oldest, newest = int(versions[start:stop].min()), int(versions[start:stop].max())
        version, is_closed = newest if by_newest else oldest, bool(closed[stop - 1])
        spans.append(GroupSpan(key, start, stop, version, int(firsts[start]), is_closed, newest))
    return spans


def group_starts(table: pa.Table) -> list[int]:
    """Returns where the groups of a put begin, and its end."""
    uids, attempts = table.column("uid").to_pylist(), table.column("attempt").to_pylist()
    count = len(uids)
    changes = (
        row for row in range(1, count) if uids[row] != uids[row - 1] or attempts[row] != attempts[row - 1]
    )
    return [0, *changes, count]


def bare(name: str) -> str:
    """A column's name without "token." or "row."."""
    return name.removeprefix("token.").removeprefix("row.")


def _fixed_types() -> dict[str, pa.DataType]:
    import pyarrow as pa

    return {"uid": pa.string(), "attempt": pa.int64(), "weight_version": pa.int64(), "first_row": pa.int64(),
            "closed": pa.bool_(), "input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())}  # fmt: skip


def _check_fixed(table: pa.Table) -> None:
    for name, dtype in _fixed_types().items():
        if name not in table.column_names:
            raise SourceError(
                "put_groups", f"a table has no {name!r}", "make it with raysvc.rl.group_table.table_of"
            )
        if table.column(name).type != dtype:
            what = f"has {name!r} of {_plain(table.column(name).type)}"
            raise SourceError(_group(table, 0), what, f"send it as {_plain(dtype)}")
    if not table.num_rows:
        raise SourceError("put_groups", "a table has no row", "leave it out")


def _late_types(table: pa.Table) -> dict[str, pa.DataType]:
    return {
        name: table.column(name).type for name in table.column_names if name not in ("uid", "attempt", "row")
    }


def _check_lengths(rows: pa.Table, whole: pa.Table) -> None:
    """Every per-token column has the length of its sequence in `whole`."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(whole.column("input_ids"))
    for name in rows.column_names:
        if name != "loss_mask" and not name.startswith("token."):
            continue
        same = pc.equal(pc.list_value_length(rows.column(name)), lengths)
        if not pc.all(same).as_py():
            at = same.index(False).as_py()
            what = f"has a {bare(name)!r} that is not as long as its input_ids"
            raise SourceError(_group(rows, at), what, "give every token a value")


def _check_values(table: pa.Table, names: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in names:
        column = table.column(name)
        values = column
        while pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
            values = pc.list_flatten(values)
        if column.null_count or values.null_count:
            at = pc.is_null(column).index(True).as_py() if column.null_count else 0
            what = f"lacks a value of {bare(name)!r}"
            raise SourceError(_group(table, max(at, 0)), what, "put it, or serve with a default for it")
        if pa.types.is_floating(values.type) and not pc.all(pc.is_finite(values)).as_py():
            raise SourceError(_group(table, 0), f"has a {bare(name)!r} that is not finite", "filter it")


def _constant(rows: pa.Table, dtype: pa.DataType, value: float) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_list(dtype):
        return pa.array([value] * rows.num_rows, dtype)
    ids = rows.column("input_ids").combine_chunks()
    offsets = pc.subtract(ids.offsets, ids.offsets[0])
    return pa.ListArray.from_arrays(offsets, pa.array([value] * len(ids.flatten()), dtype.value_type))


def _plain(dtype: pa.DataType) -> str:
    """Name and shape of one value's type."""
    import pyarrow as pa

    dtype = dtype.value_type if pa.types.is_list(dtype) else dtype
    shape: list[int] = []
    while pa.types.is_fixed_size_list(dtype):
        shape.append(dtype.list_size)
        dtype = dtype.value_type
    names = {
        "float": "float32",
        "double": "float64",
        "halffloat": "float16",
        "fixed_size_binary[2]": "bfloat16",
    }
    return names.get(str(dtype), str(dtype)) + (f" {shape}" if shape else "")


def _group(table: pa.Table, row: int) -> str:
    return f"group {table.column('uid')[row].as_py()!r}" if "uid" in table.column_names else "put_groups"
