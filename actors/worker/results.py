"""What workers report, and by which rule ranks become one number.

Always true:
- shares (losses and other means over a mini-batch) and counts are summed over micro-batches and ranks;
- `*_max` is the largest, `*_min` the smallest; `lr`, `grad_norm` and `optimizer_step` are equal on all ranks and
  taken from the first; seconds (`*_s`) are those of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysvc.collate.row_values import RowValues

Metrics = dict[str, float]
SAME_ON_ALL = ("lr", "grad_norm", "optimizer_step")


@dataclass(frozen=True)
class MiniResult:
    """What one rank reports of one optimizer step.

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


def _rule(name: str) -> Callable[[Sequence[float]], float]:
    if name in SAME_ON_ALL:
        return lambda values: values[0]
    if name.endswith(("_max", "_s")):
        return max
    return min if name.endswith("_min") else sum
