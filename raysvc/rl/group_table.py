"""Groups as Arrow and back: one row per sequence, group after group.

Axes: S sequences of a group, L tokens of a sequence, N sequences of several groups.
Always true:
- `groups_of(table_of(groups))` gives the groups back;
- groups of one uid and attempt are one group of all their sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.job.column_dtypes import BF16
from raysvc.rl.group import (
    GROWTH,
    KEYS,
    TRAJECTORY,
    Group,
    check_keys,
    checked,
    group_error,
    row_column,
    vector_of,
)

if TYPE_CHECKING:
    import pyarrow as pa


def table_of(groups: Sequence[Group]) -> pa.Table:
    """One row per sequence, group after group. Groups of one uid and attempt become one, in the order given.

    Raises:
        SourceError: groups of different columns, or a group that breaks a rule.
    """
    import pyarrow as pa

    whole = merged([checked(group) for group in groups])
    for group in whole:
        for mine, first in ((group.tokens, whole[0].tokens), (group.rows, whole[0].rows)):
            if set(mine) != set(first):
                what = f"has the columns {sorted(mine)}, and {whole[0].uid!r} has {sorted(first)}"
                raise group_error(group, what, "give all groups the same columns")
    sizes = [len(group.input_ids) for group in whole]
    columns: dict[str, Any] = {
        "uid": pa.array(np.repeat([group.uid for group in whole], sizes)),
        "attempt": pa.array(np.repeat(np.array([group.attempt for group in whole], np.int64), sizes)),
        "weight_version": pa.array(np.concatenate([_versions(group) for group in whole])),
        "first_row": pa.array(np.repeat(np.array([g.first_row for g in whole], np.int64), sizes)),
        "closed": pa.array(np.repeat(np.array([g.closed for g in whole], np.bool_), sizes)),
        "input_ids": _lists([ids for group in whole for ids in group.input_ids]),
        "loss_mask": _lists([mask for group in whole for mask in group.loss_mask]),
    }
    for name in whole[0].tokens:
        owners = [group for group in whole for _ in group.tokens[name]]
        vectors = [values for group in whole for values in group.tokens[name]]
        _same_type(owners, name, [np.dtype((vector.dtype, vector.shape[1:])) for vector in vectors])
        columns[f"token.{name}"] = _lists(vectors)
    for name in whole[0].rows:
        values = [group.rows[name] for group in whole]
        _same_type(whole, name, [np.dtype((each.dtype, each.shape[1:])) for each in values])
        columns[f"row.{name}"] = arrow_of_values(np.concatenate(values))
    return pa.table(columns)


def merged(groups: Sequence[Group]) -> list[Group]:
    """Groups of one uid and attempt as one group of all their sequences, at the place of the first.

    Each sequence keeps its weight version; the group is closed when the last one is.
    """
    by_key: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        by_key.setdefault(group.key, []).append(group)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in by_key.values()]


def late_table(
    uid: str, columns: Mapping[str, Any], rows: Sequence[int] | None = None, attempt: int = 0
) -> pa.Table:
    """Columns of rows of a group that came after the rows: one line per row.

    Raises:
        SourceError: columns of different lengths, or no numbers.
    """
    import pyarrow as pa

    group = Group(uid, [], [], attempt=attempt)
    check_keys(group)
    if single := [name for name, values in columns.items() if _is_one(values)]:
        raise group_error(group, f"gets one value of {single[0]!r} for all rows", "give each row its own")
    sizes = {name: len(values) for name, values in columns.items()}
    count = len(rows) if rows is not None else max(sizes.values(), default=0)
    if not sizes or set(sizes.values()) != {count} or not count:
        raise group_error(
            group, f"gets {sizes} values for {count} rows", "give each row one value of each column"
        )
    numbers = np.arange(count) if rows is None else np.asarray(rows, np.int64)
    lines: dict[str, Any] = {
        "uid": pa.array([uid] * count),
        "attempt": pa.array(np.full(count, attempt, np.int64)),
        "row": pa.array(numbers),
    }
    for name, values in columns.items():
        if not _is_one(values[0]):
            vectors = [vector_of(group, name, number, each) for number, each in enumerate(values)]
            _same_type([group] * count, name, [np.dtype((v.dtype, v.shape[1:])) for v in vectors])
            lines[f"token.{name}"] = _lists(vectors)
        else:
            lines[f"row.{name}"] = arrow_of_values(row_column(group, name, values, count))
    return pa.table(lines)


def groups_of(table: pa.Table) -> list[Group]:
    """The inverse of `table_of`."""
    keys = list(zip(*(table.column(name).to_pylist() for name in KEYS), strict=True))
    bounds = [0, *(row for row in range(1, len(keys)) if keys[row] != keys[row - 1]), len(keys)]
    out = []
    for first, stop in pairwise(bounds):
        part = table.slice(first, stop - first)
        lists = {
            name: [values_of(values.values) for values in part.column(name)]
            for name in part.column_names
            if name in ("input_ids", "loss_mask") or name.startswith("token.")
        }
        rows = {
            name.removeprefix("row."): values_of(part.column(name).combine_chunks())
            for name in part.column_names
            if name.startswith("row.")
        }
        ids, mask = lists.pop("input_ids"), lists.pop("loss_mask")
        tokens = {name.removeprefix("token."): values for name, values in lists.items()}
        (uid, attempt), version = keys[first], _one_or_each(part.column("weight_version").to_numpy())
        growth = {name: part.column(name)[0].as_py() for name in GROWTH if name in part.column_names}
        trajectory = rows.pop(TRAJECTORY, None)
        out.append(Group(uid, ids, mask, tokens, rows, attempt, version, **growth, trajectory=trajectory))
    return out


def _joined(parts: list[Group]) -> Group:
    first = parts[0]
    for part in parts[1:]:
        for mine, other in ((part.tokens, first.tokens), (part.rows, first.rows)):
            if set(mine) != set(other):
                what = f"comes twice, with the columns {sorted(mine)} and with {sorted(other)}"
                raise group_error(part, what, "give all groups the same columns")
    end = first.first_row
    for before, part in pairwise(parts):
        end += len(before.input_ids)
        if part.first_row not in (before.first_row, end):
            what = f"has a part that begins at row {part.first_row}, and the part before it ends at row {end}"
            raise group_error(part, what, "put its rows in order, none left out")
    return replace(
        first,
        input_ids=[ids for part in parts for ids in part.input_ids],
        loss_mask=[mask for part in parts for mask in part.loss_mask],
        tokens={name: [each for part in parts for each in part.tokens[name]] for name in first.tokens},
        rows={name: np.concatenate([part.rows[name] for part in parts]) for name in first.rows},
        weight_version=_one_or_each(np.concatenate([_versions(part) for part in parts])),
        closed=parts[-1].closed,
    )


def _versions(group: Group) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.asarray(group.weight_version, np.int64), (len(group.input_ids),))


def _one_or_each(versions: npt.NDArray[np.int64]) -> int | npt.NDArray[np.int64]:
    return int(versions[0]) if bool((versions == versions[0]).all()) else versions


def arrow_of_values(values: npt.NDArray[Any]) -> pa.Array:
    """[N, *shape] as Arrow: lists of a fixed size inside lists; bfloat16 as two bytes."""
    import pyarrow as pa

    flat = np.ascontiguousarray(values).reshape(-1)
    if values.dtype == BF16:
        array = pa.FixedSizeBinaryArray.from_buffers(pa.binary(2), len(flat), [None, pa.py_buffer(flat)])
    else:
        array = pa.array(flat)
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def values_of(array: pa.Array) -> npt.NDArray[Any]:
    """The inverse: a view where Arrow has the numbers in a row."""
    import pyarrow as pa

    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        shape.append(size)
        array = array.values.slice(array.offset * size, len(array) * size)
    if pa.types.is_fixed_size_binary(array.type):
        bits = np.frombuffer(array.buffers()[1], BF16, len(array), 2 * array.offset)
        return bits.reshape(shape)
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(shape)


def _is_one(values: Any) -> bool:
    """Tells whether it is a value and no list; vectors of several lengths must not become one array for that."""
    return getattr(values, "ndim", None) == 0 or not hasattr(values, "__len__")


def _same_type(groups: Sequence[Group], name: str, dtypes: Sequence[np.dtype[Any]]) -> None:
    """Refuse what concatenating would turn into another type without a word."""
    for group, dtype in zip(groups, dtypes, strict=True):
        if dtype != dtypes[0]:
            what = f"has {name!r} of {dtype}, and {groups[0].uid!r} has it of {dtypes[0]}"
            raise group_error(group, what, f"send it as {dtypes[0]}")


def _lists(vectors: list[npt.NDArray[Any]]) -> pa.Array:
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum([len(vector) for vector in vectors])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), arrow_of_values(np.concatenate(vectors)))
