"""State: small, checked by name, and exact when a run goes on under other conditions."""

import json

import numpy as np
import pytest

from raysvc.errors import StateMismatch
from raysvc.job.config import PlanConfig
from raysvc.plan.mixture import Mixture, MixtureSource, Stage
from raysvc.plan.plan import Plan
from raysvc.plan.state import PlanState

LENGTHS = np.random.default_rng(0).integers(1, 100, 50).astype(np.int32)
BASE = {"batch_size": 8, "mini_batch_size": 4, "epochs": 3, "seed": 7}
MIXTURE = Mixture((MixtureSource("a", 20), MixtureSource("b", 30)), (Stage(0, (40, 15)),), seed=7)


def rows(plan, steps, dp_size):
    return [[mini.row_ids.tolist() for mini in plan.step(step, dp_size).mini_batches] for step in steps]


def saved(plan, committed):
    """The state as it comes back from a checkpoint."""
    return PlanState.from_json(json.loads(json.dumps(PlanState.of(plan, committed).to_json())))


@pytest.mark.parametrize("mixture", [None, MIXTURE], ids=["one entry", "mixture"])
@pytest.mark.parametrize("committed", [None, 0, 3, 5, 6, 7, 13, 20], ids=lambda step: f"after {step}")
def test_a_run_goes_on_exactly_under_other_ranks_packing_and_layout(committed, mixture):
    plan = Plan(PlanConfig(**BASE), LENGTHS, mixture=mixture)  # seven steps per epoch
    assert plan.schedule.steps_per_epoch == 7
    every = list(range(plan.schedule.num_steps))
    want = rows(plan, every, dp_size=4)
    state = saved(plan, committed)
    applied = want[: state.next_step]
    packed = PlanConfig(**BASE, layout="packed", micro_batch_tokens=128, align=8)
    again = Plan(packed, LENGTHS, mixture=mixture)
    state.check(again)
    middle = (state.next_step + len(every)) // 2
    applied += rows(again, every[state.next_step : middle], dp_size=2)
    third = Plan(PlanConfig(**BASE, micro_batch_tokens=300, packing="first_fit"), LENGTHS, mixture=mixture)
    saved(again, middle - 1 if middle else None).check(third)
    applied += rows(third, every[middle:], dp_size=6)
    assert applied == want


def test_rows_quarantined_in_the_middle_leave_holes_and_move_nothing():
    plan = Plan(PlanConfig(**BASE), LENGTHS)
    state = saved(plan, 4)
    later = rows(plan, range(5, 21), 2)
    bad = {later[0][0][0], later[3][1][2], 17}
    holed = Plan(PlanConfig(**BASE, skip_rows=tuple(bad)), LENGTHS)
    state.check(holed)
    assert rows(holed, range(5, 21), 3) == [
        [[r for r in mini if r not in bad] for mini in step] for step in later
    ]


def test_the_state_says_where_the_run_stands():
    plan = Plan(PlanConfig(**BASE), LENGTHS, entry_keys=("key",))
    start, middle, end = (PlanState.of(plan, step) for step in (None, 8, 20))
    assert (start.next_step, start.epoch, start.groups) == (0, 0, 0)
    assert (middle.next_step, middle.epoch, middle.groups) == (9, 1, 50 + 2 * 8)
    assert (end.next_step, end.epoch, end.groups) == (21, 3, 150)
    assert middle.identity["entry_keys"] == ["key"]
    assert len(json.dumps(middle.to_json())) < 1000
    assert saved(plan, 8) == middle


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"batch_size": 16}, "batch_size was 8 and is 16"),
        ({"mini_batch_size": 2}, "mini_batch_size was 4 and is 2"),
        ({"shuffle": "none"}, "shuffle was 'full' and is 'none'"),
        ({"tail": "drop"}, "tail was 'pad' and is 'drop'"),
    ],
)
def test_another_plan_is_refused_by_the_name_of_the_difference(change, said):
    state = saved(Plan(PlanConfig(**BASE), LENGTHS), 3)
    other = Plan(PlanConfig(**{**BASE, **change}), LENGTHS)
    with pytest.raises(StateMismatch, match=said):
        state.check(other)
    assert said in state.check(other, strict=False)


def test_other_rows_or_entries_are_refused():
    state = saved(Plan(PlanConfig(**BASE), LENGTHS, entry_keys=("one",)), 3)
    with pytest.raises(StateMismatch, match="entry_keys was"):
        state.check(Plan(PlanConfig(**BASE), LENGTHS, entry_keys=("two",)))
    with pytest.raises(StateMismatch, match="num_rows was 50 and is 49"):
        state.check(Plan(PlanConfig(**BASE), LENGTHS[:-1], entry_keys=("one",)))


def test_a_source_may_be_added_after_the_frontier_and_not_before():
    config, longer = PlanConfig(**BASE), np.append(LENGTHS, LENGTHS[:5])
    plan = Plan(config, LENGTHS, entry_keys=("a", "b"), mixture=MIXTURE)
    state = saved(plan, 3)
    sources = (*MIXTURE.sources, MixtureSource("c", 5))

    def grown(first):
        mixture = Mixture(sources, (*MIXTURE.stages, Stage(first, (4, 2, 2))), seed=7)
        return Plan(config, longer, entry_keys=("a", "b", "c"), mixture=mixture)

    state.check(grown(32))
    assert rows(grown(40), range(5), 2) == rows(plan, range(5), 2)
    with pytest.raises(StateMismatch, match="mixture was"):
        state.check(grown(31))


def test_something_else_or_a_newer_state_is_refused():
    with pytest.raises(StateMismatch, match="not the state of a plan"):
        PlanState.from_json({"step": 3})
    data = PlanState.of(Plan(PlanConfig(**BASE), LENGTHS), 1).to_json()
    with pytest.raises(StateMismatch, match="use a newer raysvc"):
        PlanState.from_json({**data, "version": 99})
