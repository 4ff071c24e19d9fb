"""Decides where each row of a mini-batch lies in the arrays of its rank.

Axes: R ranks, B lines and S sequences of all ranks one after the other, W_r columns of rank r.
A column of the shards is one flat buffer of cells, rank after rank, line after line.

1. Put the sequences of all ranks one after the other, with where each rank and each line begins among them.
2. Lay out each line: its sequences one after the other, each rounded up to `align`.
3. A micro-batch is as wide as its widest line, rounded up to `pad_to_multiple`; a rank's arrays are as wide as its widest one.
4. A sequence's first cell follows from rank, line and column.

Always true:
- sequences do not overlap; with `align` each begins at a multiple of it;
- a micro-batch's width covers its lines and is a multiple of `pad_to_multiple`;
- W_r is the width of the widest micro-batch of rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, repeat

import numpy as np
import numpy.typing as npt

from raysvc.collate.shard import Array, MicroBatchInfo
from raysvc.job.config import Layout
from raysvc.plan.rank_plan import DUMMY, DUMMY_LENGTH, RankPlan
from raysvc.ragged import Int64s, offsets_of


@dataclass(frozen=True, eq=False)
class Geometry:
    """Geometry of the arrays of all ranks.

    Attributes:
        layout: of the arrays.
        rows: int64 [S], position of each sequence's row in the mini-batch, -1 for a dummy.
        lengths: int64 [S], tokens of each sequence.
        cells: int64 [S], cell of each sequence's first token.
        columns: int64 [S], column of each sequence's first token.
        numbers: int64 [S], number of the sequence on its line, from 1.
        bounds: int32 [S + B], for each line 0 and the aligned end of each of its sequences.
        sequence_bounds: int64 [R + 1], where each rank begins among the sequences.
        line_bounds: int64 [R + 1], where each rank begins among the lines.
        cell_bounds: int64 [R + 1], where each rank begins among the cells.
        line_starts: int64 [B + 1], where each line begins among the sequences.
        micro_batches: of each rank.
    """

    layout: Layout
    rows: Int64s
    lengths: Int64s
    cells: Int64s
    columns: Int64s
    numbers: Int64s
    bounds: npt.NDArray[np.int32]
    sequence_bounds: Int64s
    line_bounds: Int64s
    cell_bounds: Int64s
    line_starts: Int64s
    micro_batches: tuple[tuple[MicroBatchInfo, ...], ...]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """[B, W] of the arrays of each rank."""
        lines = np.diff(self.line_bounds)
        return list(zip(lines.tolist(), (np.diff(self.cell_bounds) // lines).tolist(), strict=True))

    @cached_property
    def dummies(self) -> Int64s:
        """int64, the sequences that are dummies."""
        return np.flatnonzero(self.rows == DUMMY)

    def by_rank(self, sheet: Array) -> list[Array]:
        """[B, W, *shape] of each rank: views of the flat cells [C, *shape] of all ranks."""
        bounds = pairwise(self.cell_bounds.tolist())
        shapes = [(*shape, *sheet.shape[1:]) for shape in self.shapes]
        return [sheet[a:b].reshape(shape) for (a, b), shape in zip(bounds, shapes, strict=True)]

    @property
    def left(self) -> bool:
        """Returns whether padding comes first."""
        return self.layout == "padded_left"


def geometry_of(
    ranks: Sequence[RankPlan],
    row_lengths: npt.NDArray[np.int32],
    layout: Layout,
    pad_to_multiple: int = 1,
    align: int = 1,
) -> Geometry:
    """The geometry of `ranks` over rows of `row_lengths` (int32 [N])."""
    rows = np.concatenate([plan.rows for plan in ranks]).astype(np.int64)  # 1
    lengths = np.append(row_lengths.astype(np.int64), DUMMY_LENGTH)[rows]  # DUMMY is the last one
    sequence_bounds = offsets_of([len(plan.rows) for plan in ranks])
    line_bounds = offsets_of([len(plan.lines) - 1 for plan in ranks])
    line_starts = np.append(
        np.concatenate([plan.lines[:-1] for plan in ranks])
        + np.repeat(sequence_bounds[:-1], np.diff(line_bounds)),
        len(rows),
    )
    num_lines = int(line_bounds[-1])
    line_of = np.repeat(np.arange(num_lines), np.diff(line_starts))
    # 2
    ends = np.cumsum(_up(lengths, align if layout == "packed" else 1))
    ends -= np.append(0, ends)[line_starts[line_of]]
    used = ends[line_starts[1:] - 1]  # no line is empty
    starts = np.append(0, ends[:-1])
    starts[line_starts[:-1]] = 0

    # 3
    micro_starts = np.concatenate(
        [
            first + [start for start, _ in plan.micro_batches]
            for first, plan in zip(line_bounds, ranks, strict=False)
        ]
    )
    micro_widths = _up(np.maximum(np.maximum.reduceat(used, micro_starts), 1), pad_to_multiple)
    line_tokens = np.add.reduceat(lengths, line_starts[:-1])
    micro_tokens = np.add.reduceat(line_tokens, micro_starts)
    micro_bounds = offsets_of([len(plan.micro_batches) for plan in ranks])
    widths = np.maximum.reduceat(micro_widths, micro_bounds[:-1])
    cell_bounds = offsets_of(np.diff(line_bounds) * widths)

    bounds = np.zeros(len(rows) + num_lines, np.int32)  # np.insert takes four times as long
    bounds[np.arange(1, len(rows) + 1) + line_of] = ends

    # 4
    rank_of = np.repeat(np.arange(len(ranks)), np.diff(sequence_bounds))
    columns = widths[rank_of] - lengths if layout == "padded_left" else starts
    return Geometry(
        layout=layout,
        rows=rows,
        lengths=lengths,
        cells=cell_bounds[rank_of] + (line_of - line_bounds[rank_of]) * widths[rank_of] + columns,
        columns=columns,
        numbers=np.arange(1, len(rows) + 1) - line_starts[line_of],
        bounds=bounds,
        sequence_bounds=sequence_bounds,
        line_bounds=line_bounds,
        cell_bounds=cell_bounds,
        line_starts=line_starts,
        micro_batches=_micro_batches(ranks, micro_bounds, micro_widths, micro_tokens),
    )


def _micro_batches(
    ranks: Sequence[RankPlan], bounds: Int64s, widths: Int64s, tokens: Int64s
) -> tuple[tuple[MicroBatchInfo, ...], ...]:
    starts, stops = zip(*chain.from_iterable(plan.micro_batches for plan in ranks), strict=True)
    of_lines = zip(starts, stops, widths.tolist(), tokens.tolist(), strict=True)
    every = tuple(
        map(tuple.__new__, repeat(MicroBatchInfo), of_lines)
    )  # a third of the time of calling MicroBatchInfo
    return tuple(every[start:stop] for start, stop in pairwise(bounds.tolist()))


def _up(values: Int64s, multiple: int) -> Int64s:
    return -(-values // multiple) * multiple if multiple > 1 else values


assert DUMMY == -1  # `geometry_of` looks lengths up with it
