"""Several roles (policy, critic, reference) over the rows of one step.

Always true:
- every role gets the same rows in the same mini-batches, with as few dummies as its own dp size needs;
- with `common`, all roles share one plan of lcm(dp sizes) slots, and rank r of a role with dp size d owns the
  slots [r * lcm / d, (r + 1) * lcm / d).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from raysvc.plan.plan import Plan, StepPlan


def step_by_role(
    plan: Plan, step: int, dp_sizes: Mapping[str, int], *, common: bool = False
) -> dict[str, StepPlan]:
    """The plan of `step` for each role of `dp_sizes`; `common` asks for one of their lcm."""
    if common:
        shared = plan.step(step, math.lcm(*dp_sizes.values()))
        return dict.fromkeys(dp_sizes, shared)
    return {role: plan.step(step, dp_size) for role, dp_size in dp_sizes.items()}
