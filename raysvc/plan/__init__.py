"""Which rows go where: pure functions of (config, seed, step)."""

from raysvc.plan.cost import CostModel
from raysvc.plan.mixture import Mixture, MixtureSource, Stage
from raysvc.plan.plan import MiniBatchPlan, Plan, StepPlan
from raysvc.plan.rank_plan import RankPlan
from raysvc.plan.schedule import Schedule
from raysvc.plan.state import PlanState

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
