"""Rollout groups: a prompt and its sequences, checked whole.

Axes: S sequences of a group (samples, or turns of trajectories), L tokens of a sequence.
Always true:
- every per-token column has the length of its sequence, every per-row column one value per sequence;
- a group that breaks a rule is refused with its uid and the rule, and none of its call is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from raysvc.errors import SourceError
from raysvc.job.carried import RESERVED, Align
from raysvc.job.column_dtypes import BF16
from raysvc.rl.engine_values import array_of, is_finite, laid

KEYS = ("uid", "attempt")
VERSION = "weight_version"
GROWTH = ("first_row", "closed")  # where the rows lie in their group, and whether it is whole then
TRAJECTORY = "trajectory"  # per-row column
FIXED = (*KEYS, VERSION, *GROWTH, "input_ids", "loss_mask")
MADE = RESERVED - {*FIXED, "chosen", "label", "mismatched"}  # columns of a shard that no put brings
LARGEST = 2**63 - 1  # of the counts


@dataclass(frozen=True, eq=False)
class Group:
    """All sequences of one prompt, with everything that is needed to train them.

    Attributes:
        uid: of the prompt.
        input_ids: [S] of int [L].
        loss_mask: [S] of 0 or 1 [L]; 1 where a token was sampled and is trained.
        tokens: further per-token columns, name -> [S] of numbers [L, *shape] (logprobs, routed experts), as lists, arrays
            or tensors on the CPU; bfloat16 as a tensor or `BF16`.
        rows: per-row columns, name -> numbers [S, *shape] (reward, advantage).
        attempt: counts retries of the same prompt; (uid, attempt) is put once.
        weight_version: of the weights that sampled it: one for all sequences, or [S], one each; the oldest one, where they changed within
            a sequence.
        first_row: number of its first sequence, where earlier puts had the sequences before it.
        closed: False: more sequences will be put; the group is trained once one put says True.
        align: column of `tokens` -> how its values lie. `this_token`: L of them, or L - 1 where the last token has none;
            `next_token`: L or L - 1, each about the following token, as with logits; `response`: one for each token whose
            loss_mask is 1. A token without a value gets 0. A column that is not named has L values.
        trajectory: [S], number of each sequence's trajectory in the group, where several sequences are turns of one; it travels as
            the per-row column `trajectory`. None: each sequence is its own.
    """

    uid: str
    input_ids: Sequence[Any]
    loss_mask: Sequence[Any]
    tokens: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    weight_version: Any = 0
    first_row: int = 0
    closed: bool = True
    align: Mapping[str, Align] = field(default_factory=dict)
    trajectory: Any = None

    @property
    def key(self) -> tuple[str, int]:
        """The pair (uid, attempt), which makes two puts the same."""
        return self.uid, self.attempt


def checked(group: Group) -> Group:
    """The group with numpy columns, every value at the token it is about.

    Raises:
        SourceError: it breaks a rule; names uid, column and sequence.
    """
    if not isinstance(group, Group):
        raise SourceError("put_groups", f"got a {type(group).__name__}", "put raysvc.Group objects")
    check_keys(group)
    _check_columns(group)
    ids = [vector_of(group, "input_ids", number, ids, np.int32) for number, ids in enumerate(group.input_ids)]
    if not ids or min(len(each) for each in ids) < 1:
        raise group_error(group, "has no sequence, or an empty one", "leave it out")
    if min(int(each.min()) for each in ids) < 0:
        raise group_error(group, "has a negative token id", "send ids as the tokenizer gave them")
    raw = _column(group, "loss_mask", group.loss_mask, ids)
    if any(each.dtype == BF16 or bool(((each != 0) & (each != 1)).any()) for each in raw):
        raise group_error(
            group, "has a loss_mask that is neither 0 nor 1", "put weights into a column of their own"
        )
    mask = [each.astype(np.uint8) for each in raw]
    columns = {name: _column(group, name, values, ids, mask) for name, values in group.tokens.items()}
    rows = {name: row_column(group, name, values, len(ids)) for name, values in group.rows.items()}
    if group.trajectory is not None:
        rows[TRAJECTORY] = _trajectory(group, len(ids))
    versions = _versions(group, len(ids))
    return replace(
        group, input_ids=ids, loss_mask=mask, tokens=columns, rows=rows, weight_version=versions, align={},
        trajectory=None,
    )  # fmt: skip


def _versions(group: Group, count: int) -> int | npt.NDArray[np.int64]:
    """One version where all sequences have the same."""
    if np.ndim(group.weight_version) == 0:
        return int(group.weight_version)
    versions = row_column(group, VERSION, group.weight_version, count)
    if versions.dtype.kind not in "iu" or versions.ndim > 1 or bool((versions < 0).any()):
        raise group_error(group, f"has a {VERSION} that is not one count each", "count from 0")
    return int(versions[0]) if bool((versions == versions[0]).all()) else versions.astype(np.int64)


def _trajectory(group: Group, count: int) -> npt.NDArray[np.int64]:
    if TRAJECTORY in group.rows:
        raise group_error(group, f"has {TRAJECTORY!r} twice", "give it as Group(trajectory=...) alone")
    numbers = row_column(group, TRAJECTORY, group.trajectory, count)
    if numbers.dtype.kind not in "iu" or numbers.ndim > 1 or bool((numbers < 0).any()):
        raise group_error(group, f"has a {TRAJECTORY} that is not one count each", "number them from 0")
    return numbers.astype(np.int64)


def check_keys(group: Group) -> None:
    """Refuse what says which group it is, and is no text or no count.

    Raises:
        SourceError: names the field.
    """
    if not isinstance(group.uid, str):
        what = f"has a uid of type {type(group.uid).__name__}"
        raise group_error(group, what, "give the uid of its prompt as text")
    if not group.uid:
        raise SourceError("group ''", "has no uid", "give it the uid of its prompt")
    if "\0" in group.uid or any("\ud800" <= letter <= "\udfff" for letter in group.uid):
        raise group_error(group, "has a uid with a NUL or half a character", "give text that is UTF-8")
    for name in ("attempt", VERSION, "first_row"):
        value = getattr(group, name)
        if (
            name == VERSION
            and not isinstance(value, str | bytes)
            and hasattr(value, "__len__")
            and np.ndim(value)
        ):
            continue  # one each: see `_versions`
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise group_error(group, f"has {name} {value!r}, which is not a whole number", "count from 0")
        if value < 0:
            raise group_error(group, f"has a negative {name}, {value}", "count from 0")
        if value > LARGEST:
            raise group_error(group, f"has {name} {value}, which is above {LARGEST}", "count from 0")
    if not isinstance(group.closed, bool | np.bool_):
        raise group_error(group, f"has closed {group.closed!r}", "give True or False")


def _check_columns(group: Group) -> None:
    """Refuse what is no list of sequences, no mapping of columns, or a column whose name is taken."""
    for kind, columns in (("tokens", group.tokens), ("rows", group.rows)):
        if not isinstance(columns, Mapping):
            what = f"has {kind} of type {type(columns).__name__}"
            raise group_error(group, what, "give a mapping, name -> values")
    for name in (*group.tokens, *group.rows):
        if not isinstance(name, str) or not name or name.startswith(("token.", "row.")):
            raise group_error(group, f"has a column named {name!r}", "name it by a word")
        if name in FIXED or (name in group.tokens and name in group.rows):
            raise group_error(group, f"has two columns {name!r}", "give each column its own name")
        if name in MADE:
            what = f"has a column {name!r}, and collation or the worker makes one"
            raise group_error(group, what, "give it another name")
    for name, values in {"input_ids": group.input_ids, "loss_mask": group.loss_mask, **group.tokens}.items():
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            what = f"has {name!r} of type {type(values).__name__}"
            raise group_error(group, what, "give a list, one entry per sequence")
    _check_align(group)


def _check_align(group: Group) -> None:
    if not isinstance(group.align, Mapping):
        what = f"has align of type {type(group.align).__name__}"
        raise group_error(group, what, "give a mapping, column -> how its values lie")
    for name, how in group.align.items():
        if name not in group.tokens:
            what = f"aligns {name!r}, and its tokens have {', '.join(sorted(group.tokens)) or 'no column'}"
            raise group_error(group, what, "name a column of tokens")
        if how not in get_args(Align):
            raise group_error(
                group, f"aligns {name!r} by {how!r}", f"give one of {', '.join(get_args(Align))}"
            )


def _column(
    group: Group, name: str, values: Sequence[Any], ids: list[Any], mask: list[Any] | None = None
) -> list[npt.NDArray[Any]]:
    if len(values) != len(ids):
        what = f"has {len(values)} sequences in {name!r} and {len(ids)} in 'input_ids'"
        raise group_error(group, what, "give every sequence every column")
    vectors = [vector_of(group, name, number, each) for number, each in enumerate(values)]
    if mask is not None and name in group.align:
        return [_laid(group, name, number, vector, mask[number]) for number, vector in enumerate(vectors)]
    for number, (vector, each) in enumerate(zip(vectors, ids, strict=True)):
        if len(vector) != len(each):
            what = f"has {len(vector)} values in {name!r} of sequence {number}, which has {len(each)} tokens"
            raise group_error(group, what, "give every token a value, or say in align how they lie")
    return vectors


def _laid(
    group: Group, name: str, number: int, values: npt.NDArray[Any], mask: npt.NDArray[np.uint8]
) -> npt.NDArray[Any]:
    found = laid(values, mask, group.align[name])
    if found is None:
        told = f"{len(mask)} tokens, {int(mask.sum())} of them trained"
        what = f"has {len(values)} values in {name!r} of sequence {number}, which has {told}"
        raise group_error(group, what, f"see what align {group.align[name]!r} wants, or name another")
    return found


def vector_of(
    group: Group, name: str, number: int, values: Any, dtype: npt.DTypeLike | None = None
) -> npt.NDArray[Any]:
    """Numbers as an array whose first axis is tokens, or sequences; float64 becomes float32.

    Args:
        dtype: of token ids; None: as they are.

    Raises:
        SourceError: they are no numbers, not finite, or beyond `dtype`.
    """
    vector = _array(group, name, number, values)
    flat = dtype is not None or name == "loss_mask"
    if (
        vector.ndim < 1
        or (flat and vector.ndim > 1)
        or (vector.dtype.kind not in "iufb" and vector.dtype != BF16)
        or vector.dtype.itemsize > 8
    ):
        what = f"has {name!r} of sequence {number} with shape {vector.shape} of {vector.dtype}"
        raise group_error(group, what, "give one list of numbers per sequence")
    if dtype is not None and len(vector):
        if vector.dtype.kind not in "iu":
            what = f"has {name!r} of sequence {number} of {vector.dtype}"
            raise group_error(group, what, "send whole numbers, as the tokenizer gave them")
        if vector.max() > np.iinfo(dtype).max:
            what = f"has {vector.max()} in {name!r} of sequence {number}, more than {np.dtype(dtype)} holds"
            raise group_error(group, what, "send ids as the tokenizer gave them")
    if vector.dtype == np.float64:
        vector = vector.astype(np.float32)
    if not is_finite(vector):
        raise group_error(
            group, f"has a value in {name!r} of sequence {number} that is not finite", "filter it"
        )
    return vector if dtype is None else vector.astype(dtype)


def _array(group: Group, name: str, number: int, values: Any) -> npt.NDArray[Any]:
    try:
        return array_of(values)
    except ValueError:
        what = f"has {name!r} of sequence {number} with values of several shapes"
        raise group_error(group, what, "give every token a value of one shape") from None
    except (TypeError, RuntimeError, OverflowError) as error:
        what = f"has {name!r} of sequence {number} that numpy does not take ({error})"
        raise group_error(group, what, "give numbers, or an array on the CPU") from None


def row_column(group: Group, name: str, values: Any, count: int) -> npt.NDArray[Any]:
    """A value of each sequence, [S, *shape].

    Raises:
        SourceError: they are not as many as sequences, or no numbers.
    """
    column = vector_of(group, name, 0, values)
    if len(column) != count:
        raise group_error(
            group, f"has {len(column)} values in {name!r} for {count} sequences", "give one each"
        )
    return column


def group_error(group: Group, what: str, remedy: str) -> SourceError:
    return SourceError(f"group {group.uid!r}", what, remedy)
