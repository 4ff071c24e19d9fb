"""What a client measures of its trainer, on a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.actors.server.trainer_reports import TrainerReports
from raysvc.client.meter import RECENT_S, Given, Meter
from raysvc.training.stalls import StepTimes


class Clock:
    """Goes forward when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def given(step: int, tokens: int = 10, read_s: float = 0.0) -> Given:
    info: Any = SimpleNamespace(
        num_cells=20,
        pad_share=0.5,
        rank_tokens=(6, 4),
        num_truncated=1,
        denominators=SimpleNamespace(tokens=tokens),
    )
    return Given(step, [info], read_s, 0.0)


def train(meter: Meter, clock: Clock, steps: int, wait_s: float, compute_s: float, first: int = 0) -> None:
    for step in range(first, first + steps):
        meter.wait_begins()
        clock.now_s += wait_s
        meter.wait_ends(wait_s, given(step, read_s=wait_s))
        clock.now_s += compute_s
        meter.committed(step, 1)


def test_nine_and_a_half_seconds_of_ten_are_95_percent() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    train(meter, clock, 2, wait_s=9.5, compute_s=0.5)
    report = meter.report()
    assert report["stall"] == pytest.approx(0.95)
    assert (report["steps"], report["tokens"], report["stall_s"]) == (2, 20, pytest.approx(19.0))
    assert report["causes"] == {"read": pytest.approx(19.0)}
    assert (report["steps_per_s"], report["tokens_per_s"]) == (pytest.approx(0.1), pytest.approx(1.0))


def test_a_wait_for_rollouts_is_the_producers() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.wait_begins()
    clock.now_s += 5.0
    meter.wait_ends(5.0, given(0)._replace(groups_s=4.9))
    assert meter.report()["causes"] == {"groups": pytest.approx(4.9)}


def test_a_wait_counts_while_it_lasts_and_once() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.wait_begins()
    for _ in range(5):
        clock.now_s += 2.0
        report = meter.report()
    assert (report["stall"], report["stall_s"]) == (1.0, 10.0)
    clock.now_s += 1.0
    meter.wait_ends(11.0, given(0))
    clock.now_s += 11.0
    assert (meter.report()["stall_s"], meter.report()["stall"]) == (11.0, 0.5)


def test_shares_and_rates_are_of_the_last_half_minute() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    train(meter, clock, 10, wait_s=4.0, compute_s=0.0)
    for step in range(30):
        train(meter, clock, 1, wait_s=0.0, compute_s=2.0, first=10 + step)
        report = meter.report()
    assert clock.now_s - 140.0 == 2 * RECENT_S
    assert (report["stall"], report["stall_s"], report["steps_per_s"]) == (0.0, 40.0, pytest.approx(0.5))


def test_of_a_driver_whose_workers_compute_meanwhile_no_wait_counts() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.wait_begins(overlaps=True)
    clock.now_s += 5.0
    assert meter.report()["stall_s"] == 0.0
    meter.wait_ends(5.0, given(0))
    assert meter.report()["stall_s"] == 0.0


def test_what_workers_say_of_their_stalls_replaces_the_drivers_waits() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.told_by_workers = True
    train(meter, clock, 1, wait_s=5.0, compute_s=5.0)
    meter.stalled(StepTimes(0, 0.5, copy_s=0.5))
    report = meter.report()
    assert (report["stall_s"], report["causes"], report["steps"]) == (0.5, {"copy": 0.5}, 1)


def test_steps_that_were_given_again_after_a_rewind_are_trained_once() -> None:
    meter = Meter("a", clock=Clock())
    for step in (0, 1):
        meter.wait_ends(0.0, given(step))
    meter.moved()
    meter.wait_ends(0.0, given(0, tokens=7))
    meter.committed(0, 1)
    assert (meter.report()["steps"], meter.report()["tokens"]) == (1, 7)


def test_the_rank_that_waited_most_speaks_for_its_group_and_no_one_for_another_fence() -> None:
    reports = TrainerReports()
    reports.note(
        3, 1, {"version": "0.1.1", "stall": 0.9, "stall_s": 9.0, "causes": {"copy": 9.0}, "steps": 4}
    )
    reports.note(3, 0, {"version": "0.1.0", "stall": 0.1, "stall_s": 1.0, "causes": {}, "steps": 5})
    merged = reports.of(3)
    assert merged == {
        "version": "0.1.0, 0.1.1",
        "stall": 0.9,
        "stall_s": 9.0,
        "causes": {"copy": 9.0},
        "steps": 5,
    }
    assert reports.of(4) is None


def test_what_a_loop_only_notes_counts_as_if_it_were_counted_at_once() -> None:
    clocks, meters = [Clock(), Clock()], []
    for clock in clocks:
        meters.append(Meter("a", clock=clock))
    told, noted = meters
    for step in range(5):
        told.wait_begins()
        for clock in clocks:
            clock.now_s += 0.25
        told.wait_ends(0.25, given(step, tokens=step))
        noted.was_there(0.25, given(step, tokens=step))
        for clock in clocks:
            clock.now_s += 2.0
        told.committed(step, 1)
        noted.trained(step, 1)
    expected = told.report()
    del expected["causes"]  # nobody is blamed for a step that was there
    assert expected == {name: value for name, value in noted.report().items() if name != "causes"}
    assert noted.committed(5, 1) == told.committed(5, 1), "the newest commit is known, too"


def test_what_was_given_before_a_rewind_and_only_noted_is_not_trained() -> None:
    meter = Meter("a", clock=Clock())
    meter.was_there(0.0, given(1))
    meter.moved()
    meter.was_there(0.0, given(0, tokens=7))
    meter.trained(1, 2)
    assert (meter.report()["steps"], meter.report()["tokens"]) == (2, 7)
