"""Which rows go where: pure functions of (config, seed, step)."""

from raysvc.plan.cost import CostModel
from raysvc.plan.plan import MiniBatchPlan, Plan, StepPlan
from raysvc.plan.ranks import RankPlan
from raysvc.plan.schedule import Schedule
from raysvc.plan.state import PlanState

__all__ = ["CostModel", "MiniBatchPlan", "Plan", "PlanState", "RankPlan", "Schedule", "StepPlan"]
