"""Deals the rows of a mini-batch to ranks and micro-batches.

Axes: N rows of the mini-batch, R ranks, S rows and B lines of one rank. A line is one row of the rank's 2-D
arrays: a row where rows are padded, a pack or a window of several rows otherwise.

1. Make lines: a row each where rows are padded; packs (`packed`) or windows (`stream`) of several rows otherwise.
2. Make micro-batches of lines: a fixed number of rows, or as many as the token budget holds.
3. Bring their number to a multiple of R: split the costliest, then fill with dummies.
4. Deal them to the ranks, costliest first, so that the i-th ones of all ranks cost about the same.
5. Where rows have media, swap rows between ranks until the encoder's work is even too (`even_media`).

Always true:
- every row is on exactly one rank, in exactly one line, in exactly one micro-batch;
- every rank has the same number of micro-batches, none of them empty;
- a dummy (-1) fills a micro-batch that has no row, or, with a fixed number of rows, evens out the ranks:
  fewer than R of them then;
- a micro-batch keeps to the token budget, except for a row that is over it by itself;
- the two rows of a pair are neighbours in one micro-batch (`deal_pairs`);
- micro-batches come costliest first, and the i-th ones of all ranks cost about the same (`balance`);
- rows without media are dealt as if there were no media at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.job.config import Layout, Packing
from raysvc.plan.balance import deal_even
from raysvc.plan.cost import CostModel
from raysvc.plan.even_media import Fit, Rank, even_out
from raysvc.plan.pack import Packs, aligned, pack_best_fit, pack_first_fit, split_to, spread

DUMMY = -1
DUMMY_LENGTH = 2


@dataclass(frozen=True)
class Rules:
    """Says how rows become micro-batches.

    Attributes:
        layout: of the arrays.
        rows: rows per micro-batch; None: by tokens.
        tokens: cells per micro-batch (rows x width), or capacity of a pack; None: by rows.
        pad_to_multiple: widths are rounded up to this.
        align: packed sequences are rounded up to this.
        packing: which packer.
        cost: what balances the ranks.
    """

    layout: Layout
    rows: int | None
    tokens: int | None
    pad_to_multiple: int = 1
    align: int = 1
    packing: Packing = "balanced"
    cost: CostModel = field(default_factory=CostModel)

    def cut_by(self, cp_size: int) -> Rules:
        """The rules with which lines and the sequences on them divide among so many context-parallel ranks."""
        if cp_size == 1:
            return self
        align, multiple = cut_multiple(self.align, cp_size), cut_multiple(self.pad_to_multiple, cp_size)
        return replace(self, align=align, pad_to_multiple=multiple)


def cut_multiple(multiple: int, cp_size: int) -> int:
    """The smallest multiple of `multiple` that divides into two equal parts for each context-parallel rank."""
    return math.lcm(multiple, 2 * cp_size) if cp_size > 1 else multiple


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Holds what one rank gets of a mini-batch.

    Attributes:
        rows: int32 [S], positions into the mini-batch's `row_ids`, -1 for a dummy.
        lines: int32 [B + 1], where each line begins in `rows`; `arange(B + 1)` where rows are padded.
        micro_batches: [start, stop) ranges over the lines.
    """

    rows: npt.NDArray[np.int32]
    lines: npt.NDArray[np.int32]
    micro_batches: tuple[tuple[int, int], ...]


