"""A trainer's checkpoint of its data: the committed frontier and the plan it belongs to, as small JSON.

Always true:
- it says which plan it belongs to field by field, so that a refusal can name what differs;
- it says which decisions the steps below the frontier followed, where there were some;
- it holds nothing of the look-ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysvc.errors import StateMismatch

if TYPE_CHECKING:
    from raysvc.actors.server.spec import Lease
    from raysvc.plan.schedule import Schedule

STATE_VERSION = 2
_GIVE = "give what state_dict returned"


def state_of(
    lease: Lease,
    schedule: Schedule,
    frontier: int,
    orders: Mapping[int, str] | None = None,
    decided: Sequence[tuple[int, str]] | None = None,
) -> dict[str, Any]:
    """The state after all steps below `frontier` are committed.

    Its `plan` is a `raysvc.plan.state.PlanState`, with `decided` for the steps below, see `raysvc.feedback.decision`;
    `orders`: `Connection.orders`; `decided`: None: nothing more than when the lease was given.
    """
    from raysvc.plan.state import PlanState

    marks = [list(mark) for mark in (lease.decided if decided is None else decided) if mark[0] < frontier]
    return {
        "version": STATE_VERSION,
        "frontier": frontier,
        "epoch": schedule.epoch_of(min(frontier, schedule.num_steps - 1)),
        "entry_key": lease.entry_key,
        "plan": {
            **PlanState.before(frontier, schedule, lease.plan_hash, lease.identity, orders or {}).to_json(),
            **({"decided": marks} if marks else {}),
        },
    }


def frontier_of(state: dict[str, Any]) -> int:
    """The next step to train.

    Raises:
        StateMismatch: this is no state, or one of another version.
    """
    if not isinstance(state, Mapping) or not {"version", "frontier", "plan"} <= set(state):
        raise StateMismatch("state", f"this is not the state of a client: {type(state).__name__}", _GIVE)
    if state.get("version") != STATE_VERSION:
        what, remedy = (
            f"{state.get('version')!r} is not {STATE_VERSION}",
            "use the raysvc version that wrote it",
        )
        raise StateMismatch("state.version", what, remedy)
    if not isinstance(state["plan"], Mapping):
        raise StateMismatch("state.plan", f"{state['plan']!r} is not the state of a plan", _GIVE)
    frontier = state["frontier"]
    if isinstance(frontier, bool) or not isinstance(frontier, int) or frontier < 0:
        raise StateMismatch("state.frontier", f"{frontier!r} is not an integer of at least 0", _GIVE)
    return frontier
