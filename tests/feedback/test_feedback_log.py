"""Outcomes of rows: the list in `raysvc.feedback.feedback_log`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raysvc.feedback import feedback_log
from raysvc.feedback.decision import Decision
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import RowOutcomes


def of(first: int, stop: int, value: float, name: str = "loss") -> RowOutcomes:
    """Two rows a step, all with one value."""
    steps = np.repeat(np.arange(first, stop), 2)
    return RowOutcomes(
        steps, steps * 10 + np.tile([0, 1], stop - first), {name: np.full(len(steps), value, np.float32)}
    )


def decision(from_step: int) -> Decision:
    return Decision("x", from_step, None, (), (1,), {})


def values(found: RowOutcomes, name: str = "loss") -> dict[int, float]:
    return dict(zip(found.steps.tolist(), found.columns[name].tolist(), strict=True))


def test_the_first_report_of_a_step_counts_until_a_decision_changes_the_step(tmp_path: Path) -> None:
    log = FeedbackLog(str(tmp_path))
    log.report(of(0, 4, 1.0), known=0)
    log.report(of(2, 6, 2.0), known=0)  # the trainer died, and trained 2 and 3 again
    again = FeedbackLog(str(tmp_path))
    assert values(again.outcomes(0, 9, [])) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert values(again.outcomes(3, 5, [])) == {3: 1, 4: 2}
    again.report(of(3, 6, 3.0), known=1)
    assert values(again.outcomes(0, 9, [decision(4)])) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 3, 5: 3}
    assert len(again.outcomes(7, 9, []).steps) == 0


def test_a_report_is_an_arrow_file_of_twenty_bytes_a_row_and_columns_may_differ(tmp_path: Path) -> None:
    log = FeedbackLog(str(tmp_path))
    log.report(of(0, 500, 0.5), known=0)
    log.report(of(500, 501, 0.25, "reward"), known=0)
    first, second = sorted((tmp_path / "outcomes").iterdir())
    assert first.name.startswith("000000000000.0.0-499.")
    assert second.name.startswith("000000000001.0.500-500.")
    table = pa.ipc.open_file(first).read_all()
    assert [str(field.type) for field in table.schema] == ["int64", "int64", "float"]
    assert first.stat().st_size < 20 * 1000 + 1500
    found = log.outcomes(499, 501, [])
    assert values(found)[499] == 0.5
    assert np.isnan(values(found)[500])
    assert values(found, "reward")[500] == 0.25


def test_the_oldest_reports_go_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback_log, "MOST_RECORDS", 3)
    log = FeedbackLog(str(tmp_path))
    for step in range(5):
        log.report(of(step, step + 1, step), known=0)
    assert sorted(values(log.outcomes(0, 9, []))) == [2, 3, 4]
    monkeypatch.setattr(feedback_log, "MOST_BYTES", 2000)
    FeedbackLog(str(tmp_path)).report(of(7, 8, 7), known=0)
    assert max(values(log.outcomes(0, 9, []))) == 7
    assert sum(path.stat().st_size for path in (tmp_path / "outcomes").iterdir()) <= 2000
