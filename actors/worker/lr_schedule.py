"""The learning rate of an optimizer step.

Always true:
- it is a function of the number of optimizer steps alone: not of ranks, turns, packing, micro-batches or restarts.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

Decay = Literal["constant", "linear", "cosine"]


class LearningRate(BaseModel):
    """Linear warm-up, then a decay.

    Attributes:
        peak: after the warm-up.
        warmup_steps: optimizer steps of the warm-up; step k of it has peak * (k + 1) / warmup_steps.
        total_steps: optimizer steps of the run; None with `constant`.
        decay: from the end of the warm-up to `floor` at `total_steps`.
        floor: share of `peak` at the end, and after it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    peak: float
    warmup_steps: int = 0
    total_steps: int | None = None
    decay: Decay = "constant"
    floor: float = 0.0

    def at(self, optimizer_step: int) -> float:
        """The rate of the optimizer step with this number, from 0."""
        if optimizer_step < self.warmup_steps:
            return self.peak * (optimizer_step + 1) / self.warmup_steps
        if self.decay == "constant" or self.total_steps is None:
            return self.peak
        length = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (optimizer_step - self.warmup_steps) / length)
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * (self.floor + (1 - self.floor) * left)
