"""Finds the rows of a job that are held out: evaluated (`evals.NAME.share`, `evals.NAME.rows`), and never trained.

1. A group's number is the first eight bytes, as a big-endian integer, of the sha256 of its prompt: the token ids, as little-endian
   int32, of its first row before the first token under loss. Where that is at most one token, as in plain text, or no token is under
   loss, it is all ids of that row.
2. share: a group is held out if its number is below share * 2^64.
3. rows: of the groups of each source in their order, those whose number is below 2^64 / `ONE_IN` are held out until they have so many
   rows; so is every group with the number of one of them, wherever it stands.

A number of rows cannot stay the same while a source grows by a rule that sees no order: of two sources without a common row each
would keep its own, and both together twice as many. So `rows` takes what comes first, which appended rows do not change.

Axes: N rows, G groups.
Always true:
- the rows of a group, and groups of one prompt, are on one side, in whatever source of a mixture;
- share: the side follows from the prompt alone: a source may grow, shrink or change its order;
- rows: prompts that are held out stay the same, no more and no fewer, however many rows are appended to the sources;
- a larger share, and more rows, hold out all that a smaller one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
Numbers = npt.NDArray[np.uint64]
KEPT = 32  # answers of one process
ONE_IN = 4  # groups from the beginning of a source are held out, where rows are counted: a few in a row would be too alike
_answers: dict[tuple[HeldOut, tuple[str, ...]], list[Bools]] = {}


class HeldOut(NamedTuple):
    """The eval of a job whose rows are held out of its own sources.

    Attributes:
        key: that says how many.
        size: a share of all groups, or a number of rows of each source.
    """

    name: str
    key: Literal["share", "rows"]
    size: float

    @property
    def where(self) -> str:
        """The key of the job."""
        return f"evals.{self.name}.{self.key}"


class HeldCounts(NamedTuple):
    """Counts what is held out."""

    rows: int
    groups: int


def held_out(job: JobConfig) -> HeldOut | None:
    """The eval that holds rows out; None: no eval does."""
    return next((HeldOut(name, *each.held) for name, each in job.evals.items() if each.held), None)


def trained_rows(job: JobConfig, entries: Sequence[Entry]) -> RowsConfig | None:
    """`plan.rows` of the training rows: those of the job, without what is held out.

    Raises:
        PlanError: nothing is held out, or all of a source.
    """
    rows = job.plan.rows
    if held_out(job) is None:
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
        raise _wrong(job, "holds out none of the rows of plan.rows", more=True)
    return tuple(found.tolist())


def held_counts(job: JobConfig, entries: Sequence[Entry]) -> HeldCounts:
    """Rows and groups that are held out, of all of the job's."""
    held = held_out(job)
    if held is None:
        return HeldCounts(0, 0)
    masks = held_masks(held, entries)
    bounds = [group_bounds(one) for one in entries]
    groups = [mask if ends is None else mask[ends[:-1]] for mask, ends in zip(masks, bounds, strict=True)]
    return HeldCounts(sum(int(one.sum()) for one in masks), sum(int(one.sum()) for one in groups))


def held_masks(held: HeldOut, entries: Sequence[Entry]) -> list[Bools]:
    """bool [N] of each entry, whether each of its rows is held out; reads the token ids of all rows, once in a process.

    Raises:
        PlanError: a source does not have so many rows to hold out.
    """
    known = (held, tuple(rows_key(one.key, one.recipe) for one in entries))
    if known not in _answers:
        if len(_answers) >= KEPT:
            _answers.clear()
        bounds = [group_bounds(one) for one in entries]
        firsts = [
            np.arange(one.num_rows) if ends is None else ends[:-1]
            for one, ends in zip(entries, bounds, strict=True)
        ]
        sizes = [
            np.ones(len(first), np.int64) if ends is None else np.diff(ends)
            for first, ends in zip(firsts, bounds, strict=True)
        ]
        numbers = [
            np.fromiter(_numbers(one.base or one, first), np.uint64, len(first))
            for one, first in zip(entries, firsts, strict=True)
        ]
        if held.key == "share":
            sides = [one < np.uint64(int(held.size * 2**64)) for one in numbers]
        else:
            chosen = _first_rows(held, numbers, sizes)
            sides = [np.isin(one, chosen) for one in numbers]
        _answers[known] = [np.repeat(side, size) for side, size in zip(sides, sizes, strict=True)]
    return _answers[known]


def _first_rows(held: HeldOut, numbers: Sequence[Numbers], sizes: Sequence[Int64s]) -> Numbers:
    """Numbers of the groups that have the first rows of each source."""
    candidates = [np.flatnonzero(one < np.uint64(2**64 // ONE_IN)) for one in numbers]
    rows = [np.cumsum(size[some]) for size, some in zip(sizes, candidates, strict=True)]
    most = [int(one[-1]) if len(one) else 0 for one in rows]
    if min(most) < held.size:
        number = int(np.argmin(most))
        of = f" of source {number}" if len(most) > 1 else ""
        what = f"{held.size:,} rows cannot be held out{of}: one prompt in {ONE_IN} may be, and these have {most[number]:,} rows"
        raise PlanError(held.where, what, f"give at most {most[number]:,}, or a share in place of rows")
    stops = [int(np.searchsorted(one, held.size)) + 1 for one in rows]
    return np.unique(
        np.concatenate([one[some[:stop]] for one, some, stop in zip(numbers, candidates, stops, strict=True)])
    )


def _held_ids(job: JobConfig, entries: Sequence[Entry]) -> Int64s:
    held = held_out(job)
    assert held is not None, "asked of a job that holds rows out"
    masks = held_masks(held, entries)
    for number, mask in enumerate(masks):
        if mask.all():
            of = f" of source {number}" if len(masks) > 1 else ""
            raise _wrong(job, f"{held.size:g} leaves no row{of} to train", more=False)
    if not any(mask.any() for mask in masks):
        raise _wrong(job, f"{held.size:g} holds out none of {sum(map(len, masks)):,} rows", more=True)
    ids = [
        one.row_ids()[mask] + source_base(number)
        for number, (one, mask) in enumerate(zip(entries, masks, strict=True))
    ]
    return np.concatenate(ids)


def _wrong(job: JobConfig, what: str, *, more: bool) -> PlanError:
    held = held_out(job)
    assert held is not None, "asked of a job that holds rows out"
    remedy = (
        f"give a {'larger' if more else 'smaller'} share"
        if held.key == "share"
        else f"give {'more' if more else 'fewer'} rows"
    )
    return PlanError(held.where, what, remedy)


def _numbers(entry: Entry, firsts: Int64s) -> Iterator[int]:
    """The number of each group, by its first row."""
    start = done = 0
    for table in entry.part_tables():
        stop = int(np.searchsorted(firsts, start + table.num_rows))
        for prompt in _prompts(table, firsts[done:stop] - start):
            yield int.from_bytes(hashlib.sha256(prompt.tobytes()).digest()[:8], "big")
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
