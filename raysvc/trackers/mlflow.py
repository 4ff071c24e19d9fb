"""MLflow. Its own environment decides: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.

Always true:
- a run that goes on is found by its tag `raysvc.run_id` and opened again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from raysvc.trackers.tracker import TrackedRun

TAG = "raysvc.run_id"
MOST_PARAMS, LONGEST = 100, 6000  # of one call, and of one value


class MlflowTracker:
    """One run, under the names of HF's Trainer as they are, like HF's callback."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "raysvc")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, run_name=run.name, tags={TAG: run.id})
        self._id = made.info.run_id
        self._log_params(run)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1e3)
        self._client.log_batch(
            self._id, [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        )

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.on_step(step, metrics)

    def on_checkpoint(self, step: int, folder: str) -> None:
        self._client.set_tag(self._id, "checkpoint", folder)

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value)
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _log_params(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        params = [Param(name, value[:LONGEST]) for name, value in _flat(run.config)]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])


def _flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """`{"plan": {"seed": 0}}` as `plan.seed`."""
    found: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", str(value)))
    return found
