"""Holds what is needed to go on after the last committed step, as small JSON.

Always true:
- a state says which plan it belongs to, field by field, so that a refusal can name the difference;
- dp_size, layout, packing, look-ahead, epochs and `skip_rows` may change between saving and loading, and a
  mixture may have grown by sources or stages that begin after the committed groups;
- `from_json(to_json(state)) == state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raysvc.errors import StateMismatch
from raysvc.plan.plan import Plan
from raysvc.plan.schedule import Schedule

STATE_VERSION = 1
_GROWS = frozenset({"mixture", "num_rows", "uids", "entry_keys"})  # what a source that is added changes


@dataclass(frozen=True)
class PlanState:
    """A committed frontier.

    Attributes:
        plan_hash: of the plan that was committed to.
        identity: the fields under that hash (`Plan.identity`).
        committed_step: the last committed step; None at the start.
        epoch: of the next step.
        groups: groups of all committed steps, epochs counted through.
        order: of a plan with `plan.order`, in an epoch that it has begun: that `epoch`, and the `digest` of its order.
        version: of this format.
    """

    plan_hash: str
    identity: Mapping[str, Any] = field(default_factory=dict)
    committed_step: int | None = None
    epoch: int = 0
    groups: int = 0
    order: Mapping[str, Any] = field(default_factory=dict)
    version: int = STATE_VERSION

    @classmethod
    def of(cls, plan: Plan, committed_step: int | None) -> PlanState:
        """The state of `plan` after `committed_step`; None: nothing is committed."""
        following = 0 if committed_step is None else committed_step + 1
        epoch = plan.schedule.epoch_of(following)
        order = plan.order_of(epoch) if following < plan.schedule.num_steps else None
        orders = {} if order is None else {epoch: order}
        return cls.before(following, plan.schedule, plan.hash, plan.identity, orders)

    @classmethod
    def before(
        cls,
        step: int,
        schedule: Schedule,
        plan_hash: str,
        identity: Mapping[str, Any],
        orders: Mapping[int, str],
    ) -> PlanState:
        """The state after all steps below `step` are committed, of a plan that is known by its hash and identity.

        `orders`: `Plan.order_of` of the epochs whose steps were seen.
        """
        epoch = schedule.epoch_of(step)
        return cls(
            plan_hash=plan_hash,
            identity=identity,
            committed_step=step - 1 if step else None,
            epoch=epoch,
            groups=schedule.groups_before(step),
            order={"epoch": epoch, "digest": orders[epoch]} if epoch in orders else {},
        )

    @property
    def next_step(self) -> int:
        """The step to go on with."""
        return 0 if self.committed_step is None else self.committed_step + 1

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanState:
        """The inverse of `to_json`.

        Raises:
            StateMismatch: this is no state, or one of a newer version.
        """
        version = data.get("version")
        if not isinstance(version, int) or not {"plan_hash", "committed_step"} <= set(data):
            raise StateMismatch("state", "this is not the state of a plan", "give what state_dict returned")
        if version > STATE_VERSION:
            raise StateMismatch(
                "state", f"its version {version} is above {STATE_VERSION}", "use a newer raysvc"
            )
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})

    def check(self, plan: Plan, strict: bool = True) -> tuple[str, ...]:
        """Differences between this state's plan and `plan`, one clause each.

        Raises:
            StateMismatch: there are some, and `strict` is true.
        """
        old, new = self.identity, plan.identity
        grown = _GROWS if _has_grown(old, new, self.groups) else frozenset()
        found = tuple(
            f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
            for name in sorted({*old, *new} - grown)
            if old.get(name) != new.get(name)
        )
        if not found and not grown and self.plan_hash != plan.hash:
            found = (f"plan hash was {self.plan_hash} and is {plan.hash}",)
        if not found and self.order:
            epoch, was = self.order["epoch"], self.order["digest"]
            if (order := plan.order_of(epoch)) != was:
                found = (f"the order of epoch {epoch} by {plan.config.order} was {was} and is {order}",)
        if found and strict:
            raise StateMismatch(
                "state",
                "it belongs to another plan: " + "; ".join(found),
                "restore these, or start a run of its own with a fresh trainer.run_dir",
            )
        return found


def _has_grown(old: Mapping[str, Any], new: Mapping[str, Any], groups: int) -> bool:
    """Returns whether the mixture of `new` is that of `old` with more sources or stages, all after `groups`."""
    was, is_ = old.get("mixture"), new["mixture"]
    if was is None or is_ is None or was == is_:
        return False
    sources, stages = len(was["sources"]), len(was["stages"])
    return (
        new["entry_keys"][: len(old["entry_keys"])] == old["entry_keys"]
        and is_["order"] == was["order"]
        and is_["sources"][:sources] == was["sources"]
        and is_["stages"][:stages] == was["stages"]
        and all(first >= groups for first, _ in is_["stages"][stages:])
    )
