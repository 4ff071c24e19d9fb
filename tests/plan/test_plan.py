"""The plan as a whole: the list in `raysvc.plan.plan`, asserted line by line."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import PlanError
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan

GOLDEN_HASH = "ec84dd115cb442348de5b61f71e1397d2d98c7648f1a94401d646ba70fbb8884"
SHUFFLES = st.sampled_from(["none", "full", "block(5)"])
SHAPES = [
    {},
    {"micro_batch_size": 3},
    {"micro_batch_tokens": 200},
    {"layout": "padded_left", "micro_batch_tokens": 120, "pad_to_multiple": 8},
    {"layout": "packed", "micro_batch_tokens": 128, "align": 4},
]


@st.composite
def runs(draw):
    """Lengths, uids or None, and the part of a config that decides membership."""
    lengths = np.array(draw(st.lists(st.integers(1, 100), min_size=1, max_size=60)), np.int32)
    uids = None
    if draw(st.booleans()):
        uids = [str(draw(st.integers(0, 9))) for _ in lengths]
    groups = len(set(uids)) if uids else len(lengths)
    batch = draw(st.integers(1, groups + 3))
    tail = draw(st.sampled_from(["pad", "wrap", "drop"] if groups >= batch else ["pad", "wrap"]))
    mini = draw(st.integers(1, batch))
    return lengths, uids, {
        "batch_size": batch, "mini_batch_size": mini, "tail": tail, "epochs": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 5)), "shuffle": draw(SHUFFLES),
    }  # fmt: skip


def members(plan: Plan, dp_size: int = 1) -> list[list[list[int]]]:
    """Row ids of every mini-batch of every step."""
    steps = (plan.step(step, dp_size) for step in range(plan.schedule.num_steps))
    return [[mini.row_ids.tolist() for mini in step.mini_batches] for step in steps]


@settings(max_examples=100)
@given(runs())
def test_every_row_comes_once_per_epoch_and_the_tail_is_as_stated(run):
    lengths, uids, config = run
    plan = Plan(PlanConfig(**config), lengths, uids=uids)
    schedule = plan.schedule
    steps = members(plan)
    for epoch in range(schedule.epochs):
        ours = steps[epoch * schedule.steps_per_epoch : (epoch + 1) * schedule.steps_per_epoch]
        counts = np.bincount([row for step in ours for mini in step for row in mini], minlength=len(lengths))
        if config["tail"] == "pad":
            assert (counts == 1).all()
        elif config["tail"] == "drop":
            assert counts.max() == 1
            names = uids or [str(row) for row in range(len(lengths))]
            lost = {name for name, count in zip(names, counts, strict=True) if not count}
            assert len(lost) == schedule.num_groups % schedule.batch_size
        else:
            assert counts.min() >= 1
            assert counts.max() <= 1 + -(-schedule.batch_size // schedule.num_groups)
    sizes = [[len(mini) for mini in step] for step in steps]
    if uids is None:
        assert [sum(step) for step in sizes] == [
            schedule.groups_at(step) for step in range(schedule.num_steps)
        ]
    assert [len(step) for step in sizes] == [schedule.mini_batches_at(k) for k in range(schedule.num_steps)]


@settings(max_examples=60)
@given(runs(), st.sampled_from([2, 3, 8]), st.sampled_from(SHAPES))
def test_membership_does_not_depend_on_ranks_layout_or_packing(run, dp_size, shape):
    lengths, uids, config = run
    plain = Plan(PlanConfig(**config), lengths, uids=uids)
    other = Plan(PlanConfig(**config, **shape, packing="first_fit"), lengths, uids=uids)
    assert members(plain) == members(other, dp_size)
    assert plain.hash == other.hash


@settings(max_examples=60)
@given(runs())
def test_groups_are_whole_and_numbered_in_their_mini_batch(run):
    lengths, uids, config = run
    names = np.array(uids or [str(row) for row in range(len(lengths))])
    plan = Plan(PlanConfig(**config), lengths, uids=uids)
    for step in range(plan.schedule.num_steps):
        for mini in plan.step(step, 2).mini_batches:
            assert np.array_equal(np.unique(mini.group_index), np.arange(mini.num_groups))
            assert (np.diff(mini.group_index) >= 0).all()
            for group in range(mini.num_groups):
                rows = mini.row_ids[mini.group_index == group]
                whole = np.flatnonzero(names == names[rows[0]])
                assert np.array_equal(rows, whole)  # a uid's rows, all of them, in order
            assert np.array_equal(mini.lengths, lengths[mini.row_ids])


@settings(max_examples=40)
@given(runs(), st.sampled_from(SHAPES), st.randoms())
def test_a_step_is_the_same_whenever_it_is_asked_for(run, shape, random):
    lengths, uids, config = run
    first, second = (Plan(PlanConfig(**config, **shape), lengths, uids=uids) for _ in range(2))
    steps = list(range(first.schedule.num_steps))
    random.shuffle(steps)
    later = {step: second.step(step, 3) for step in steps}
    for step in range(first.schedule.num_steps):
        assert as_bytes(first.step(step, 3)) == as_bytes(later[step])


def as_bytes(step):
    arrays = []
    for mini in step.mini_batches:
        arrays += [mini.row_ids, mini.group_index, mini.lengths, mini.starts]
        for rank in mini.ranks:
            arrays += [rank.rows, rank.lines, np.array(rank.micro_batches)]
    return [array.tobytes() for array in arrays]


@settings(max_examples=40)
@given(runs(), st.sets(st.integers(0, 59), max_size=20))
def test_a_skipped_row_leaves_a_hole_and_moves_nothing(run, skip):
    lengths, uids, config = run
    whole = Plan(PlanConfig(**config), lengths, uids=uids)
    skip = {row for row in skip if row < len(lengths)}
    holed = Plan(PlanConfig(**config, skip_rows=tuple(skip)), lengths, uids=uids)
    want = [[[row for row in mini if row not in skip] for mini in step] for step in members(whole)]
    assert members(holed) == want
    assert holed.hash == whole.hash
    for step in range(holed.schedule.num_steps):
        for mini, full in zip(
            holed.step(step, 2).mini_batches, whole.step(step, 2).mini_batches, strict=True
        ):
            assert mini.num_skipped == len(full.row_ids) - len(mini.row_ids)
            assert np.array_equal(np.unique(mini.group_index), np.arange(mini.num_groups))


@pytest.mark.parametrize("layout", ["padded_right", "packed"])
def test_rows_over_the_budget_follow_the_policy(layout):
    lengths = np.array([10, 50, 20, 90, 30], np.int32)
    base = {"batch_size": 5, "layout": layout, "micro_batch_tokens": 40, "shuffle": "none"}
    with pytest.raises(PlanError, match=r"2 rows are over its 40 tokens \(row 3 has 90\)"):
        Plan(PlanConfig(**base), lengths)
    cut = Plan(PlanConfig(**base, oversize="truncate"), lengths).step(0, 2).mini_batches[0]
    assert cut.lengths.tolist() == [10, 40, 20, 40, 30]
    assert cut.num_truncated == 2
    less = Plan(PlanConfig(**base, oversize="drop"), lengths).step(0, 2).mini_batches[0]
    assert less.row_ids.tolist() == [0, 2, 4]
    assert less.num_dropped == 2
    alone = Plan(PlanConfig(**base, oversize="alone"), lengths).step(0, 1).mini_batches[0].ranks[0]
    assert Plan(PlanConfig(**base, oversize="alone"), lengths).step(0, 1).mini_batches[0].num_alone == 2
    assert alone.micro_batches[:2] == ((0, 1), (1, 2))
    assert alone.rows[:2].tolist() == [3, 1]


def test_optimizer_steps_do_not_depend_on_the_turns_per_prompt():
    one = [f"p{prompt}" for prompt in range(24)]
    many = [f"p{prompt}" for prompt in range(24) for _ in range(1 + prompt % 5)]
    config = PlanConfig(batch_size=8, mini_batch_size=4, update_epochs=2, epochs=3)
    counts = {Plan(config, np.full(len(uids), 9), uids=uids).schedule.optimizer_steps for uids in (one, many)}
    assert counts == {3 * 3 * 2 * 2}


def test_what_decides_membership_changes_the_hash_and_nothing_else_does():
    lengths = np.arange(1, 40)
    base = {"batch_size": 8, "seed": 1}

    def hash_of(keys=("k",), rows=lengths, **changes):
        return Plan(PlanConfig(**{**base, **changes}), rows, entry_keys=keys).hash

    for change in (
        {"batch_size": 9},
        {"mini_batch_size": 4},
        {"seed": 2},
        {"shuffle": "none"},
        {"tail": "drop"},
    ):
        assert hash_of(**change) != hash_of()
    assert hash_of(keys=("other",)) != hash_of()
    assert hash_of(rows=lengths[:-1]) != hash_of()
    assert Plan(PlanConfig(**base), lengths, uids=["u"] * 39).hash != Plan(PlanConfig(**base), lengths).hash
    assert hash_of(shuffle="none", seed=1) == hash_of(shuffle="none", seed=2)
    for same in ({"epochs": 5}, {"micro_batch_size": 2}, {"pad_to_multiple": 8}, {"skip_rows": (1, 2)}):
        assert hash_of(**same) == hash_of()


def test_the_hash_is_the_same_on_every_machine():
    plan = Plan(PlanConfig(batch_size=4, seed=3), np.full(10, 5), uids=list("aabbccddee"), entry_keys=("k",))
    assert plan.hash == GOLDEN_HASH


def test_a_wrong_step_or_number_of_uids_is_a_users_mistake():
    with pytest.raises(PlanError, match="2 uids for 3 rows"):
        Plan(PlanConfig(), np.full(3, 5), uids=["a", "b"])
    plan = Plan(PlanConfig(batch_size=2), np.full(5, 5))
    for step in (-1, 3):
        with pytest.raises(PlanError, match=rf"{step} must be in \[0, 3\)"):
            plan.step(step, 1)


def test_a_billion_rows_are_planned_in_a_millisecond_without_memory():
    lengths = np.broadcast_to(np.int32(100), (10**9,))
    tracemalloc.start()
    plan = Plan(PlanConfig(batch_size=32, epochs=3), lengths)
    plan.step(0, 8)
    seconds = []
    for step in (5, 31_249_999, 31_250_000, 93_749_999):
        start = time.perf_counter()
        plan.step(step, 8)
        seconds.append(time.perf_counter() - start)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert min(seconds) < 0.01  # 0.2 ms alone on the machine; see benchmarks/plan.py


def test_a_row_to_skip_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="there is no row 0:0:9"):
        Plan(PlanConfig(batch_size=2, skip_rows=(3, 9)), np.full(9, 4, np.int32))
    for no_id in (-1, 1 << 63):
        with pytest.raises(ValueError, match="skip_rows"):
            PlanConfig(batch_size=2, skip_rows=(3, no_id))


@pytest.mark.parametrize(
    ("longest", "align", "capacity"), [(90, 1, 4096), (5000, 1, 5000), (5000, 64, 5056), (0, 1000, 5000)]
)
def test_packed_lines_are_as_long_as_the_longest_row_and_at_least_4096(
    longest: int, align: int, capacity: int
) -> None:
    lengths = np.array([7, longest, 12], np.int32)
    plan = Plan(PlanConfig(batch_size=3, layout="packed", align=align), lengths)
    assert plan.config.micro_batch_tokens == capacity
    assert members(plan)
    given = Plan(PlanConfig(batch_size=3, layout="packed", micro_batch_tokens=9000), lengths)
    assert given.config.micro_batch_tokens == 9000
    with pytest.raises(ValueError, match="packed has lines of micro_batch_tokens"):
        PlanConfig(layout="packed", micro_batch_size=2)
