"""Finds the rows of a job that are held out: evaluated (`evals.NAME.share`), and never trained.

1. A group's key is the sha256 of its prompt: the token ids, as little-endian int32, of its first row before the first token
   under loss. Where that is at most one token, as in plain text, or no token is under loss, it is all ids of that row.
2. A group is held out if the first eight bytes of the key, as a big-endian integer, are below share * 2^64.

Axes: N rows, G groups.
Always true:
- the rows of a group, and groups of one prompt, are on one side, in whatever source of a mixture;
- the side follows from prompt and share alone: a source may grow, shrink or change its order;
- a larger share holds out all that a smaller one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.cache.key import rows_key
from raysvc.errors import PlanError
from raysvc.job.config import RowsConfig
from raysvc.plan.entry_plan import group_bounds
from raysvc.ragged import Int64s
from raysvc.row_ids import source_base

if TYPE_CHECKING:
    import pyarrow as pa

    from raysvc.cache.entry import Entry
    from raysvc.job.config import JobConfig

Bools = npt.NDArray[np.bool_]
KEPT = 32  # answers of one process
_answers: dict[tuple[str, float], Bools] = {}


class HeldShare(NamedTuple):
    """The eval of a job whose rows are held out of its own sources."""

    name: str
    share: float


class HeldCounts(NamedTuple):
    """Counts what is held out."""

    rows: int
    groups: int


def held_share(job: JobConfig) -> HeldShare | None:
    """The eval that holds rows out; None: no eval does."""
    found = ((name, each.share) for name, each in job.evals.items())
    return next((HeldShare(name, share) for name, share in found if share is not None), None)


def trained_rows(job: JobConfig, entries: Sequence[Entry]) -> RowsConfig | None:
    """`plan.rows` of the training rows: those of the job, without what is held out.

    Raises:
        PlanError: the share holds out nothing, or all of a source.
    """
    rows = job.plan.rows
    if held_share(job) is None:
        return rows
    rows = rows or RowsConfig()
    return RowsConfig(include=rows.include, exclude=(*rows.exclude, *_held_ids(job, entries).tolist()))


def evaluated_rows(job: JobConfig, entries: Sequence[Entry]) -> tuple[int, ...]:
    """The ids of the held-out rows, of those that the job's plan is of.

    Raises:
        PlanError: none is left.
    """
    found, rows = _held_ids(job, entries), job.plan.rows or RowsConfig()
    if rows.include is not None:
        found = np.intersect1d(found, np.array(rows.include, np.int64))
    found = np.setdiff1d(found, np.array(rows.exclude, np.int64))
    if not len(found):
        raise _wrong(job, "holds out none of the rows of plan.rows", "give a larger share")
    return tuple(found.tolist())


def held_counts(job: JobConfig, entries: Sequence[Entry]) -> HeldCounts:
    """Rows and groups that are held out, of all of the job's."""
    share = held_share(job)
    if share is None:
        return HeldCounts(0, 0)
    masks = [held_mask(one, share.share) for one in entries]
    bounds = [group_bounds(one) for one in entries]
    groups = [mask if ends is None else mask[ends[:-1]] for mask, ends in zip(masks, bounds, strict=True)]
    return HeldCounts(sum(int(one.sum()) for one in masks), sum(int(one.sum()) for one in groups))


def held_mask(entry: Entry, share: float) -> Bools:
    """bool [N], whether each row of an entry is held out; reads the token ids of all rows, once in a process."""
    known = (rows_key(entry.key, entry.recipe), share)
    if known not in _answers:
        if len(_answers) >= KEPT:
            _answers.clear()
        bounds = group_bounds(entry)
        firsts = np.arange(entry.num_rows) if bounds is None else bounds[:-1]
        limit = int(share * 2**64)
        held = [int.from_bytes(key[:8], "big") < limit for key in _keys(entry.base or entry, firsts)]
        sizes = 1 if bounds is None else np.diff(bounds)
        _answers[known] = np.repeat(np.array(held, bool), sizes)
    return _answers[known]


def _held_ids(job: JobConfig, entries: Sequence[Entry]) -> Int64s:
    share = held_share(job)
    assert share is not None, "asked of a job that holds rows out"
    masks = [held_mask(one, share.share) for one in entries]
    for number, mask in enumerate(masks):
        if mask.all():
            of = f" of source {number}" if len(masks) > 1 else ""
            raise _wrong(job, f"{share.share:g} leaves no row{of} to train", "give a smaller share")
    if not any(mask.any() for mask in masks):
        what = f"{share.share:g} holds out none of {sum(map(len, masks)):,} rows"
        raise _wrong(job, what, "give a larger share")
    ids = [
        one.row_ids()[mask] + source_base(number)
        for number, (one, mask) in enumerate(zip(entries, masks, strict=True))
    ]
    return np.concatenate(ids)


def _wrong(job: JobConfig, what: str, remedy: str) -> PlanError:
    share = held_share(job)
    return PlanError(f"evals.{share.name if share else ''}.share", what, remedy)


def _keys(entry: Entry, firsts: Int64s) -> Iterator[bytes]:
    """The key of each group, by its first row."""
    start = done = 0
    for table in entry.part_tables():
        stop = int(np.searchsorted(firsts, start + table.num_rows))
        for prompt in _prompts(table, firsts[done:stop] - start):
            yield hashlib.sha256(prompt.tobytes()).digest()
        done, start = stop, start + table.num_rows


def _prompts(table: pa.Table, rows: Int64s) -> Iterator[npt.NDArray[np.int32]]:
    """Returns what is hashed of some rows of a table."""
    ids, starts, stops = _lists(table, "input_ids", rows)
    mask, mask_starts, mask_stops = _lists(table, "loss_mask", rows)
    trained = np.append(np.flatnonzero(mask), len(mask))
    firsts = trained[np.searchsorted(trained, mask_starts)] - mask_starts
    lengths = np.where((firsts <= 1) | (firsts >= mask_stops - mask_starts), stops - starts, firsts)
    ids = ids.astype("<i4", copy=False)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        yield ids[start : start + length]


def _lists(table: pa.Table, name: str, rows: Int64s) -> tuple[npt.NDArray[Any], Int64s, Int64s]:
    """The values of a column of lists, and where those of some rows begin and end."""
    column = table.column(name).combine_chunks()
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy(zero_copy_only=False), offsets[rows], offsets[rows + 1]
