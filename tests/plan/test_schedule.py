"""Step arithmetic against a simulation that hands out groups one by one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import PlanError
from raysvc.plan.schedule import Schedule

TAILS = st.sampled_from(["pad", "drop", "wrap"])


def simulate(schedule: Schedule) -> list[list[int]]:
    """For every step the sizes of its mini-batches, by handing out groups."""
    steps = []
    for _ in range(schedule.epochs):
        left = schedule.num_groups
        while left > 0:
            size = min(schedule.batch_size, left)
            if size < schedule.batch_size and schedule.tail == "drop":
                break
            left -= size
            size = schedule.batch_size if schedule.tail == "wrap" else size
            minis = []
            while size > 0:
                minis.append(min(schedule.mini_batch_size, size))
                size -= minis[-1]
            steps.append(minis)
    return steps


@settings(max_examples=200)
@given(
    st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), TAILS, st.integers(1, 3)
)
def test_counts_are_those_of_handing_out_groups(groups, batch, mini, epochs, tail, updates):
    if tail == "drop" and groups < batch:
        with pytest.raises(PlanError, match="leaves no step"):
            Schedule(groups, batch, min(mini, batch), epochs, tail, updates)
        return
    schedule = Schedule(groups, batch, min(mini, batch), epochs, tail, updates)
    steps = simulate(schedule)
    assert schedule.num_steps == len(steps)
    assert schedule.optimizer_steps == sum(map(len, steps)) * updates
    before = 0
    for step, minis in enumerate(steps):
        assert schedule.groups_at(step) == sum(minis)
        assert schedule.mini_batches_at(step) == len(minis)
        assert schedule.epoch_of(step) == step // (len(steps) // epochs)
        assert schedule.groups_before(step) == before
        before += sum(minis)
    assert schedule.groups_before(len(steps)) == before


def test_json_round_trip():
    schedule = Schedule(100, 32, 8, 2, "pad", 3)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_no_groups_is_a_users_mistake():
    with pytest.raises(PlanError, match="no group"):
        Schedule(0, 4, 4, 1, "pad")
