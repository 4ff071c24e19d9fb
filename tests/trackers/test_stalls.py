"""Whose fault a wait was: pure, so every case is one line."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.trackers.stalls import KEEP, StallBook, StepTimes, verdict

SECONDS = st.floats(0, 100, allow_nan=False)


def test_the_line_names_the_largest_cause_first() -> None:
    times = StepTimes(812, waited_s=0.041, read_s=0.031, collate_s=0.038, read_from="s3")
    assert verdict(times) == "step 812 waited 41 ms: collation on the server 38 ms, part read from s3 31 ms"


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (StepTimes(3, 0.0), None),
        (StepTimes(3, 0.0005, collate_s=1.0), None),
        (StepTimes(3, 0.5, copy_s=0.48), "step 3 waited 500 ms: copy to the worker 480 ms"),
        (StepTimes(3, 0.5), "step 3 waited 500 ms: unexplained (queue or network) 500 ms"),
        (StepTimes(3, 5.0, groups_s=4.9), "step 3 waited 5000 ms: too few groups of rollouts 4900 ms"),
        (StepTimes(3, 5.0, build_s=4.9), "step 3 waited 5000 ms: rows not tokenized yet 4900 ms"),
        (StepTimes(3, 1.0, read_s=0.4, collate_s=0.01),
         "step 3 waited 1000 ms: unexplained (queue or network) 600 ms, part read from file 400 ms"),
    ],
)  # fmt: skip
def test_a_wait_has_its_causes(times: StepTimes, line: str | None) -> None:
    assert verdict(times) == line


@settings(max_examples=100)
@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), max_size=60))
def test_totals_hold_every_step_and_no_cause_takes_longer_than_the_waits(
    steps: list[tuple[float, float, float, float]],
) -> None:
    book = StallBook()
    said = [book.add(StepTimes(number, *seconds)) for number, seconds in enumerate(steps)]
    lines = [line for line in said if line is not None]
    assert book.total_s == pytest.approx(sum(waited for waited, *_ in steps))
    assert list(book.lines) == lines[-KEEP:]
    assert book.num_stalled == len(lines)
    assert all(seconds <= book.total_s * (1 + 1e-9) for seconds in book.by_cause.values())
    for number, seconds in enumerate(steps):
        causes = list(StepTimes(number, *seconds).causes().values())
        assert causes == sorted(causes, reverse=True)
    summary = book.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert pickle.loads(pickle.dumps(book)).summary() == summary
