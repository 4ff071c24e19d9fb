"""Defines what workers report, and by which rule ranks become one number.

Always true:
- shares (losses and other means over a mini-batch) and counts are summed over micro-batches and ranks;
- `*_max` and `max_*` are the largest, `*_min` and `min_*` the smallest; `lr`, `grad_norm` and `optimizer_step` are equal on all ranks and
  taken from the first; seconds (`*_s`) are those of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from raysvc.collate.row_values import RowValues

Metrics = dict[str, float]
SAME_ON_ALL = ("lr", "grad_norm", "optimizer_step")
DESIRABLE = "desirable_share"  # of the examples of a mini-batch, whose labels are told apart
CHOSEN, REJECTED, MARGINS = "rewards/chosen", "rewards/rejected", "rewards/margins"


@dataclass(frozen=True)
class MiniResult:
    """Holds what one rank reports of one optimizer step.

    Attributes:
        loss: this rank's share; the sum over ranks is the loss of the mini-batch.
        grad_norm: before clipping, of the reduced gradient (equal on all ranks).
        wait_s: waited for the shard after the step was asked for.
        idle_s: nothing was computed since the optimizer step before; holds `wait_s`.
        compute_s: forward, backward and optimizer.
        copy_s: copying the shard out of the object store, beside other work.
        nbytes: bytes of the shard.
        metrics: shares of the loss's own metrics, and `lr`.
        timing: seconds by part, where they are measured.
        rows: `loss` (a sum without weights) and `targets` of this rank's real rows; a pair counts once, at its first row.
            None where the loss does not say them.
    """

    loss: float
    grad_norm: float
    wait_s: float
    idle_s: float
    compute_s: float
    copy_s: float
    nbytes: int
    metrics: Metrics = field(default_factory=dict)
    timing: Metrics = field(default_factory=dict)
    rows: RowValues | None = None


def reduce_metrics(ranks: Sequence[Mapping[str, float]]) -> Metrics:
    """One number per name, of what all ranks (one per dp rank) reported; a rank may lack a name."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: _rule(name)([rank[name] for rank in ranks if name in rank]) for name in names}


def reduce_timing(ranks: Sequence[Mapping[str, float]]) -> Metrics:
    """Seconds of the slowest rank by part, as `<part>_s`; empty where nothing was measured."""
    return reduce_metrics([{f"{part}_s": seconds for part, seconds in rank.items()} for rank in ranks])


def step_metrics(minis: Sequence[Mapping[str, float]], counts: Sequence[int]) -> Metrics:
    """Returns one number per name, of the mini-batches of a step or an eval: what a loss says of itself, each with the
    weight of its loss; what is said of one label, with that of the examples that have it.

    Args:
        minis: of each, what `reduce_metrics` gives; one may lack a name, and is left out of its mean.
        counts: what the loss of each is a mean over.
    """
    found: Metrics = {}
    for name in dict.fromkeys(name for mini in minis for name in mini if name not in SAME_ON_ALL):
        there = [
            (mini[name], count * _part(name, mini))
            for mini, count in zip(minis, counts, strict=True)
            if name in mini
        ]
        values = [value for value, _ in there]
        if extreme_of(name):
            found[name] = _rule(name)(values)
        else:
            total = sum(count for _, count in there)
            found[name] = sum(value * count for value, count in there) / (total or 1)
    if DESIRABLE in found and CHOSEN in found and REJECTED in found:
        found[MARGINS] = found[CHOSEN] - found[REJECTED]
    return found


def _part(name: str, mini: Mapping[str, float]) -> float:
    """The share of a mini-batch's examples that a metric is a mean over."""
    if DESIRABLE not in mini or not name.endswith(("/chosen", "/rejected")):
        return 1.0
    return mini[DESIRABLE] if name.endswith("/chosen") else 1.0 - mini[DESIRABLE]


def extreme_of(name: str) -> Literal["", "max", "min"]:
    """Returns whether a metric is the largest or the smallest of its parts; "": their sum."""
    if name.endswith("_max") or name.startswith("max_"):
        return "max"
    return "min" if name.endswith("_min") or name.startswith("min_") else ""


def _rule(name: str) -> Callable[[Sequence[float]], float]:
    if name in SAME_ON_ALL:
        return lambda values: values[0]
    if name.endswith("_s"):
        return max
    rules: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "": sum}
    return rules[extreme_of(name)]
