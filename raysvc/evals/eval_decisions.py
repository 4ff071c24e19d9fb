"""Defines what a run does on what its evals say: `trainer.keep_best` and `trainer.stop_after`.

1. After an eval its metric is compared with the best one before it: the lowest, or the highest of what rises as a model gets better.
2. keep_best: where it is better, the model is the best so far, and a checkpoint of it is written.
3. stop_after: where it is better by more than `threshold`, the count of evals without progress starts at 0 again, else it grows;
   the run stops when the count is `patience`.

Always true:
- what is known lies in the state of every checkpoint, so a run that was killed decides as one that was not;
- evals stop a run where HF's EarlyStoppingCallback stops it;
- a value that is not a number is neither the best nor progress;
- with another eval, other rows of it or another metric in the job, nothing is known; a run that is over refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysvc.errors import ConfigError, StateMismatch
from raysvc.job.objectives.eval_metrics import falls

if TYPE_CHECKING:
    from raysvc.job.config import KeepBest, TrainerConfig


@dataclass(frozen=True)
class BestMetric:
    """The best value that a metric of an eval had.

    Attributes:
        eval: name of the eval.
        metric: of it.
        value: the best; None before the first.
        steps: that were trained then.
        without: evals since there was progress.
    """

    eval: str
    metric: str
    value: float | None = None
    steps: int = 0
    without: int = 0

    @classmethod
    def of(cls, config: KeepBest, known: Mapping[str, Any] | None) -> BestMetric:
        """Returns what is known of the metric that a job names.

        Args:
            known: of `asdict`, perhaps of another metric.
        """
        if known is not None and (known["eval"], known["metric"]) == (config.eval, config.metric):
            return cls(**known)
        return cls(config.eval, config.metric)

    def after(self, steps: int, value: float, threshold: float = 0.0) -> BestMetric:
        """Returns what is known when an eval after `steps` trained steps said `value`."""
        gain = (
            math.inf
            if self.value is None
            else self.value - value
            if falls(self.metric)
            else value - self.value
        )
        if not math.isfinite(value) or not gain > 0:
            return replace(self, without=self.without + 1)
        progress = gain > threshold
        return replace(self, value=value, steps=steps, without=0 if progress else self.without + 1)


@dataclass(frozen=True)
class EvalDecisions:
    """Holds what the evals of a run decided up to some step.

    Attributes:
        best: of `trainer.keep_best`; None without it.
        progress: of `trainer.stop_after`; None without it.
        patience: of `trainer.stop_after`.
        threshold: of `trainer.stop_after`.
        rows: eval -> key of the entry of its rows; one whose rows are held out of the job's own has none.
    """

    best: BestMetric | None = None
    progress: BestMetric | None = None
    patience: int = 0
    threshold: float = 0.0
    rows: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trainer: TrainerConfig, state: Mapping[str, Any], rows: Mapping[str, str] | None = None
    ) -> EvalDecisions:
        """Returns what a job decides, from the state of a checkpoint on; an empty one is the start of a run.

        Args:
            rows: of its evals now; None: those of the state.
        """
        known, keep, stop = state.get("evals", {}), trainer.keep_best, trainer.stop_after
        were = known.get("rows", {})
        rows = were if rows is None else rows
        same = {
            name: known[name]
            for name in ("best", "progress")
            if name in known and rows.get(known[name]["eval"]) == were.get(known[name]["eval"])
        }
        best = None if keep is None else BestMetric.of(keep, same.get("best"))
        if stop is None:
            return cls(best, rows=rows)
        return cls(best, BestMetric.of(stop, same.get("progress")), stop.patience, stop.threshold, rows)

    @property
    def stops(self) -> bool:
        """Returns whether the run is over."""
        return self.progress is not None and self.progress.without >= self.patience

    @property
    def best_steps(self) -> int | None:
        """Steps that were trained when the model was the best; None before the first eval, and without `keep_best`."""
        return None if self.best is None or self.best.value is None else self.best.steps

    def after(self, steps: int, lines: Iterable[Mapping[str, Any]]) -> EvalDecisions:
        """Returns what is decided when the evals after `steps` trained steps said these lines.

        Raises:
            ConfigError: an eval does not have the metric.
        """
        told = {line["eval"]: line for line in lines}
        best, progress = self.best, self.progress
        if best is not None:
            best = best.after(steps, _value(told, best, "keep_best"))
        if progress is not None:
            progress = progress.after(steps, _value(told, progress, "stop_after"), self.threshold)
        return replace(self, best=best, progress=progress)

    def to_state(self) -> dict[str, Any]:
        """The part of a checkpoint's state that `of` reads; empty where nothing is decided."""
        known = {"best": self.best, "progress": self.progress}
        there = {name: asdict(one) for name, one in known.items() if one is not None}
        return {"evals": {**there, "rows": dict(self.rows)}} if there else {}

    def to_summary(self) -> dict[str, Any]:
        """`best` and `stopped_early` of a run's summary; None where there is none."""
        best = None if self.best_steps is None or self.best is None else asdict(self.best)
        if best is not None:
            del best["without"]
        stopped = (
            {**asdict(self.progress), "patience": self.patience} if self.stops and self.progress else None
        )
        return {"best": best, "stopped_early": stopped}


NOTHING_DECIDED = EvalDecisions()


def best_of_state(state: Mapping[str, Any]) -> int | None:
    """Steps of the best model that a checkpoint's state names; None where it names none."""
    best = state.get("evals", {}).get("best")
    return None if best is None or best["value"] is None else int(best["steps"])


def refuse_another_best(trainer: TrainerConfig, state: Mapping[str, Any], run_dir: str) -> None:
    """Refuse a `trainer.keep_best` that a run which is over did not have: no eval would run for it.

    Raises:
        StateMismatch: it had another one, or none, or the job has none any more.
    """
    had, keep = state.get("evals", {}).get("best"), trainer.keep_best
    was = had and (had["eval"], had["metric"])
    now = keep and (keep.eval, keep.metric)
    if was != now:
        of_was, of_now = (" of ".join(reversed(one)) if one else "not given" for one in (was, now))
        what = f"is the folder of a run that is over: its trainer.keep_best was {of_was}, and is {of_now} now"
        remedy = "leave it as it was; raysvc export RUN --step N makes the model of a checkpoint; another trainer.run_dir trains again"
        raise StateMismatch(run_dir, what, remedy)


def _value(told: Mapping[str, Mapping[str, Any]], of: BestMetric, key: str) -> float:
    value = told[of.eval].get(of.metric)
    if value is None:
        what = f"eval {of.eval} has no {of.metric}: none of its rows counts for it"
        raise ConfigError(f"trainer.{key}", what, "give another metric, or another eval")
    return float(value)
