"""What a loop notes, a step that was there or a commit, is counted by others: a client of a connection without a server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.server.spec import Lease, Role
from raysvc.client.commits import AT_MOST, Commit, Commits
from raysvc.client.lease_client import WARN_AFTER_STEPS, LeaseClient
from raysvc.client.look_ahead import Limit
from raysvc.client.rank_client import RankClient
from raysvc.client.rank_reader import StepFetch
from raysvc.client.steps import RankStep
from raysvc.errors import FencedError, StepOutOfOrder

WITHIN_S = 30.0
TOKENS = 7


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it is within some time."""
    until = time.monotonic() + WITHIN_S
    while not true() and time.monotonic() < until:
        time.sleep(0.0005)
    return true()


class Link:
    """A connection whose steps are there at once, and whose thread looks when a test says so."""

    def __init__(self) -> None:
        groups = {"num_groups": 500, "batch_size": 1, "mini_batch_size": 1, "epochs": 1, "tail": "drop"}
        self.lease = Lease("a", 1, 60.0, 0, "", {}, "key", groups)
        self.rank, self.ended, self.closed, self.orders = 1, False, False, {}
        self.woken = 0
        self.commits = Commits(self.wake)
        self.settle: Callable[[], None] = lambda: None
        self.threads: list[threading.Thread] = []
        self.looks = threading.Event()

    def wake(self) -> None:
        self.woken += 1

    def check(self) -> None:
        if self.ended:
            raise FencedError("a", 1, 2)

    def beside(self, work: Callable[[], None], name: str) -> None:
        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    @contextmanager
    def sends_commits(self) -> Iterator[None]:
        with self.commits.looked_for():
            yield

    def send_commits(self) -> None:
        if self.looks.is_set():
            self.settle()

    def sizes(self, *_: Any) -> Callable[[], list[int | None]]:
        return lambda: [1] * 8


class Rank(RankClient):
    """Steps of `TOKENS` tokens each, three ahead, on a clock of the test."""

    def __init__(self) -> None:
        self.link = Link()
        link: Any = self.link
        LeaseClient.__init__(self, link, (Role(1),), Limit(3))
        self.rank = 0

    def taken(self, stop: int = 500) -> Iterator[RankStep]:
        """Steps, each of them there when it is asked for, but the first."""
        for step in self._run(self.asked, stop):
            yield step
            if step.index + 1 < stop:
                assert eventually(lambda: self._window is None or not self._window.ready.empty())  # type: ignore[attr-defined]

    def asked(self, index: int) -> StepFetch:
        answer: Future[None] = Future()
        answer.set_result(None)
        return StepFetch(index, [SimpleNamespace(future=lambda: answer)])

    def _arrive(self, fetch: StepFetch) -> RankStep:
        counts = SimpleNamespace(tokens=TOKENS)
        info: Any = SimpleNamespace(
            num_cells=8, pad_share=0.0, rank_tokens=(TOKENS,), num_truncated=0, denominators=counts
        )
        return RankStep(fetch.index, 0, (), (info,))


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made._end_iteration()
    for thread in made.link.threads:
        thread.join(WITHIN_S)
    assert not any(thread.is_alive() for thread in made.link.threads)


def test_a_loop_only_notes_its_steps_and_commits_and_the_thread_beside_counts_them(rank: Rank) -> None:
    steps = rank.taken()
    rank.commit(next(steps).index)
    rank.commit(next(steps).index)
    assert (rank._frontier, rank.meter.report()["steps"]) == (0, 0)
    assert not rank.link.commits
    rank.link.looks.set()
    assert eventually(lambda: not rank._noted)
    assert rank.link.commits.take() == [Commit(1, False, 0)]
    report = rank.meter.report()
    assert (report["steps"], report["tokens"]) == (2, 2 * TOKENS)
    assert rank.link.woken == 0


