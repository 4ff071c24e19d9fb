"""What of a job decides its plan.

Always true:
- `plan_of` is the plan that the job's server follows;
- what balances ranks comes from the model that is trained, unless the job says otherwise; it moves rows between ranks, never
  between steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.build.mixed_job import entries_of, stages_of
from raysvc.collate.plan_report import PlanReport, plan_report
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.plan.cost import CostModel
from raysvc.plan.entry_plan import plan_of_entries

if TYPE_CHECKING:
    from raysvc.build.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig, PlanConfig
    from raysvc.plan.plan import Plan


def plan_of(job: JobConfig, entry: CacheEntry) -> Plan:
    """The plan that the job's server would follow."""
    entries = entries_of(entry.entry)
    return plan_of_entries(plan_config(job), entries, entry.entry.lengths(), stages_of(job, entries))


def report_of(job: JobConfig, entry: CacheEntry) -> PlanReport:
    """The report of the job's plan, with the bytes that its server will send."""
    plan = plan_of(job, entry)
    column_bytes = ColumnBytes.of(entry.entry.read(np.arange(1)), plan.config)
    return plan_report(plan, job.trainer.dp_size, column_bytes, look_ahead_steps=job.server.look_ahead_steps)


def plan_config(job: JobConfig) -> PlanConfig:
    """Section `plan`, with the cost of a row filled in when the model's own `config.json` tells it."""
    known = _model_config(Path(job.trainer.model).expanduser() / "config.json")
    if job.plan.cost is not None or known is None:
        return job.plan
    cost = CostModel.of_model(known)
    return job.plan.model_copy(update={"cost": (cost.linear, cost.quadratic)})


def _model_config(path: Path) -> dict[str, Any] | None:
    """A `transformers` model config of a decoder; None when there is none, or one of another kind."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict):
        return None
    sizes = (known.get(name) for name in ("hidden_size", "num_hidden_layers"))
    return known if all(isinstance(size, int) for size in sizes) else None
