"""How many collators a trainer has: the list in `collator_pool`, on a clock of its own instead of Ray's."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.actors.server import collator_pool
from raysvc.actors.server.collator_pool import LEAVING_STEPS, PATIENCE_STEPS, NodeCollators

STARTS_S = 5.0
FEW = settings(max_examples=60, suppress_health_check=list(HealthCheck))


class Clock:
    """Collators that need some seconds for a call, one call after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.call_s = 0.0, 1.0
        self.ends_s: dict[int, float] = {}  # call -> when it has returned
        self._numbers = itertools.count()
        monkeypatch.setattr(collator_pool, "start_collators", self.start)
        monkeypatch.setattr(collator_pool, "_finished", self.finished)

    def start(self, spec_json: str, count: int, node: str | None) -> list[Any]:
        return [Process(self, self.now_s + STARTS_S) for _ in range(count)]

    def finished(self, calls: list[int]) -> list[int]:
        return [call for call in calls if self.ends_s[call] <= self.now_s]

    def called(self, free_s: float) -> tuple[int, float]:
        call = next(self._numbers)
        self.ends_s[call] = max(free_s, self.now_s) + self.call_s
        return call, self.ends_s[call]


class Process:
    """One of them, as a handle."""

    def __init__(self, clock: Clock, free_s: float) -> None:
        self.clock, self.free_s = clock, free_s

    @property
    def make(self) -> Process:
        return self

    def options(self, **_: Any) -> Process:
        return self

    def remote(self, *_: Any) -> list[int]:
        call, self.free_s = self.clock.called(self.free_s)
        return [call]


def train(
    clock: Clock,
    pool: NodeCollators,
    steps: int,
    ranks: int,
    step_s: float,
    ahead: int = 2,
    look: Callable[[], None] = lambda: None,
) -> float:
    """Seconds waited in steps that take `step_s`, each rank with a call of its own, `ahead` of them asked for before."""
    asked: list[Sequence[int]] = []
    waited_s = 0.0
    for step in range(steps):
        while len(asked) < min(steps, step + 1 + ahead):
            pool.next_step()
            asked.append([pool.call(1, ())[0] for _ in range(ranks)])
        ready_s = max(clock.ends_s[call] for call in asked[step])
        waited_s += max(0.0, ready_s - clock.now_s)
        clock.now_s = max(clock.now_s, ready_s) + step_s
        look()
    return waited_s


def test_those_that_have_nothing_to_do_leave_and_come_back_when_steps_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    pool = NodeCollators("", 4, None)
    clock.call_s = 0.01
    train(clock, pool, 6 * PATIENCE_STEPS, ranks=4, step_s=1.0)
    assert len(pool) == 1
    clock.call_s = 0.9  # four ranks need four processes
    train(clock, pool, 40, ranks=4, step_s=1.0)
    assert len(pool) == 4
    assert train(clock, pool, 40, ranks=4, step_s=1.0) == pytest.approx(0.9), "the first step alone"


@FEW
@given(call_s=st.floats(0.001, 1.5), ranks=st.integers(1, 6), most=st.integers(1, 6), ahead=st.integers(0, 4))
def test_letting_go_costs_next_to_no_time(
    monkeypatch: pytest.MonkeyPatch, call_s: float, ranks: int, most: int, ahead: int
) -> None:
    with monkeypatch.context() as patched:
        clock, steps = Clock(patched), 40 * PATIENCE_STEPS
        clock.call_s = call_s
        train(clock, NodeCollators("", most, None), steps, ranks, 1.0, ahead)
        patched.setattr(NodeCollators, "next_step", lambda self: None)
        kept = Clock(patched)
        kept.call_s = call_s
        train(kept, NodeCollators("", most, None), steps, ranks, 1.0, ahead)
        assert clock.now_s <= 1.02 * kept.now_s + STARTS_S


def test_who_asks_for_one_step_at_a_time_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pool = NodeCollators("", 3, None)
    clock.call_s = 0.01
    train(clock, pool, 5 * PATIENCE_STEPS, ranks=3, step_s=1.0, ahead=0)
    assert len(pool) == 3


def test_what_left_lives_until_what_it_made_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pool = NodeCollators("", 2, None)
    processes = [weakref.ref(handle) for handle, _ in pool._working]
    clock.call_s = 0.01
    lived: list[tuple[int, int]] = []
    train(
        clock, pool, 3 * PATIENCE_STEPS, ranks=2, step_s=1.0,
        look=lambda: lived.append((len(pool), sum(one() is not None for one in processes))),
    )  # fmt: skip
    assert lived == sorted(lived, reverse=True)
    assert lived.count((1, 2)) == LEAVING_STEPS, "it makes no more, and is kept"
    assert lived[-1] == (1, 1)