def test_who_asks_for_the_frontier_the_counters_or_a_report_is_told_of_all_that_was_noted(rank: Rank) -> None:
    steps = rank.taken()
    for index in range(3):
        assert next(steps).index == index
        rank.commit(index)
        assert rank.next_step == index + 1
        assert len(rank) == 500 - index - 1
    next(steps)
    stats = rank.stats()
    assert (stats.steps, stats.last_wait_s) == (4, 0.0), "a step that was there is no wait"
    assert rank._report()["steps"] == 3


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["take", "commit", "commit the one before", "count"]), max_size=30))
def test_whenever_it_is_counted_steps_tokens_and_the_frontier_are_those_that_were_committed(
    calls: list[str],
) -> None:
    rank, given_steps, frontier = Rank(), 0, 0
    with closing(rank.taken()) as steps:
        for call in calls:
            if call == "take":
                assert next(steps).index == given_steps
                given_steps += 1
            elif call == "count":
                rank._settle()
            elif (step := given_steps - (1 if call == "commit" else 2)) >= 0:
                rank.commit(step)
                frontier = max(frontier, step + 1)
        report = rank._report()
    rank._end_iteration()
    assert (rank.next_step, rank.stats().steps) == (frontier, given_steps)
    assert (report["steps"], report["tokens"]) == (frontier, frontier * TOKENS)
    sent = rank.link.commits.take()
    assert [commit.step + 1 for commit in sent] == [frontier] * bool(frontier)


def test_a_loop_whose_thread_does_not_look_counts_by_itself_and_wakes_who_sends(rank: Rank) -> None:
    steps = rank.taken()
    for _ in range(AT_MOST):
        rank.commit(next(steps).index)
    assert rank._frontier > 0
    assert len(rank._noted) < AT_MOST
    for _ in range(2 * AT_MOST):
        rank.commit(next(steps).index)
    assert rank.link.woken > 0


def test_the_frontier_never_goes_back_whoever_commits_and_counts(rank: Rank) -> None:
    rank.link.looks.set()
    last = sum(1 for _ in rank.taken(200)) - 1
    seen: list[int] = []
    late: list[int] = []

    def commit(steps: range) -> None:
        for step in steps:
            rank.commit(step)
            if rank.next_step <= step:
                late.append(step)

    parts = (range(0, last, 2), range(1, last, 3), range(last, -1, -7))
    commits = [threading.Thread(target=commit, args=(part,)) for part in parts]
    for thread in commits:
        thread.start()
    while any(thread.is_alive() for thread in commits):
        seen.append(rank.next_step)
    assert not late, "what a thread committed is in the frontier that it reads then"
    assert seen == sorted(seen)
    assert rank.next_step == last + 1
    assert rank._report()["tokens"] == (last + 1) * TOKENS


def test_a_lost_lease_is_told_by_the_next_call_though_a_step_is_there(rank: Rank) -> None:
    steps = rank.taken()
    next(steps)
    rank.link.ended = True
    with pytest.raises(FencedError):
        rank.commit(0)
    with pytest.raises(FencedError):
        next(steps)


def test_a_step_that_was_not_given_is_refused_and_the_next_one_may_be_skipped(rank: Rank) -> None:
    steps = rank.taken()
    next(steps)
    with pytest.raises(StepOutOfOrder):
        rank.commit(2)
    rank.commit(0)
    rank.commit(1, skipped=True)
    assert rank.next_step == 2
    assert rank.link.commits.take() == [Commit(1, True, 0)]


def test_a_rank_that_never_commits_is_warned_once_and_one_that_commits_never(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for step in rank.taken(WARN_AFTER_STEPS + 10):
        rank.commit(step.index)
    rank._settle()
    assert not [message for message in caplog.messages if "no commit" in message]
    for _ in rank.taken(3 * WARN_AFTER_STEPS + 10):
        pass
    rank._settle()
    (said,) = [message for message in caplog.messages if "no commit" in message]
    assert f"steps={WARN_AFTER_STEPS}" in said
