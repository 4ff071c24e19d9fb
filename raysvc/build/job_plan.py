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

from raysvc.build.mixed_job import mixture_spec
from raysvc.plan.cost import CostModel

if TYPE_CHECKING:
    from raysvc.build.cache_entry import CacheEntry
    from raysvc.config import JobConfig, PlanConfig
    from raysvc.plan.plan import Plan


def plan_of(job: JobConfig, entry: CacheEntry) -> Plan:
    """The plan that the job's server would follow."""
    from raysvc.actors.server.entry_stream import plan_of_entry

    mixture = mixture_spec(job, entry.entry)
    return plan_of_entry(plan_config(job), entry.entry, mixture.stages if mixture else ())


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
