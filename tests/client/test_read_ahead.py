"""The thread that brings steps to a rank, with answers that come when a test says so."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.client import rank_reader
from raysvc.client.look_ahead import Limit, PlannedSizes, Sizes
from raysvc.client.rank_reader import ReadAhead, StepFetch
from raysvc.errors import FencedError, StepFailed

WITHIN_S = 30.0


class Ref:
    """An answer that comes when it is set."""

    def __init__(self) -> None:
        self.answer: Future[None] = Future()

    def future(self) -> Future[None]:
        return self.answer


class Link:
    """What `ReadAhead` needs of a connection."""

    def __init__(self) -> None:
        self.closed, self.lost = False, False
        self.threads: list[threading.Thread] = []
        self.sending = 0

    @property
    def ended(self) -> bool:
        return self.lost

    def check(self) -> None:
        if self.lost:
            raise FencedError("a", 1, 2)

    def beside(self, work: Callable[[], None], name: str) -> None:
        self.threads.append(threading.Thread(target=work, name=name))
        self.threads[-1].start()

    @contextmanager
    def sends_commits(self) -> Iterator[None]:
        self.sending += 1
        yield
        self.sending -= 1


class Looks:
    """Counts how often the thread looked."""

    def __init__(self) -> None:
        self.count, self.looked = 0, threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.looked.set()


class Loop:
    """A loop with its thread; notes what was asked for, and by whom."""

    def __init__(
        self,
        num_steps: int,
        limit: Limit,
        sizes: list[int] | None = None,
        planned: Sizes | None = None,
        **options: Any,
    ) -> None:
        self.link: Any = Link()
        self.asked: list[int] = []
        self.refs = [Ref() for _ in range(num_steps)]
        self.who: set[threading.Thread] = set()
        self.brought: list[int] = []
        self.fetches: list[weakref.ref[StepFetch]] = []
        self.looks = Looks()
        self.moved = threading.Condition()
        known = sizes or [1] * num_steps
        planned = planned or PlannedSizes(lambda first, stop: lambda: known[first:stop], num_steps)
        self.ahead: ReadAhead[int] = ReadAhead(
            self.link, self.ask, self.bring, planned, limit, range(num_steps), **options
        )

    def ask(self, index: int) -> StepFetch:
        with self.moved:
            self.who.add(threading.current_thread())
            self.asked.append(index)
            self.moved.notify_all()
        fetch = StepFetch(index, [self.refs[index]])
        self.fetches.append(weakref.ref(fetch))
        return fetch

    def bring(self, fetch: StepFetch) -> int:
        assert self.refs[fetch.index].answer.done(), "opened before it was there"
        self.refs[fetch.index].answer.result()
        with self.moved:
            self.who.add(threading.current_thread())
            self.brought.append(fetch.index)
            self.moved.notify_all()
        return fetch.index

    def reached(self, steps: list[int], count: int) -> bool:
        """Whether so many steps were asked for, or brought, soon."""
        with self.moved:
            return self.moved.wait_for(lambda: len(steps) >= count, WITHIN_S)

    def take(self) -> int:
        step = self.ahead.take()
        return self.ahead.wait() if step is None else step

    def ends(self) -> bool:
        for thread in self.link.threads:
            thread.join(WITHIN_S)
        return not any(thread.is_alive() for thread in self.link.threads)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 20)),
    st.integers(0, 99),
)
def test_steps_come_in_order_whenever_their_answers_come_and_keep_to_both_limits(
    sizes: list[int], steps: int, nbytes: int | None, seed: int
) -> None:
    shuffled = random.Random(seed)  # how much it draws follows from timing, so hypothesis must not
    loop = Loop(len(sizes), Limit(steps, nbytes), sizes)
    answered: set[int] = set()
    for expected in range(len(sizes)):
        first = loop.ahead.take()
        assert loop.reached(loop.asked, expected + 1)
        for step in shuffled.sample(loop.asked, len(loop.asked)):  # all that were asked for, in any order
            if step not in answered:
                answered.add(step)
                loop.refs[step].answer.set_result(None)
        assert (loop.ahead.wait() if first is None else first) == expected
        ahead = [step for step in list(loop.asked) if step > expected]
        assert len(ahead) <= steps
        assert nbytes is None or sum(sizes[step] for step in ahead) <= nbytes
    assert loop.asked == list(range(len(sizes)))
    assert loop.ends()
    assert loop.ahead.num_outstanding == 0


def test_the_loop_neither_asks_nor_opens() -> None:
    loop = Loop(6, Limit(2))
    for ref in loop.refs:
        ref.answer.set_result(None)
    assert [loop.take() for _ in range(6)] == list(range(6))
    assert loop.who == set(loop.link.threads)
    assert loop.ends()


def test_a_step_that_was_taken_makes_room_without_a_word_of_the_loop() -> None:
    loop = Loop(9, Limit(2))
    for ref in loop.refs:
        ref.answer.set_result(None)
    with closing(loop.ahead):
        assert loop.take() == 0
        assert loop.reached(loop.brought, 3)
        assert loop.ahead.take() == 1, "it was there: the loop did not wait"
        assert loop.reached(loop.asked, 4), "the thread looks by itself"
    assert loop.ends()


def test_an_error_comes_at_its_step_and_ends_the_thread() -> None:
    loop = Loop(5, Limit(4))
    for step in (0, 1, 3, 4):
        loop.refs[step].answer.set_result(None)
    loop.refs[2].answer.set_exception(StepFailed("a", 2, "a cause"))
    assert [loop.take(), loop.take()] == [0, 1]
    with pytest.raises(StepFailed):
        loop.take()
    assert loop.ends()
    assert loop.link.sending == 0
    assert [fetch() for fetch in loop.fetches[3:]] == [None, None], "nothing is held of what comes after"


@pytest.mark.parametrize("taken", [0, 2])
def test_a_loop_that_leaves_ends_the_thread_with_fetches_in_flight(taken: int) -> None:
    loop = Loop(9, Limit(3), beside=lambda: None)
    for step in range(taken):
        loop.refs[step].answer.set_result(None)
    assert [loop.take() for _ in range(taken)] == list(range(taken))
    loop.ahead.close()
    assert loop.ends()
    assert loop.link.sending == 0


def test_the_end_of_the_connection_ends_the_thread() -> None:
    loop = Loop(9, Limit(3))
    assert loop.ahead.take() is None
    assert loop.reached(loop.asked, 4)
    loop.link.closed = True
    assert loop.ends()


def test_a_loop_that_waits_learns_that_its_lease_is_lost() -> None:
    loop = Loop(3, Limit(1))
    assert loop.ahead.take() is None
    loop.link.lost = True
    with pytest.raises(FencedError):
        loop.ahead.wait()
    with pytest.raises(FencedError):
        loop.ahead.take()
    loop.ahead.close()
    assert loop.ends()


def test_commits_are_looked_for_while_the_loop_computes() -> None:
    looks = threading.Semaphore(0)
    loop = Loop(3, Limit(1), beside=looks.release)
    loop.refs[0].answer.set_result(None)
    with closing(loop.ahead):
        assert loop.take() == 0
        for _ in range(20):
            assert looks.acquire(timeout=WITHIN_S)
        assert loop.link.sending == 1
    assert loop.ends()
    assert loop.link.sending == 0


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    """Makes a loop whose thread looks by itself only after a minute, and sleeps now."""

    def make(num_steps: int, limit: Limit, **options: Any) -> Loop:
        monkeypatch.setattr(rank_reader, "LOOK_AFTER_S", (60.0, 60.0))
        looks = Looks()
        loop = Loop(num_steps, limit, beside=looks, **options)
        assert looks.looked.wait(WITHIN_S)
        loop.looks = looks
        return loop

    return make


@pytest.mark.timeout(WITHIN_S)
def test_a_loop_that_waits_and_an_answer_wake_the_thread(asleep: Callable[..., Loop]) -> None:
    loop = asleep(3, Limit(1))
    assert loop.ahead.take() is None
    timer = threading.Timer(0.1, lambda: loop.refs[0].answer.set_result(None))
    timer.start()
    assert loop.ahead.wait() == 0
    loop.refs[1].answer.set_result(None)
    assert loop.reached(loop.brought, 2)
    loop.ahead.close()
    assert loop.ends()


def test_a_thread_without_work_sleeps(asleep: Callable[..., Loop]) -> None:
    loop = asleep(3, Limit(1))
    time.sleep(0.05)
    assert loop.looks.count == 1
    loop.ahead.close()
    assert loop.ends()


@pytest.mark.parametrize(
    ("since_s", "pause"), [(0.0, 0.002), (0.004, 0.002), (0.02, 0.005), (0.16, 0.04), (9.0, 0.25)]
)
def test_the_thread_sleeps_a_quarter_of_the_time_since_a_step_was_taken(since_s: float, pause: float) -> None:
    assert rank_reader.pause_s(1000.0, 1000.0 + since_s) == pytest.approx(pause)


def test_that_time_begins_when_the_thread_sees_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    since: list[float] = []
    pause_s = rank_reader.pause_s

    def noted(taken_s: float, now_s: float) -> float:
        since.append(taken_s)
        return pause_s(taken_s, now_s)

    monkeypatch.setattr(rank_reader, "pause_s", noted)
    loop = Loop(3, Limit(1))
    with closing(loop.ahead):
        for ref in loop.refs:
            ref.answer.set_result(None)
        begin = time.monotonic()
        assert loop.take() == 0
        assert loop.reached(loop.brought, 2)
        told = len(since)
        while len(since) <= told:  # it looks again
            time.sleep(0.001)
        assert begin <= since[-1] <= time.monotonic()
    assert loop.ends()


class Big:
    """A step whose memory somebody gives back."""

    def __init__(self, index: int, freed: dict[int, threading.Thread]) -> None:
        self.index, self.freed = index, freed

    def __del__(self) -> None:
        self.freed[self.index] = threading.current_thread()


@pytest.mark.timeout(WITHIN_S)
def test_the_thread_gives_back_the_memory_of_steps_that_the_loop_let_go_of(
    asleep: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: dict[int, threading.Thread] = {}
    bring = Loop.bring
    monkeypatch.setattr(Loop, "bring", lambda loop, fetch: Big(bring(loop, fetch), freed))
    loop: Any = asleep(6, Limit(2))
    assert loop.ahead.take() is None
    for ref in loop.refs[:3]:
        ref.answer.set_result(None)
    step = loop.ahead.wait()
    assert loop.reached(loop.brought, 3)
    for _ in range(2):
        step = loop.ahead.take()
    assert step.index == 2
    assert not freed, "the loop gave nothing back"
    assert loop.ahead.take() is None
    loop.ahead._notes.put(None)  # as `wait` does
    assert loop.reached(loop.asked, 6)
    (thread,) = loop.link.threads
    assert freed == {0: thread, 1: thread}, "the loop still has step 2, and nothing else is held"
    loop.ahead.close()
    assert loop.ends()


def test_the_end_wakes_the_thread(asleep: Callable[..., Loop]) -> None:
    loop = asleep(3, Limit(1))
    loop.ahead.close()
    assert loop.ends()


def test_what_is_ahead_is_counted_in_steps_and_in_bytes() -> None:
    loop = Loop(9, Limit(3, 60), sizes=[10 * step for step in range(9)])
    with closing(loop.ahead):
        assert loop.ahead.take() is None
        assert loop.reached(loop.asked, 4)
        assert (loop.ahead.num_outstanding, loop.ahead.nbytes) == (3, 60)
        loop.refs[0].answer.set_result(None)
        assert loop.ahead.wait() == 0
        loop.refs[1].answer.set_result(None)
        assert loop.take() == 1
        assert loop.reached(loop.asked, 4)
    assert loop.ends()


def test_after_every_step_that_was_taken_just_one_more_is_asked_for() -> None:
    loop = Loop(12, Limit(2))
    for ref in loop.refs:
        ref.answer.set_result(None)
    for step in range(12):
        assert loop.take() == step
        ahead = min(step + 3, 12)
        assert loop.reached(loop.asked, ahead)
        assert loop.reached(loop.brought, ahead)
        assert len(loop.asked) == ahead
        assert loop.ahead.num_outstanding == ahead - step - 1
    assert loop.ends()


def test_a_step_whose_size_becomes_known_while_another_comes_is_asked_for() -> None:
    known: dict[int, int] = {}

    class Growing:
        def prepare(self, step: int) -> None: ...

        def size(self, step: int) -> int | None:
            return known.get(step)

    loop = Loop(4, Limit(2, 100), planned=Growing())
    with closing(loop.ahead):
        assert loop.ahead.take() is None
        assert loop.reached(loop.asked, 1)
        known[1] = 1
        loop.refs[0].answer.set_result(None)
        assert loop.ahead.wait() == 0
        assert loop.reached(loop.asked, 2)
    assert loop.ends()
