"""What a run does on its evals; the oracle of early stops is the callback of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from raysvc.errors import ConfigError
from raysvc.evals.eval_decisions import EvalDecisions, best_of_state
from raysvc.job.config import JobConfig, TrainerConfig
from raysvc.training.run_folder import RunFolder

HELD = {"eval": "held", "metric": "loss"}


def trainer(**fields: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(fields)


def line(value: float | None, metric: str = "loss") -> dict[str, Any]:
    return {"eval": "held", "loss": None, "bits_per_byte": None, metric: value}


def stop_by_transformers(
    values: list[float], patience: int, threshold: float, rises: bool
) -> tuple[int | None, int]:
    """After how many evals HF's Trainer stops, and which one was the best."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    args = TrainingArguments("out", report_to=[], metric_for_best_model="loss", greater_is_better=rises)
    callback, state = EarlyStoppingCallback(patience, threshold), TrainerState()
    best = 0
    for number, value in enumerate(values, start=1):
        control = TrainerControl()
        callback.on_evaluate(args, state, control, metrics={"eval_loss": value})
        if state.best_metric is None or (
            value > state.best_metric if rises else value < state.best_metric
        ):  # as its Trainer, which saves afterwards
            state.best_metric, best = value, number
        if control.should_training_stop:
            return number, best
    return None, best


@pytest.mark.parametrize(
    ("metric", "rises"), [("loss", False), ("rewards/rejected", False), ("rewards/accuracies", True)]
)
@pytest.mark.parametrize("seed", range(20))
def test_a_run_stops_where_the_callback_of_transformers_stops_it_whatever_checkpoints_it_was_resumed_from(
    seed: int, metric: str, rises: bool
) -> None:
    held = {"eval": "held", "metric": metric}
    rng = np.random.default_rng(seed)
    values = np.round(1.0 + rng.normal(0, 0.1, 30).cumsum(), 2).tolist()
    patience, threshold = int(rng.integers(1, 5)), float(rng.choice([0.0, 0.1]))
    job = trainer(keep_best=held, stop_after={**held, "patience": patience, "threshold": threshold})
    stop, best = stop_by_transformers(values, patience, threshold, rises)
    state: dict[str, Any] = {}
    for number, value in enumerate(values, start=1):
        decisions = EvalDecisions.of(job, state)
        assert not decisions.stops
        decisions = decisions.after(number * 10, [line(value, metric)])
        state = json.loads(json.dumps(decisions.to_state()))  # of a checkpoint
        if decisions.stops:
            break
    assert (number if EvalDecisions.of(job, state).stops else None) == stop
    assert EvalDecisions.of(job, state).best_steps == best_of_state(state) == best * 10


def test_what_is_not_a_number_is_neither_the_best_nor_progress() -> None:
    job = trainer(keep_best=HELD, stop_after={**HELD, "patience": 3})
    decisions = EvalDecisions.of(job, {})
    for steps, value in enumerate((math.nan, 2.0, math.inf, math.nan), start=1):
        decisions = decisions.after(steps, [line(value)])
        assert not decisions.stops
    assert decisions.best_steps == 2
    decisions = decisions.after(5, [line(-math.inf)])
    assert (decisions.stops, decisions.best_steps) == (True, 2)
    assert decisions.to_summary() == {
        "best": {**HELD, "value": 2.0, "steps": 2},
        "stopped_early": {**HELD, "value": 2.0, "steps": 2, "without": 3, "patience": 3},
    }


def test_another_metric_is_unknown_and_more_patience_goes_on() -> None:
    job = trainer(keep_best=HELD, stop_after={**HELD, "patience": 1})
    decisions = EvalDecisions.of(job, {}).after(1, [line(2.0)]).after(2, [line(3.0)])
    state = decisions.to_state()
    assert decisions.stops
    patient = EvalDecisions.of(trainer(stop_after={**HELD, "patience": 2}), state)
    assert not patient.stops
    assert patient.after(3, [line(3.0)]).stops
    bits = {"eval": "held", "metric": "bits_per_byte"}
    other = EvalDecisions.of(trainer(keep_best=bits, stop_after={**bits, "patience": 1}), state)
    assert (other.stops, other.best_steps) == (False, None)
    assert EvalDecisions.of(trainer(), state).to_state() == {}


def test_other_rows_of_an_eval_are_unknown_and_the_same_rows_are_not() -> None:
    job = trainer(keep_best=HELD, stop_after={**HELD, "patience": 1})
    rows = {"held": "a", "other": "b"}
    state = EvalDecisions.of(job, {}, rows).after(1, [line(2.0)]).after(2, [line(3.0)]).to_state()
    for now, best in ((None, 1), (rows, 1), ({"held": "a"}, 1), ({**rows, "held": "c"}, None), ({}, None)):
        decisions = EvalDecisions.of(job, state, now)
        assert (decisions.best_steps, decisions.stops) == (best, best == 1), now
    changed = EvalDecisions.of(job, state, {"held": "c"}).after(3, [line(9.0)])
    assert EvalDecisions.of(job, changed.to_state()).best_steps == 3, "the rows of now are known from then on"


def test_a_metric_that_an_eval_does_not_have_is_named() -> None:
    bits = {"eval": "held", "metric": "bits_per_byte"}
    with pytest.raises(ConfigError, match=r"trainer\.keep_best: eval held has no bits_per_byte"):
        EvalDecisions.of(trainer(keep_best=bits), {}).after(1, [line(2.0)])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"keep_best": HELD}, r"trainer\.keep_best needs evals during the run"),
        ({"keep_best": {"eval": "hold"}, "eval_every_steps": 2}, r"keep_best\.eval: hold is no eval of this job; give one of held"),
        ({"stop_after": {"eval": "hold", "patience": 2}, "eval_every_steps": 2}, r"stop_after\.eval: hold is no eval"),
        ({"stop_after": HELD, "eval_every_steps": 2}, r"stop_after.patience"),
        ({"keep_best": {**HELD, "metric": "accuracy"}, "eval_every_steps": 2, "objective": "dpo"},
         r"trainer\.keep_best\.metric: an eval of objective dpo has no accuracy; give one of loss, rewards/accuracies"),
        ({"keep_best": {**HELD, "metric": "rewards/margins"}, "eval_every_steps": 2}, r"give one of loss, bits_per_byte"),
    ],
)  # fmt: skip
def test_what_would_decide_nothing_is_refused(fields: dict[str, Any], told: str) -> None:
    job = {"source": {"path": "rows.jsonl"}, "tokenizer": "here", "evals": {"held": {"share": 0.1}}}
    with pytest.raises(ValidationError, match=told):
        JobConfig.model_validate({**job, "trainer": fields})


def test_each_checkpoint_that_stays_finds_the_best_that_it_names(tmp_path: Path) -> None:
    job, run = trainer(keep_best=HELD), RunFolder(tmp_path)
    decisions = EvalDecisions.of(job, {})
    there = []
    for steps, value in enumerate([3.0, 2.0, 2.5, 2.4, 1.0, 1.5], start=1):
        decisions = decisions.after(steps, [line(value)])
        folder = run.new_checkpoint(steps)
        run.publish(folder, decisions.to_state())
        run.prune(2)
        there.append([one.step for one in run.checkpoints()])
    assert there == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6]]
