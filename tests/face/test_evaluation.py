"""When evals run, and what is kept out of the workers' memory meanwhile."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from raysvc.config import JobConfig
from raysvc.evaluation import Evals, HeldBack
from raysvc.steps import Step


def test_evals_are_due_every_so_often_and_at_the_end() -> None:
    evals = Evals(("valid",), every=4, stop=10)
    assert [done for done in range(1, 11) if evals.due(done)] == [4, 8, 10]
    assert [evals.next_after(done) for done in (0, 4, 8, 10)] == [4, 8, 10, math.inf]
    at_the_end = Evals(("valid",), every=None, stop=10)
    assert [done for done in range(1, 11) if at_the_end.due(done)] == [10]
    assert Evals((), every=1, stop=10).next_after(0) == math.inf


def test_no_step_from_an_eval_on_is_handed_over_before_the_eval_is_over() -> None:
    staged: list[int] = []
    stage = HeldBack(lambda step: staged.append(step.index), until=2)
    for index in range(5):
        stage(Step(index, 0, ()))
    assert staged == [0, 1]
    stage.go_on(4)
    assert staged == [0, 1, 2, 3]
    stage.go_on(math.inf)
    stage(Step(5, 0, ()))
    assert staged == [0, 1, 2, 3, 4, 5]


def test_an_interval_without_an_eval_is_refused() -> None:
    job = {"source": {"path": "rows.jsonl"}, "tokenizer": "here", "trainer": {"eval_every_steps": 5}}
    with pytest.raises(ValidationError, match="eval_every_steps needs evals"):
        JobConfig.model_validate(job)
