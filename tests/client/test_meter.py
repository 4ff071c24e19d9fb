"""What a client measures of its trainer, on a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.actors.server.trainer_reports import TrainerReports
from raysvc.client import meter as meter_module
from raysvc.client.meter import RECENT_S, CommittedSteps, DeliveredStep, Meter
from raysvc.metrics import BY_NAME
from raysvc.trackers.stalls import StepTimes


class Clock:
    """Goes forward when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def given(step: int, tokens: int = 10, read_s: float = 0.0) -> DeliveredStep:
    info: Any = SimpleNamespace(
        num_cells=20,
        pad_share=0.5,
        rank_tokens=(6, 4),
        num_truncated=1,
        denominators=SimpleNamespace(tokens=tokens),
    )
    return DeliveredStep(step, [info], read_s, 0.0)


class Records:
    """Takes the place of a meter's records: what was recorded, and whether it was written."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.written = 0

    def record(self, name: str, value: float, **tags: str) -> None:
        assert tags == {"server": "a", **({"role": "trainer"} if "role" in BY_NAME[name].tags else {})}
        self.values.setdefault(name, []).append(value)

    def write(self) -> None:
        self.written += 1


def recording(clock: Clock, **options: Any) -> tuple[Meter, Records]:
    meter, records = Meter("a", clock=clock, **options), Records()
    meter.metrics = records  # type: ignore[assignment]
    return meter, records


def batches(*facts: tuple[int, float, tuple[int, ...], int, int]) -> list[Any]:
    """Infos of mini-batches: cells, share of padding, tokens by rank, cut rows, counted tokens."""
    return [
        SimpleNamespace(
            num_cells=cells,
            pad_share=pad,
            rank_tokens=ranks,
            num_truncated=cut,
            denominators=SimpleNamespace(tokens=tokens),
        )
        for cells, pad, ranks, cut, tokens in facts
    ]


def train(meter: Meter, clock: Clock, steps: int, wait_s: float, compute_s: float, first: int = 0) -> None:
    for step in range(first, first + steps):
        meter.wait_begins()
        clock.now_s += wait_s
        meter.wait_ends(wait_s, given(step, read_s=wait_s))
        clock.now_s += compute_s
        meter.committed(step, 1, clock())


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
    assert report["tokens_per_s"] == pytest.approx(5.0)


def test_half_a_minute_begins_with_the_report_that_is_as_old() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.stalled(StepTimes(0, 5.0))
    clock.now_s += 10.0
    assert meter.report()["stall"] == 0.5
    clock.now_s += RECENT_S
    assert meter.report()["stall"] == 0.0


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
    meter.committed(0, 1, 101.0)
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


def test_a_commit_counts_from_the_time_that_it_carries() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.given(given(0))
    clock.now_s += 9.0
    assert meter.committed(0, 1, 104.0).step_s == 4.0
    assert meter.committed(2, 2, 110.0).step_s == 3.0


def test_metrics_and_what_a_commit_tells_are_of_the_step_by_hand() -> None:
    clock = Clock()
    meter, records = recording(clock)
    infos = batches((20, 0.5, (6, 4), 1, 10), (60, 0.25, (30, 15), 2, 40))
    meter.wait_begins()
    clock.now_s += 10.0
    meter.wait_ends(10.0, DeliveredStep(0, infos, read_s=4.0, collate_s=2.0, copy_s=1.5, groups_s=1.2))
    clock.now_s += 5.0
    told = meter.committed(0, 1, clock())
    assert told == CommittedSteps(tokens=50, input_tokens=55, padding=0.3125, step_s=15.0, stall_s=10.0)
    assert records.values == {
        "stall_seconds": [10.0],
        "fetch_seconds": [10.0],
        "stall_read_seconds": [4.0],
        "stall_collate_seconds": [2.0],
        "stall_copy_seconds": [1.5],
        "stall_groups_seconds": [1.2],
        "stall_build_seconds": [0.0],
        "stall_other_seconds": [pytest.approx(1.3)],
        "steps": [1],
        "step_seconds": [15.0],
        "trained_tokens": [50],
        "cut_rows": [3],
        "padding_share": [0.3125],
        "packing_share": [0.6875],
        "imbalance_ratio": [pytest.approx(4 / 3)],
    }
    records.values.clear()
    for step in (1, 2):
        meter.given(given(step))
    clock.now_s += 6.0
    meter.committed(2, 2, clock())
    assert records.values == {
        "fetch_seconds": [0.0, 0.0],
        "steps": [2],
        "step_seconds": [3.0],
        "trained_tokens": [20],
        "cut_rows": [2],
        "padding_share": [0.5],
        "packing_share": [0.5],
        "imbalance_ratio": [1.2],
    }
    records.values.clear()
    assert meter.committed(3, 1, clock() + 1.0) == CommittedSteps(0, 0, 0.0, 1.0, 0.0), (
        "it was given to nobody"
    )
    assert records.values == {"steps": [1], "step_seconds": [1.0], "trained_tokens": [0], "cut_rows": [0]}
    assert records.written == 0
    meter.report()
    assert records.written == 1


def test_causes_that_took_no_part_are_recorded_as_nothing() -> None:
    clock = Clock()
    meter, records = recording(clock)
    meter.stalled(StepTimes(0, 2.0, collate_s=2.0))
    meter.stalled(StepTimes(1, 3.0, read_s=3.0))
    meter.stalled(StepTimes(2, 4.0, collate_s=4.0))
    assert records.values == {
        "stall_seconds": [2.0, 3.0, 4.0],
        "stall_read_seconds": [0.0, 3.0, 0.0],
        "stall_collate_seconds": [2.0, 0.0, 4.0],
        "stall_copy_seconds": [0.0, 0.0, 0.0],
        "stall_groups_seconds": [0.0, 0.0, 0.0],
        "stall_build_seconds": [0.0, 0.0, 0.0],
        "stall_other_seconds": [0.0, 0.0, 0.0],
    }
    assert meter.report()["causes"] == {"collate": 6.0, "read": 3.0}


def test_one_rank_speaks_for_all_in_metrics_and_all_report() -> None:
    clock = Clock()
    meter, records = recording(clock, exports=False)
    train(meter, clock, 2, wait_s=1.0, compute_s=1.0)
    assert records.values == {}
    assert (meter.report()["steps"], meter.report()["stall_s"]) == (2, 2.0)


def test_a_step_without_mini_batches_is_even_and_has_no_padding() -> None:
    meter, records = recording(Clock())
    meter.given(DeliveredStep(0, [], 0.0, 0.0))
    assert meter.committed(0, 1, 101.0)[:3] == (0, 0, 0.0)
    assert (records.values["imbalance_ratio"], records.values["padding_share"]) == ([1.0], [0.0])


def test_of_a_trainer_that_never_commits_the_newest_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "MAX_UNCOMMITTED", 3)
    meter = Meter("a", clock=Clock())
    for step in range(5):
        meter.given(given(step, tokens=10**step))
    assert meter.committed(4, 5, 101.0).tokens == 11_100


def test_a_wait_belongs_to_the_step_after_the_commit_before_it() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    meter.given(given(0))
    assert meter.committed(0, 1, clock()).stall_s == 0.0
    meter.wait_begins()
    clock.now_s += 2.0
    meter.wait_ends(2.0, given(1))
    clock.now_s += 1.0
    assert meter.committed(1, 1, clock()).stall_s == 2.0


def test_a_wait_that_ended_without_a_step_counts() -> None:
    clock = Clock()
    meter, records = recording(clock)
    meter.wait_begins()
    clock.now_s += 2.0
    meter.wait_ends(2.0, None)
    clock.now_s += 2.0
    report = meter.report()
    assert (report["stall_s"], report["stall"], report["elapsed_s"]) == (2.0, 0.5, 4.0)
    assert records.values == {"stall_seconds": [2.0]}


def test_rates_are_right_at_once_and_a_share_is_at_most_one() -> None:
    clock = Clock()
    meter = Meter("a", clock=clock)
    empty = meter.report()
    assert (empty["stall"], empty["steps_per_s"], empty["tokens_per_s"], empty["elapsed_s"]) == (0, 0, 0, 0)
    meter.given(given(0))
    clock.now_s += 0.5
    meter.committed(0, 1, clock())
    meter.stalled(StepTimes(0, 0.25))
    report = meter.report()
    assert (report["stall"], report["steps_per_s"], report["tokens_per_s"]) == (0.5, 2.0, 20.0)
    meter.stalled(StepTimes(0, 7.0))
    assert meter.report()["stall"] == 1.0
