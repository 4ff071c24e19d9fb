"""Which groups are in which step: pure."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts.group_pool import Pool, ReadyGroup

ACTS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 30), st.integers(0, 3)),
    st.tuples(st.just("form"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("train"), st.just(0), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("reserve"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 30), st.just(0)),
)


@settings(max_examples=300)
@given(st.lists(ACTS, max_size=80), st.integers(1, 4), st.integers(0, 3))
def test_no_group_is_trained_twice_or_too_old_and_capacity_is_never_lost(
    acts: list[tuple[str, int, int]], batch_size: int, max_staleness: int
) -> None:
    pool = Pool(batch_size, max_staleness)
    frontier, trained = 0, list[tuple[str, int]]()
    for act, number, age in acts:
        if act == "put":
            pool.put(ReadyGroup((f"u{number}", 0), max(0, pool.version - age)))
        elif act == "form":
            ahead = frontier + number
            keys = pool.form(ahead, frontier)
            assert keys is None or keys == pool.form(ahead, frontier)
        elif act == "train" and (keys := pool.form(frontier, frontier)) is not None:
            assert len(keys) == batch_size
            assert all(pool.version - pool.versions[key] <= max_staleness for key in keys)
            trained += keys
            frontier += 1
            pool.set_version(frontier, frontier)
        elif act == "drop":
            pool.drop([f"u{number}"])
        elif act == "reserve":
            pool.reserve([f"u{number}"], frontier)
        elif act == "release":
            pool.release([f"u{number}"])
        assert len(set(trained)) == len(trained)
        planned = [key for step, keys in pool.steps.items() if step >= frontier for key in keys]
        held = len(planned) + len(pool.ready) + len(pool.reserved)
        assert pool.capacity(frontier) == max(0, (max_staleness + 1) * batch_size - held)
        assert not {group.key for group in pool.ready} & {*planned, *trained}


def test_a_group_put_again_is_known_and_only_another_attempt_is_new() -> None:
    pool = Pool(2)
    assert [pool.put(ReadyGroup(("a", n), 0)) for n in (0, 0, 1)] == [True, False, True]
    assert pool.form(0, 0) == [("a", 0), ("a", 1)]


def test_a_step_ahead_waits_for_the_one_before_it() -> None:
    pool = Pool(1)
    pool.put(ReadyGroup(("a", 0), 0))
    assert pool.form(1, 0) is None
    assert pool.form(0, 0) == [("a", 0)]


def test_a_step_planned_ahead_counts_the_versions_that_come_until_then() -> None:
    pool = Pool(1, max_staleness=1)
    for number in range(3):
        pool.put(ReadyGroup((f"u{number}", 0), 0))
    assert pool.form(0, 0) is not None
    assert pool.form(1, 0) is not None
    assert pool.form(2, 0) is None, "by then it would be two versions old"
    assert (pool.evicted, pool.ready) == (1, [])
    with pytest.raises(ValueError, match="2 versions old"):
        pool.set_version(2, 1)
    pool.set_version(1, 1)


def test_reservations_end_at_capacity_and_a_put_a_release_and_a_drop_use_or_return_it() -> None:
    pool = Pool(2, max_staleness=0)
    assert pool.reserve(["a", "b", "c"], 0) == {"a": "granted", "b": "granted", "c": "full"}
    assert pool.reserve(["a", "c"], 0) == {"a": "granted", "c": "full"}
    pool.put(ReadyGroup(("a", 0), 0))
    assert pool.capacity(0) == 0
    pool.release(["b"])
    pool.drop(["a"])
    assert pool.capacity(0) == 2
    with contextlib.suppress(ValueError):
        pool.set_version(5, 0)
    assert pool.capacity(0) == 2