def deal_pairs(
    lengths: npt.NDArray[np.int32],
    dp_size: int,
    rules: Rules,
    patches: npt.NDArray[np.int64] | None = None,
) -> tuple[RankPlan, ...]:
    """The plan of each rank for rows that come two by two (int32 [2 P]); the two share a micro-batch, first before second.

    Pairs are dealt as rows are: in a pack one needs the room of both, elsewhere two lines as wide as the wider one. A
    dummy is a pair too.
    """
    sizes = lengths.astype(np.int64).reshape(-1, 2)
    if rules.layout == "packed":
        needs = aligned(sizes, rules.align).sum(axis=1)
        of_pairs = replace(rules, align=1)
    else:
        needs = sizes.max(axis=1, initial=0)
        of_pairs = replace(
            rules,
            rows=None if rules.rows is None else max(1, rules.rows // 2),
            tokens=None if rules.tokens is None else rules.tokens // 2,
        )
    of_both = None if patches is None else patches.reshape(-1, 2).sum(axis=1)
    plans = deal(needs.astype(np.int32), dp_size, of_pairs, of_both)
    return tuple(_of_rows(plan, rules.layout) for plan in plans)


def pair_cells(lengths: npt.NDArray[np.integer[Any]], rules: Rules) -> npt.NDArray[np.int64]:
    """int64 [P], cells of a micro-batch that each pair of rows (int [2 P]) takes."""
    sizes = lengths.astype(np.int64).reshape(-1, 2)
    if rules.layout == "packed":
        return np.asarray(aligned(sizes, rules.align).sum(axis=1))
    return np.asarray(2 * aligned(sizes.max(axis=1, initial=0), rules.pad_to_multiple))


def _of_rows(pairs: RankPlan, layout: Layout) -> RankPlan:
    """The plan of the rows of a plan of pairs."""
    real = pairs.rows[:, None] != DUMMY
    rows = np.where(real, 2 * pairs.rows[:, None] + np.array([0, 1]), DUMMY).astype(np.int32).reshape(-1)
    if layout == "packed":
        return RankPlan(rows, 2 * pairs.lines, pairs.micro_batches)
    micro_batches = tuple((2 * start, 2 * stop) for start, stop in pairs.micro_batches)
    return RankPlan(rows, np.arange(len(rows) + 1, dtype=np.int32), micro_batches)


def deal(
    lengths: npt.NDArray[np.int32],
    dp_size: int,
    rules: Rules,
    patches: npt.NDArray[np.int64] | None = None,
) -> tuple[RankPlan, ...]:
    """The plan of each of `dp_size` ranks.

    Args:
        lengths: int32 [N], tokens of each row.
        dp_size: R.
        rules: how rows become micro-batches.
        patches: int64 [N], work of a media encoder, by row; None: rows have no media.
    """
    sizes = lengths.astype(np.int64)
    plans = _dealt(sizes, dp_size, rules)
    if dp_size == 1 or patches is None or not patches.any():
        return plans
    by_line = rules.layout == "packed"
    cells = aligned(sizes, rules.align if by_line else rules.pad_to_multiple)
    ranks = even_out(
        [_lines_of(plan) for plan in plans], rules.cost.of(sizes), patches, Fit(cells, rules.tokens, by_line)
    )  # 5
    return tuple(_of_lines(rank) for rank in ranks)


def _dealt(sizes: npt.NDArray[np.int64], dp_size: int, rules: Rules) -> tuple[RankPlan, ...]:
    if rules.layout == "packed":  # 1: a line is a pack, and a micro-batch of its own
        return _deal_lines(_packs(sizes, dp_size, rules), sizes, dp_size, rules)
    if rules.rows is not None:
        return _deal_rows(sizes, dp_size, rules.rows, rules.cost)
    return _deal_micro_batches(sizes, dp_size, rules)


def deal_windows(
    window_of: npt.NDArray[np.int32], dp_size: int, windows_per_micro_batch: int
) -> tuple[RankPlan, ...]:
    """The plan of each rank for pieces of documents; `window_of` (int32 [N]) is a piece's window, ascending."""
    bounds = np.flatnonzero(np.diff(window_of, prepend=-1, append=window_of[-1:] + 1)).tolist()
    windows = _filled([list(range(start, stop)) for start, stop in pairwise(bounds)], dp_size)  # 1, 3
    micro_batches = _ranges(len(windows) // dp_size, windows_per_micro_batch)
    return tuple(_rank_plan(windows[rank::dp_size], micro_batches) for rank in range(dp_size))


def _deal_rows(
    sizes: npt.NDArray[np.int64], dp_size: int, rows: int, cost: CostModel
) -> tuple[RankPlan, ...]:
    """Fixed rows per micro-batch: dealt longest first, so that neighbours need little padding."""
    per_rank = max(1, -(-len(sizes) // dp_size))
    order = np.full(per_rank * dp_size, DUMMY, np.int32)
    order[: len(sizes)] = np.argsort(-sizes, kind="stable")  # 1, 3: the rest are dummies
    costs = cost.of(np.append(sizes, DUMMY_LENGTH))  # the last one is a dummy's
    rows_BR = deal_even(order, costs, dp_size)  # 4
    lines = np.arange(per_rank + 1, dtype=np.int32)
    return tuple(
        RankPlan(np.ascontiguousarray(rows_BR[:, rank]), lines, _ranges(per_rank, rows))
        for rank in range(dp_size)
    )


def _deal_micro_batches(sizes: npt.NDArray[np.int64], dp_size: int, rules: Rules) -> tuple[RankPlan, ...]:
    """Token budget, padded: runs of similar length, as few as fit; then whole micro-batches are dealt.

    As many micro-batches as R divides are made anyway, so the rows are cut to the smallest budget that needs no
    more of them: full ones beside a nearly empty rest would leave ranks idle.
    """
    assert rules.tokens is not None
    order = np.argsort(-sizes, kind="stable")
    widths = aligned(sizes[order], rules.pad_to_multiple).tolist()
    fewest = len(_cut(widths, rules.tokens))
    wanted = -(-fewest // dp_size) * dp_size
    budgets = range(min(max(widths, default=0), rules.tokens), rules.tokens + 1)
    least = bisect_left(budgets, -wanted, key=lambda budget: -len(_cut(widths, budget)))
    runs = [order[start:stop].tolist() for start, stop in _cut(widths, budgets[least])]  # 2
    runs = split_to(runs, dp_size, rules.cost.of(sizes), in_order=True)  # 3
    dealt = _deal_runs(_filled(runs, dp_size), sizes, dp_size, rules.cost)  # 3, 4
    return tuple(_padded_plan(runs, sizes) for runs in dealt)


def _cut(widths: list[int], budget: int) -> list[tuple[int, int]]:
    """Runs [start, stop) of rows in descending width, each of at most `budget` cells or one row."""
    runs = []
    start = 0
    while start < len(widths):
        stop = start + max(1, budget // widths[start]) if widths[start] else len(widths)
        runs.append((start, min(stop, len(widths))))
        start = stop
    return runs


def _deal_lines(
    packs: Packs, sizes: npt.NDArray[np.int64], dp_size: int, rules: Rules
) -> tuple[RankPlan, ...]:
    dealt = _deal_runs(_filled(packs, dp_size), sizes, dp_size, rules.cost)
    return tuple(_rank_plan(lines, _ranges(len(lines), 1)) for lines in dealt)


def _packs(sizes: npt.NDArray[np.int64], dp_size: int, rules: Rules) -> Packs:
    """Packs, a multiple of R of them where the sequences allow it."""
    assert rules.tokens is not None
    packer = pack_first_fit if rules.packing == "first_fit" else pack_best_fit
    packs = packer(sizes, rules.tokens, rules.align)
    wanted = -(-len(packs) // dp_size) * dp_size
    if rules.packing == "balanced" and wanted <= len(sizes):
        even = spread(sizes, wanted, rules.tokens, rules.align, rules.cost)
        if even is not None and all(even):
            return even
    return split_to(packs, dp_size, rules.cost.of(sizes))


def _filled(runs: Packs, dp_size: int) -> Packs:
    missing = max(dp_size, -(-len(runs) // dp_size) * dp_size) - len(runs)
    return runs + [[DUMMY]] * missing


def _deal_runs(runs: Packs, sizes: npt.NDArray[np.int64], dp_size: int, cost: CostModel) -> list[Packs]:
    """Equal numbers of `runs` (a multiple of R) for every rank, costliest first."""
    costs = cost.of(np.append(sizes, DUMMY_LENGTH))
    run_costs = np.array([costs[run].sum() for run in runs], np.int64)
    order = np.argsort(-run_costs, kind="stable").astype(np.int32)
    numbers_BR = deal_even(order, run_costs, dp_size)
    return [[runs[number] for number in numbers_BR[:, rank].tolist()] for rank in range(dp_size)]


def _lines_of(plan: RankPlan) -> Rank:
    """Micro-batches of lines of rows."""
    rows = plan.rows.tolist()
    lines = [rows[start:stop] for start, stop in pairwise(plan.lines.tolist())]
    return [lines[start:stop] for start, stop in plan.micro_batches]


def _of_lines(rank: Rank) -> RankPlan:
    bounds = np.cumsum([0] + [len(micro) for micro in rank]).tolist()
    return _rank_plan([line for micro in rank for line in micro], tuple(pairwise(bounds)))


def _padded_plan(runs: Packs, sizes: npt.NDArray[np.int64]) -> RankPlan:
    rows = np.array([row for run in runs for row in run], np.int32)
    bounds = np.cumsum([0] + [len(run) for run in runs]).tolist()
    return RankPlan(rows, np.arange(len(rows) + 1, dtype=np.int32), tuple(pairwise(bounds)))


def _rank_plan(lines: Packs, micro_batches: tuple[tuple[int, int], ...]) -> RankPlan:
    rows = np.array([row for line in lines for row in line], np.int32)
    return RankPlan(rows, np.cumsum([0] + [len(line) for line in lines], dtype=np.int32), micro_batches)


def _ranges(num_lines: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + size, num_lines)) for start in range(0, num_lines, size))
