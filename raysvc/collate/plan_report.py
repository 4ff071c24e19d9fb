"""Predicts what a run will look like, from lengths alone.

Axes: K sampled steps, R ranks.
Always true:
- nothing is read but lengths: a report takes seconds for any number of rows;
- counts of steps are exact; shares and percentiles are of the sampled steps, which are spread evenly over the
  run;
- `share_*` lie in [0, 1]; imbalance is the largest rank over the mean, 1 where all are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raysvc.collate.geometry import geometry_of
from raysvc.collate.shard_bytes import ColumnBytes, bytes_by_rank
from raysvc.plan.plan import MiniBatchPlan, Plan
from raysvc.plan.rank_plan import DUMMY_LENGTH

_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


@dataclass(frozen=True)
class PlanReport:
    """Numbers of a plan.

    Attributes:
        num_rows: rows of the entry.
        num_groups: groups of an epoch.
        steps_per_epoch: steps.
        num_steps: of all epochs.
        optimizer_steps: of all epochs and update epochs.
        sampled_steps: K.
        tokens_per_step: percentile (0 to 100) -> tokens of real rows.
        histogram: (from, to, steps) of tokens per step, ten bins of equal width.
        share_padding: cells of micro-batches without a token of a real row.
        share_dummies: cells of micro-batches that a dummy's tokens take.
        packing_efficiency: tokens of real rows over the capacity of all packs; None for other layouts.
        imbalance_tokens: mean over mini-batches of largest over mean tokens of a rank.
        imbalance_cost: the same of cost, mean over mini-batches.
        micro_batches_per_step: mean per rank.
        dummies: in the sampled steps.
        truncated: rows cut to the budget in the sampled steps.
        dropped: rows over the budget that were left out of the sampled steps.
        alone: rows over the budget in a micro-batch of their own in the sampled steps.
        skipped: rows of `skip_rows` in the sampled steps.
        bytes_per_step: mean bytes of all shards of a step.
        bytes_look_ahead: bytes of the largest step, times look-ahead and the step in use.
        held_rows: rows of the entry that an eval holds out; they are in no other number.
        held_groups: groups of them.
        unit: what a group is where rows have a name for it: `pairs` or `examples`.
    """

    num_rows: int
    num_groups: int
    steps_per_epoch: int
    num_steps: int
    optimizer_steps: int
    sampled_steps: int
    tokens_per_step: dict[int, int]
    histogram: tuple[tuple[int, int, int], ...]
    share_padding: float
    share_dummies: float
    packing_efficiency: float | None
    imbalance_tokens: float
    imbalance_cost: float
    micro_batches_per_step: float
    dummies: int
    truncated: int
    dropped: int
    alone: int
    skipped: int
    bytes_per_step: int
    bytes_look_ahead: int
    held_rows: int = 0
    held_groups: int = 0
    unit: str = "groups"


class StepRow(NamedTuple):
    """Says where one real row of a step goes.

    Attributes: number of the mini-batch, rank, micro-batch on that rank, group in the mini-batch; row id;
    first token and number of tokens that are used.
    """

    mini: int
    rank: int
    micro: int
    group: int
    row_id: int
    start: int
    length: int


class _MiniFigures(NamedTuple):
    """One mini-batch in numbers: see `PlanReport`; costs are integers."""

    tokens: int
    cells: int
    dummies: int
    lines: int
    micro_batches: int
    num_bytes: int
    imbalance_tokens: float
    imbalance_cost: float
    truncated: int
    dropped: int
    alone: int
    skipped: int


def plan_report(
    plan: Plan,
    dp_size: int,
    column_bytes: ColumnBytes,
    sample_steps: int = 64,
    look_ahead_steps: int = 2,
) -> PlanReport:
    """The report of `plan` for `dp_size` ranks, from `sample_steps` of its steps."""
    schedule = plan.schedule
    count = min(sample_steps, schedule.num_steps)
    steps = [number * schedule.num_steps // count for number in range(count)]
    measured = [
        [_measure(plan, mini, dp_size, column_bytes) for mini in plan.step(step, dp_size).mini_batches]
        for step in steps
    ]
    minis = [mini for step in measured for mini in step]
    tokens = np.array([sum(mini.tokens for mini in step) for step in measured], np.int64)
    step_bytes = [sum(mini.num_bytes for mini in step) for step in measured]
    cells = max(1, sum(mini.cells for mini in minis))
    lines = sum(mini.lines for mini in minis)
    capacity = plan.config.micro_batch_tokens if plan.config.layout == "packed" else None
    return PlanReport(
        num_rows=plan.rows.num_rows,
        num_groups=schedule.num_groups,
        steps_per_epoch=schedule.steps_per_epoch,
        num_steps=schedule.num_steps,
        optimizer_steps=schedule.optimizer_steps,
        sampled_steps=count,
        tokens_per_step={p: int(np.percentile(tokens, p, method="nearest")) for p in _PERCENTILES},
        histogram=_histogram(tokens),
        share_padding=1 - int(tokens.sum()) / cells,
        share_dummies=sum(mini.dummies for mini in minis) * DUMMY_LENGTH / cells,
        packing_efficiency=int(tokens.sum()) / (lines * capacity) if capacity and lines else None,
        imbalance_tokens=float(np.mean([mini.imbalance_tokens for mini in minis])),
        imbalance_cost=float(np.mean([mini.imbalance_cost for mini in minis])),
        micro_batches_per_step=sum(mini.micro_batches for mini in minis) / count,
        dummies=sum(mini.dummies for mini in minis),
        truncated=sum(mini.truncated for mini in minis),
        dropped=sum(mini.dropped for mini in minis),
        alone=sum(mini.alone for mini in minis),
        skipped=sum(mini.skipped for mini in minis),
        bytes_per_step=sum(step_bytes) // count,
        bytes_look_ahead=max(step_bytes) * (look_ahead_steps + 1),
    )


def in_words(report: PlanReport) -> dict[str, str]:
    """The figures of a plan as people read them, with their units; counts of exceptions that did not occur are left out."""
    percentiles = report.tokens_per_step
    bytes_per_step, look_ahead = (
        f"{number / 1e6:,.2f} MB" for number in (report.bytes_per_step, report.bytes_look_ahead)
    )
    sampled = f"in {report.sampled_steps:,} sampled steps"
    exceptions = {
        "rows held out for evals": (report.held_rows, f"in {report.held_groups:,} {report.unit}"),
        "dummy rows, which fill ranks": (report.dummies, sampled),
        "rows cut to the budget": (report.truncated, sampled),
        "rows over the budget, left out": (report.dropped, sampled),
        "rows over the budget, alone in a micro-batch": (report.alone, sampled),
        "rows of skip_rows": (report.skipped, sampled),
    }
    told = {
        "rows": f"{report.num_rows:,}",
        f"{report.unit} in an epoch": f"{report.num_groups:,}",
        "steps": f"{report.num_steps:,}, {report.steps_per_epoch:,} in an epoch",
        "optimizer steps": f"{report.optimizer_steps:,}",
        "tokens of a step": f"{percentiles[50]:,}, half of the steps {percentiles[25]:,} to {percentiles[75]:,}",
        "fewest and most tokens of a step": f"{percentiles[0]:,} and {percentiles[100]:,}",
        "micro-batches of a rank in a step": f"{report.micro_batches_per_step:.3g}",
        "padding": f"{report.share_padding:.2%} of the cells",
        "cells of dummy rows": f"{report.share_dummies:.2%}",
        "largest rank over the mean, tokens": f"{report.imbalance_tokens:.3f}",
        "largest rank over the mean, cost": f"{report.imbalance_cost:.3f}",
        "bytes of a step": bytes_per_step,
        "bytes of a step and its look-ahead": f"at most {look_ahead}",
    }
    if report.packing_efficiency is not None:
        told["filled part of the packs"] = f"{report.packing_efficiency:.2%}"
    return told | {name: f"{count:,} {where}" for name, (count, where) in exceptions.items() if count}


def rows_of_step(plan: Plan, step: int, dp_size: int) -> Iterator[StepRow]:
    """Every real row of `step`, by mini-batch, rank, micro-batch and place in it."""
    for number, mini in enumerate(plan.step(step, dp_size).mini_batches):
        for rank, ranked in enumerate(mini.ranks):
            for micro, (start, stop) in enumerate(ranked.micro_batches):
                for row in ranked.rows[ranked.lines[start] : ranked.lines[stop]].tolist():
                    if row >= 0:
                        yield StepRow(
                            number,
                            rank,
                            micro,
                            int(mini.group_index[row]),
                            int(mini.row_ids[row]),
                            int(mini.starts[row]),
                            int(mini.lengths[row]),
                        )


def _measure(plan: Plan, mini: MiniBatchPlan, dp_size: int, column_bytes: ColumnBytes) -> _MiniFigures:
    config = plan.config
    geometry = geometry_of(mini.ranks, mini.lengths, config.layout, config.pad_to_multiple, config.align)
    rank_of = np.repeat(np.arange(dp_size), np.diff(geometry.sequence_bounds))
    tokens = np.bincount(rank_of, geometry.lengths, dp_size)
    costs = np.bincount(rank_of, plan.rules.cost.of(geometry.lengths), dp_size)
    return _MiniFigures(
        tokens=int(mini.lengths.sum()),
        cells=sum(
            (micro.stop - micro.start) * micro.width for rank in geometry.micro_batches for micro in rank
        ),
        dummies=int((geometry.rows < 0).sum()),
        lines=int(geometry.line_bounds[-1]),
        micro_batches=len(geometry.micro_batches[0]),
        num_bytes=int(bytes_by_rank(geometry, column_bytes).sum()),
        imbalance_tokens=float(tokens.max() / tokens.mean()),
        imbalance_cost=float(costs.max() / costs.mean()),
        truncated=mini.num_truncated,
        dropped=mini.num_dropped,
        alone=mini.num_alone,
        skipped=mini.num_skipped,
    )


def _histogram(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[tuple[int, int, int], ...]:
    low, high = int(tokens.min()), int(tokens.max()) + 1
    edges = np.unique(np.linspace(low, high, 11).round().astype(np.int64))
    counts = np.histogram(tokens, edges)[0]
    return tuple(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))
