"""Rollout groups: a prompt and its sequences, checked whole, as Arrow and back.

Axes: S sequences of a group (samples, or turns of trajectories), L tokens of a sequence, N sequences of several groups.
Always true:
- every per-token column has the length of its sequence, every per-row column one value per sequence;
- a group that breaks a rule is refused with its uid and the rule, and none of its call is kept;
- `groups_of(table_of(groups))` gives the groups back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import SourceError
from raysvc.job.carried import BF16

if TYPE_CHECKING:
    import pyarrow as pa

KEYS = ("uid", "attempt", "weight_version")
GROWTH = ("first_row", "closed")  # where the rows lie in their group, and whether it is whole then


@dataclass(frozen=True, eq=False)
class Group:
    """All sequences of one prompt, with everything that is needed to train them.

    Attributes:
        uid: of the prompt.
        input_ids: [S] of int [L].
        loss_mask: [S] of 0 or 1 [L]; 1 where a token was sampled and is trained.
        tokens: further per-token columns, name -> [S] of numbers [L, *shape] (logprobs, routed experts); bfloat16 as `BF16`.
        rows: per-row columns, name -> numbers [S, *shape] (reward, advantage).
        attempt: counts retries of the same prompt; (uid, attempt) is put once.
        weight_version: of the weights that sampled it; the oldest one, where they changed in between.
        first_row: number of its first sequence, where earlier puts had the sequences before it.
        closed: False: more sequences will be put; the group is trained once one put says True.
    """

    uid: str
    input_ids: Sequence[Any]
    loss_mask: Sequence[Any]
    tokens: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    weight_version: int = 0
    first_row: int = 0
    closed: bool = True

    @property
    def key(self) -> tuple[str, int]:
        """What makes two puts the same."""
        return self.uid, self.attempt


def checked(group: Group) -> Group:
    """The group with numpy columns.

    Raises:
        SourceError: it breaks a rule; names uid, column and sequence.
    """
    if not isinstance(group, Group):
        raise SourceError("put_groups", f"got a {type(group).__name__}", "put raysvc.Group objects")
    _check_keys(group)
    ids = [_vector(group, "input_ids", number, ids, np.int32) for number, ids in enumerate(group.input_ids)]
    if not ids or min(len(each) for each in ids) < 1:
        raise _error(group, "has no sequence, or an empty one", "leave it out")
    if min(int(each.min()) for each in ids) < 0:
        raise _error(group, "has a negative token id", "send ids as the tokenizer gave them")
    tokens = {"loss_mask": group.loss_mask, **group.tokens}
    columns = {name: _column(group, name, values, ids) for name, values in tokens.items()}
    raw = columns.pop("loss_mask")
    mask = [each.astype(np.uint8) for each in raw]
    if any(bool(((each != 0) & (each != 1)).any()) for each in raw):
        raise _error(
            group, "has a loss_mask that is neither 0 nor 1", "put weights into a column of their own"
        )
    for name in {*group.tokens, *group.rows}:
        if name in (*KEYS, *GROWTH, "input_ids", "loss_mask") or (
            name in group.tokens and name in group.rows
        ):
            raise _error(group, f"has two columns {name!r}", "give each column its own name")
    rows = {name: _row_column(group, name, values, len(ids)) for name, values in group.rows.items()}
    return replace(group, input_ids=ids, loss_mask=mask, tokens=columns, rows=rows)


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
                raise _error(group, what, "give all groups the same columns")
    sizes = [len(group.input_ids) for group in whole]
    columns: dict[str, Any] = {
        "uid": pa.array(np.repeat([group.uid for group in whole], sizes)),
        "attempt": pa.array(np.repeat(np.array([group.attempt for group in whole], np.int64), sizes)),
        "weight_version": pa.array(np.repeat(np.array([g.weight_version for g in whole], np.int64), sizes)),
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

    Its weight version is the oldest of theirs; it is closed when the last one is.
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
    _check_keys(group)
    if single := [name for name, values in columns.items() if _is_one(values)]:
        raise _error(group, f"gets one value of {single[0]!r} for all rows", "give each row its own")
    sizes = {name: len(values) for name, values in columns.items()}
    count = len(rows) if rows is not None else max(sizes.values(), default=0)
    if not sizes or set(sizes.values()) != {count} or not count:
        raise _error(group, f"gets {sizes} values for {count} rows", "give each row one value of each column")
    numbers = np.arange(count) if rows is None else np.asarray(rows, np.int64)
    lines: dict[str, Any] = {
        "uid": pa.array([uid] * count),
        "attempt": pa.array(np.full(count, attempt, np.int64)),
        "row": pa.array(numbers),
    }
    for name, values in columns.items():
        if not _is_one(values[0]):
            vectors = [_vector(group, name, number, each) for number, each in enumerate(values)]
            _same_type([group] * count, name, [np.dtype((v.dtype, v.shape[1:])) for v in vectors])
            lines[f"token.{name}"] = _lists(vectors)
        else:
            lines[f"row.{name}"] = arrow_of_values(_row_column(group, name, values, count))
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
        uid, attempt, version = keys[first]
        growth = {name: part.column(name)[0].as_py() for name in GROWTH if name in part.column_names}
        out.append(Group(uid, ids, mask, tokens, rows, attempt, version, **growth))
    return out


def _check_keys(group: Group) -> None:
    if not isinstance(group.uid, str):
        what = f"has a uid of type {type(group.uid).__name__}"
        raise _error(group, what, "give the uid of its prompt as text")
    if not group.uid:
        raise SourceError("group ''", "has no uid", "give it the uid of its prompt")
    for name in ("attempt", "weight_version", "first_row"):
        value = getattr(group, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise _error(group, f"has {name} {value!r}, which is not a whole number", "count from 0")
        if value < 0:
            raise _error(group, f"has a negative {name}, {value}", "count from 0")


def _joined(parts: list[Group]) -> Group:
    first = parts[0]
    for part in parts[1:]:
        for mine, other in ((part.tokens, first.tokens), (part.rows, first.rows)):
            if set(mine) != set(other):
                what = f"comes twice, with the columns {sorted(mine)} and with {sorted(other)}"
                raise _error(part, what, "give all groups the same columns")
    return replace(
        first,
        input_ids=[ids for part in parts for ids in part.input_ids],
        loss_mask=[mask for part in parts for mask in part.loss_mask],
        tokens={name: [each for part in parts for each in part.tokens[name]] for name in first.tokens},
        rows={name: np.concatenate([part.rows[name] for part in parts]) for name in first.rows},
        weight_version=min(part.weight_version for part in parts),
        closed=parts[-1].closed,
    )


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
    """Whether it is a value and no list; vectors of several lengths must not become one array for that."""
    return getattr(values, "ndim", None) == 0 or not hasattr(values, "__len__")


def _same_type(groups: Sequence[Group], name: str, dtypes: Sequence[np.dtype[Any]]) -> None:
    """Refuse what concatenating would turn into another type without a word."""
    for group, dtype in zip(groups, dtypes, strict=True):
        if dtype != dtypes[0]:
            what = f"has {name!r} of {dtype}, and {groups[0].uid!r} has it of {dtypes[0]}"
            raise _error(group, what, f"send it as {dtypes[0]}")


def _column(group: Group, name: str, values: Sequence[Any], ids: list[Any]) -> list[npt.NDArray[Any]]:
    if len(values) != len(ids):
        what = f"has {len(values)} sequences in {name!r} and {len(ids)} in 'input_ids'"
        raise _error(group, what, "give every sequence every column")
    vectors = [_vector(group, name, number, each) for number, each in enumerate(values)]
    for number, (vector, each) in enumerate(zip(vectors, ids, strict=True)):
        if len(vector) != len(each):
            what = f"has {len(vector)} values in {name!r} of sequence {number}, which has {len(each)} tokens"
            raise _error(group, what, "give every token a value")
    return vectors


def _vector(
    group: Group, name: str, number: int, values: Any, dtype: npt.DTypeLike | None = None
) -> npt.NDArray[Any]:
    vector = _array(group, name, number, values)
    flat = dtype is not None or name == "loss_mask"
    if (
        vector.ndim < 1
        or (flat and vector.ndim > 1)
        or (vector.dtype.kind not in "iufb" and vector.dtype != BF16)
    ):
        what = f"has {name!r} of sequence {number} with shape {vector.shape} of {vector.dtype}"
        raise _error(group, what, "give one list of numbers per sequence")
    if dtype is not None and len(vector) and vector.dtype.kind not in "iu":
        what = f"has {name!r} of sequence {number} of {vector.dtype}"
        raise _error(group, what, "send whole numbers, as the tokenizer gave them")
    if vector.dtype == np.float64:
        vector = vector.astype(np.float32)
    if vector.dtype.kind == "f" and not np.isfinite(vector).all():
        raise _error(group, f"has a value in {name!r} of sequence {number} that is not finite", "filter it")
    return vector if dtype is None else vector.astype(dtype)


def _array(group: Group, name: str, number: int, values: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        what = f"has {name!r} of sequence {number} with values of several shapes"
        raise _error(group, what, "give every token a value of one shape") from None


def _row_column(group: Group, name: str, values: Any, count: int) -> npt.NDArray[Any]:
    column = _vector(group, name, 0, values)
    if len(column) != count:
        raise _error(group, f"has {len(column)} values in {name!r} for {count} sequences", "give one each")
    return column


def _lists(vectors: list[npt.NDArray[Any]]) -> pa.Array:
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum([len(vector) for vector in vectors])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), arrow_of_values(np.concatenate(vectors)))


def _error(group: Group, what: str, remedy: str) -> SourceError:
    return SourceError(f"group {group.uid!r}", what, remedy)
