"""Weights & Biases. Its own environment decides: WANDB_PROJECT, WANDB_MODE=offline or disabled, WANDB_API_KEY."""

from __future__ import annotations

import os
from collections.abc import Mapping

from raysvc.trackers.tracker import TrackedRun, under_headings

STEP = "train/global_step"


class WandbTracker:
    """One run; a run that goes on has the same id."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raysvc"),
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
        )
        # as HF's callback does: the step is a metric, so a run that goes on may log a step again
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**under_headings(metrics), STEP: step})

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**under_headings(metrics), STEP: step})

    def on_checkpoint(self, step: int, folder: str) -> None:
        self._run.summary["checkpoint"] = folder

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        self._run.summary.update(under_headings(metrics))
        self._run.finish(exit_code=0 if finished else 1)
