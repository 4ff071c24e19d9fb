"""Defines what changes a plan while it is followed: other weights of a mixture, and rows that are left out, from a step on.

Axes: K sources.
Always true:
- the plan of a step follows from the job, the decisions in the order in which they were made, and the step, and from nothing
  else;
- a decision moves no row of a step before its own;
- weights hold from their step to that of the next ones, or to that at which the job has a source join; of two decisions
  about the weights of one step the later one holds;
- a row that is left out stays so;
- a decision says which plan it was made for, and another plan does not take it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.errors import PlanError, StateMismatch
from raysvc.feedback.request import Request
from raysvc.plan.entry_plan import weighted_counts
from raysvc.plan.mixture import Stage
from raysvc.plan.plan import Plan
from raysvc.plan.schedule import Schedule
from raysvc.plan.state import PlanState
from raysvc.row_ids import parse, written

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry

RECORD_VERSION = 2  # rows by their addresses
MOST_ROWS = 100_000  # that one decision may leave out: it is read again at every start


class Sources(NamedTuple):
    """Declares what the weights of a mixture need.

    Attributes:
        names: [K].
        entries: [K].
        by: what weights count, "rows" or "tokens".
        shuffles: [K].
    """

    names: Sequence[str]
    entries: Sequence[Entry]
    by: str
    shuffles: Sequence[str]


@dataclass(frozen=True)
class Decision:
    """One of them, as it is kept.

    Attributes:
        call: see `Request`.
        from_step: the first step that it changes.
        weights: source -> weight; None: it is about rows alone.
        counts: [K], groups of each source in a period; () without weights.
        skip_rows: rows that are left out.
        plan: a `PlanState` before `from_step`, as JSON: which plan it is for.
        version: of this record.
    """

    call: str
    from_step: int
    weights: Mapping[str, float] | None
    counts: tuple[int, ...]
    skip_rows: tuple[int, ...]
    plan: Mapping[str, Any] = field(repr=False)
    version: int = RECORD_VERSION

    @property
    def mark(self) -> tuple[int, str]:
        """Its step, and a digest of what it does: what a checkpoint remembers of it."""
        does = json.dumps([self.from_step, list(self.counts), list(self.skip_rows)])
        return self.from_step, hashlib.sha256(does.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON-able mapping; rows as they are typed."""
        return {**asdict(self), "skip_rows": list(map(written, self.skip_rows))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """The inverse of `to_json`.

        Raises:
            StateMismatch: another version wrote it.
        """
        if data.get("version") != RECORD_VERSION:
            remedy = "use the raysvc version that wrote it"
            raise StateMismatch(
                "decision.version", f"{data.get('version')!r} is not {RECORD_VERSION}", remedy
            )
        known = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(
            **{**known, "counts": tuple(data["counts"]), "skip_rows": tuple(map(parse, data["skip_rows"]))}
        )


def decision_of(request: Request, from_step: int, plan: Plan, sources: Sources | None) -> Decision:
    """Returns what is kept of a request.

    Args:
        from_step: of the request, or what stands for None.
        plan: of the job, with or without earlier decisions.
        sources: of the mixture; None: the plan is none.

    Raises:
        PlanError: it names other sources than there are, negative weights, rows that are not there, or a step before one
            at which a source joins.
    """
    counts: tuple[int, ...] = ()
    if request.weights is not None:
        counts = _counts(request.weights, from_step, plan, sources)
    if len(request.skip_rows) > MOST_ROWS:
        what = f"{len(request.skip_rows)} rows at once, and {MOST_ROWS} are the most"
        raise PlanError("skip_rows", what, "leave them out in several calls")
    rows = np.unique(np.array(request.skip_rows, np.int64))
    plan.rows.check(rows)
    state = PlanState.before(from_step, plan.schedule, plan.hash, plan.identity, {})
    weights = None if request.weights is None else {k: float(v) for k, v in request.weights.items()}
    return Decision(request.call, from_step, weights, counts, tuple(rows.tolist()), state.to_json())


def _counts(
    weights: Mapping[str, float], from_step: int, plan: Plan, sources: Sources | None
) -> tuple[int, ...]:
    if sources is None:
        raise PlanError(
            "set_mixture_weights", "the plan is not a mixture", "name several sources in `mixture`"
        )
    unknown = [name for name in weights if name not in sources.names]
    missing = [name for name in sources.names if name not in weights]
    if unknown or missing:
        what = f"there is no source {unknown[0]!r}" if unknown else f"{missing[0]!r} has no weight"
        raise PlanError("set_mixture_weights", what, f"give weights of {', '.join(sources.names)}")
    if position_of(plan.schedule, from_step) < plan.order.last_join:
        what = f"step {from_step} comes before the last source of the job joins"
        raise PlanError(
            "set_mixture_weights(from_step)", what, "give that source's from_step, or a later one"
        )
    shares = [weights[name] for name in sources.names]
    return weighted_counts(sources.entries, shares, sources.by, sources.shuffles)


def decided_plan(plan: Plan, decisions: Sequence[Decision]) -> Plan:
    """The plan of a job, with what was decided.

    Raises:
        StateMismatch: a decision was made for another plan.
    """
    for one in decisions:
        if found := PlanState.from_json(one.plan).check(plan, strict=False):
            what = f"decides for another plan: {'; '.join(found)}"
            remedy = "restore these, or start a run of its own with a fresh trainer.run_dir"
            raise StateMismatch(f"decision from step {one.from_step} on", what, remedy)
    counts = {one.from_step: one.counts for one in decisions if one.counts}
    stages = [Stage(position_of(plan.schedule, step), counts[step]) for step in sorted(counts)]
    skips = [(one.from_step, np.array(one.skip_rows, np.int64)) for one in decisions if one.skip_rows]
    return plan.deciding(stages, sorted(skips, key=lambda skip: skip[0]))


def position_of(schedule: Schedule, step: int) -> int:
    """Position of the stream at which a step begins."""
    return schedule.epoch_of(step) * schedule.num_groups + schedule.position_of(step)


def check_decided(state: Mapping[str, Any], step: int, decisions: Sequence[Decision]) -> None:
    """Refuse the state of a trainer that followed other decisions.

    Args:
        state: holds under `decided` the marks of those it followed, where there were some.
        step: the next one to train.
        decisions: that are known.

    Raises:
        StateMismatch: some of them differ below `step`.
    """
    was = [tuple(mark) for mark in state.get("decided", ())]
    known = [one.mark for one in decisions if one.from_step < step]
    if was != known:
        what = f"it followed decisions from steps {[one[0] for one in was]} on, and here are those from steps {[one[0] for one in known]} on"
        remedy = "restore server/feedback of its run folder, or start a run of its own with a fresh trainer.run_dir"
        raise StateMismatch("state.decided", what, remedy)
