"""Counts the steps, mini-batches and optimizer steps of a run, from numbers of rows alone.

Axes: G groups of one epoch, B groups of a full step, M groups of a full mini-batch.
Always true:
- the arithmetic needs no lengths: trainer, client and server agree on it from a few integers;
- a step lies in one epoch; every full step holds B groups, only the last step of an epoch may hold fewer;
- `optimizer_steps` depends on groups, B, M, epochs, tail and update epochs, never on rows per group, ranks or
  packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raysvc.errors import PlanError
from raysvc.job.config import Tail

ENDLESS = 1 << 50  # groups: more than ever come


@dataclass(frozen=True)
class Schedule:
    """Step arithmetic of one run.

    Attributes:
        num_groups: groups of one epoch (for `layout: stream`, windows).
        batch_size: groups of a full step.
        mini_batch_size: groups of a full mini-batch.
        epochs: passes over all groups.
        tail: what happens to the last step of an epoch when `num_groups` is no multiple of `batch_size`.
        update_epochs: passes of the trainer over the mini-batches of one step.

    Raises:
        PlanError: no step can be made.
    """

    num_groups: int
    batch_size: int
    mini_batch_size: int
    epochs: int
    tail: Tail
    update_epochs: int = 1

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise PlanError("plan", "there is no group to plan", "check why the cache entry has no rows")
        if self.steps_per_epoch < 1:
            raise PlanError(
                "plan.batch_size",
                f"tail: drop leaves no step, batch_size {self.batch_size} is above the {self.num_groups} groups",
                "lower batch_size, or use tail: pad",
            )

    @property
    def is_endless(self) -> bool:
        """Returns whether nobody knows where it ends: of a source that is followed."""
        return self.num_groups >= ENDLESS

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        full, rest = divmod(self.num_groups, self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: mini-batches of all steps, times `update_epochs`."""
        full = -(-self.batch_size // self.mini_batch_size)
        last = self.mini_batches_at(self.steps_per_epoch - 1)
        return ((self.steps_per_epoch - 1) * full + last) * self.epochs * self.update_epochs

    def epoch_of(self, step: int) -> int:
        """Epoch that holds `step`."""
        return step // self.steps_per_epoch

    def position_of(self, step: int) -> int:
        """Position in its epoch's order of the first group of `step`."""
        return step % self.steps_per_epoch * self.batch_size

    def groups_at(self, step: int) -> int:
        """Groups of `step`."""
        if self.tail == "wrap":
            return self.batch_size
        return min(self.batch_size, self.num_groups - self.position_of(step))

    def mini_batches_at(self, step: int) -> int:
        """Mini-batches of `step`."""
        return -(-self.groups_at(step) // self.mini_batch_size)

    def groups_before(self, step: int) -> int:
        """Groups of all steps before `step`, epochs counted through."""
        per_epoch = self.steps_per_epoch * self.batch_size
        if self.tail == "pad":
            per_epoch = self.num_groups
        return self.epoch_of(step) * per_epoch + self.position_of(step)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """The inverse of `to_json`."""
        return cls(**data)
