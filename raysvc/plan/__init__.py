"""Which rows go where: pure functions of (config, seed, step).

Always true:
- who asks for one name, or one file of this folder, loads no other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysvc.plan.cost import CostModel
    from raysvc.plan.mixture import Mixture, MixtureSource, Stage
    from raysvc.plan.plan import MiniBatchPlan, Plan, StepPlan
    from raysvc.plan.rank_plan import RankPlan
    from raysvc.plan.schedule import Schedule
    from raysvc.plan.state import PlanState

_HOMES = {
    "CostModel": "raysvc.plan.cost",
    "MiniBatchPlan": "raysvc.plan.plan",
    "Mixture": "raysvc.plan.mixture",
    "MixtureSource": "raysvc.plan.mixture",
    "Plan": "raysvc.plan.plan",
    "PlanState": "raysvc.plan.state",
    "RankPlan": "raysvc.plan.rank_plan",
    "Schedule": "raysvc.plan.schedule",
    "Stage": "raysvc.plan.mixture",
    "StepPlan": "raysvc.plan.plan",
}
__all__ = [
    "CostModel",
    "MiniBatchPlan",
    "Mixture",
    "MixtureSource",
    "Plan",
    "PlanState",
    "RankPlan",
    "Schedule",
    "Stage",
    "StepPlan",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
