"""Slices by the call of a worker: bounded however many there are, every one once and in order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.pipelines import slice_graph as graph
from raysvc.pipelines.slice_graph import MOST_CALLS, WorkerPool, answers, calls_of, slice_graph


@given(st.integers(1, 50 * MOST_CALLS))
def test_calls_are_bounded_and_hold_every_slice_once_the_first_ones_alone(num: int) -> None:
    calls = calls_of(range(num))
    assert [piece for call in calls for piece in call] == list(range(num))
    assert len(calls) <= MOST_CALLS
    assert all(len(call) == 1 for call in calls[: MOST_CALLS // 2])
    if num <= MOST_CALLS:
        assert len(calls) == num, "as many calls as slices, where there are few"


class Made:
    """Stands for the receipt of a slice."""

    def __init__(self, piece: Any) -> None:
        self.piece = piece

    def to_json(self) -> bytes:
        return json.dumps({"made": self.piece}).encode()


class Worker:
    def __init__(self, task: str) -> None:
        self.task = task

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return answers(batch["slice"], Made)


def test_a_graph_of_more_slices_than_calls_makes_each_once(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "MOST_CALLS", 6)
    pieces = [[0, {"index": index}] for index in range(20)]
    data = slice_graph(Worker, "task", pieces, WorkerPool(max=2))
    rows = data.take_all()
    assert sorted(json.loads(row["slice"])[1]["index"] for row in rows) == list(range(20))
    assert all(json.loads(row["receipt"]) == {"made": json.loads(row["slice"])} for row in rows)
