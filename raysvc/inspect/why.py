"""Says which rows moved the loss of a step, from what its trainer reported of them.

1. The step is named, or it is the one whose metric lies farthest above the median of the steps around it.
2. What a target of each source usually costs is its mean over the steps around; of a source that is not around, that of all sources.
3. A row lifts the step's loss by what it costs above that, over the targets of the step.

Always true:
- losses are those that were reported while the step was trained; nothing is computed again but sums;
- the lifts of all rows add up to the step's loss above what it would usually be with its sources, and so do those of sources and lengths;
- of the gradient norm no row's share is known: it stands beside its median, no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.errors import ConfigError
from raysvc.ragged import Int64s
from raysvc.row_ids import written
from raysvc.training.loss_shares import length_bucket

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.feedback.request import RowOutcomes

Metric = Literal["loss", "grad_norm"]
METRICS: tuple[Metric, ...] = ("loss", "grad_norm")
AROUND = 50  # steps before, and as many after
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WhyRow:
    """One row of the step; losses are means over its targets.

    Attributes:
        lift: by how much it lifts the loss of the step.
        earlier: (step, loss) of the times before.
    """

    row_id: str
    source: str
    source_row: int
    tokens: int
    targets: int
    loss: float
    lift: float
    earlier: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class WhyGroup:
    """Rows of one source, or of at most so many tokens.

    Attributes:
        loss: mean over their targets.
    """

    name: str
    rows: int
    targets: int
    loss: float
    lift: float


@dataclass(frozen=True)
class Why:
    """What is known of a step.

    Attributes:
        loss: mean over the targets of all rows.
        loss_around: that of the steps around; None: there are none.
        metrics: name -> (of the step, median of the steps around), where the run keeps metrics.
        rows: those that lift the loss most come first.
    """

    step: int
    loss: float
    loss_around: float | None
    metrics: dict[str, tuple[float, float]]
    sources: tuple[WhyGroup, ...]
    lengths: tuple[WhyGroup, ...]
    rows: tuple[WhyRow, ...]


def spike_of(run_dir: str, metric: Metric) -> int:
    """The step whose metric lies farthest above the median of the steps around it.

    Raises:
        ConfigError: the run keeps no such metric.
    """
    steps, values = _metric(run_dir, metric)
    if not len(steps):
        raise ConfigError(run_dir, f"has no {metric} in metrics.jsonl", "give --step")
    width = min(2 * AROUND + 1, len(values))
    filled = np.where(np.isfinite(values), values, np.inf)  # NaN is worse than any number
    medians = np.median(np.lib.stride_tricks.sliding_window_view(filled, width), axis=-1)
    before = (width - 1) // 2
    medians = np.pad(medians, (before, len(values) - len(medians) - before), mode="edge")
    above = np.where(np.isfinite(values), values - medians, np.inf)
    return int(steps[np.argmax(above)])


def why(run_dir: str, step: int) -> tuple[Why, CacheEntry]:
    """What moved the loss of a step, and the entry that its rows are of.

    Raises:
        ConfigError: nobody reported the losses of its rows; the run serves rollouts, or does not say what it served.
        StoreError, EntryError: a report is damaged; the entry is gone.
    """
    from raysvc.actors.server.entry_stream import feedback_log
    from raysvc.builds.cache_entry import open_served
    from raysvc.builds.serve_log import FILE, read_served

    served = read_served(run_dir, step)
    if served is None or not served.spec.sources:
        what = f"has no {FILE}" if served is None else "serves rollouts"
        raise ConfigError(run_dir, what, "give the folder of a run that trains an entry")
    log = feedback_log(f"{run_dir}/server", {})
    decisions = log.decisions()
    near = _losses(log.outcomes(max(step - AROUND, 0), step + AROUND + 1, decisions))
    own, others = near.pick(near.steps == step), near.pick((near.steps != step) & np.isfinite(near.sums))
    if not len(own.steps):
        what = f"has no losses of the rows of step {step}"
        remedy = "report them while it trains: client.report_rows(step, row_ids, loss=losses)"
        raise ConfigError(run_dir, what, remedy)
    entry = open_served(served.spec)
    names = _sources(entry, own.row_ids)
    around = float(others.sums.sum() / max(others.targets.sum(), 1.0)) if len(others.steps) else None
    usual = _by_name(_sources(entry, others.row_ids), others)
    total = max(float(own.targets.sum()), 1.0)
    expected = np.array([usual.get(name, around or 0.0) for name in names])
    lifts = (own.sums - own.targets * expected) / total
    lifts[~np.isfinite(lifts)] = np.inf
    unique, place = np.unique(own.row_ids, return_inverse=True)
    batch = entry.rows.read(unique)
    tokens, source_rows = np.diff(batch.offsets)[place], batch.rows["source_row"][place]
    earlier = _earlier(_losses(log.outcomes(0, step, decisions, unique)))
    rows = [
        WhyRow(written(row), names[n], int(source_rows[n]), int(tokens[n]), int(own.targets[n]),
               float(own.sums[n] / max(own.targets[n], 1.0)), float(lifts[n]), tuple(earlier.get(row, ())))
        for n, row in enumerate(own.row_ids.tolist())
    ]  # fmt: skip
    rows.sort(key=lambda row: -row.lift)
    found = Why(
        step=step,
        loss=float(own.sums.sum()) / total,
        loss_around=around,
        metrics={name: both for name in METRICS if (both := _beside(run_dir, name, step)) is not None},
        sources=_groups(rows, lambda row: row.source),
        lengths=_groups(rows, lambda row: f"up to {int(length_bucket(np.array([row.tokens]))[0])}"),
        rows=tuple(rows),
    )
    return found, entry


class _Losses(NamedTuple):
    """Rows of steps; of each the sum over its targets, and how many these are."""

    steps: Int64s
    row_ids: Int64s
    sums: Floats
    targets: Floats

    def pick(self, those: npt.NDArray[np.bool_]) -> _Losses:
        return _Losses(self.steps[those], self.row_ids[those], self.sums[those], self.targets[those])


def _losses(told: RowOutcomes) -> _Losses:
    """A loop that reports no targets reports one number a row, which counts as one target."""
    nothing = np.full(len(told.steps), np.nan, np.float32)
    sums = told.columns.get("loss", nothing).astype(np.float64)
    targets = np.nan_to_num(told.columns.get("targets", nothing).astype(np.float64), nan=1.0)
    found = _Losses(told.steps, told.row_ids, sums, targets)
    return found.pick(~np.isnan(sums) | ~np.isnan(told.columns.get("targets", nothing)))


def _sources(entry: CacheEntry, row_ids: Int64s) -> list[str]:
    return entry.sources_of(row_ids) if entry.sources else ["rows"] * len(row_ids)


def _by_name(names: Sequence[str], losses: _Losses) -> dict[str, float]:
    """Mean loss of a target of each source."""
    known, number = np.unique(np.array(names, str), return_inverse=True)
    sums, targets = (np.bincount(number, values, len(known)) for values in (losses.sums, losses.targets))
    return dict(zip(known.tolist(), (sums / np.maximum(targets, 1.0)).tolist(), strict=True))


def _earlier(losses: _Losses) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for step, row, total, targets in zip(*(values.tolist() for values in losses), strict=True):
        found.setdefault(row, []).append((step, total / max(targets, 1.0)))
    return found


def _groups(rows: Sequence[WhyRow], name_of: Callable[[WhyRow], str]) -> tuple[WhyGroup, ...]:
    """The rows of each name together, those that lift most first."""
    by_name: dict[str, list[WhyRow]] = {}
    for row in rows:
        by_name.setdefault(name_of(row), []).append(row)
    groups = []
    for name, some in by_name.items():
        targets = sum(row.targets for row in some)
        loss = sum(row.loss * row.targets for row in some) / max(targets, 1)
        groups.append(WhyGroup(name, len(some), targets, loss, sum(row.lift for row in some)))
    return tuple(sorted(groups, key=lambda group: -group.lift))


def _beside(run_dir: str, metric: Metric, step: int) -> tuple[float, float] | None:
    """A metric of a step, and the median of the steps around it."""
    steps, values = _metric(run_dir, metric)
    here, near = steps == step, (steps != step) & (np.abs(steps - step) <= AROUND)
    return (float(values[here][0]), float(np.median(values[near]))) if here.any() and near.any() else None


def _metric(run_dir: str, metric: Metric) -> tuple[Int64s, Floats]:
    """A metric of each step; none where the trainer is not ours. Lines are searched, not parsed: a long run has many."""
    path = Path(run_dir, "metrics.jsonl")
    pattern = re.compile(rb'^\{"step": ?(\d+),.*?"%s": ?([^,}]+).*\n' % metric.encode(), re.MULTILINE)
    lines = pattern.findall(path.read_bytes()) if path.exists() else []
    steps = np.array([int(step) for step, _ in lines], np.int64)
    return steps, np.array([float(value) for _, value in lines], np.float64)
