"""When evals run, and what is kept out of the workers' memory meanwhile."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from raysvc.actors.dispatch.future import Pending
from raysvc.client.steps import Step
from raysvc.collate.row_values import RowValues
from raysvc.collate.shard import Denominators
from raysvc.job.config import JobConfig
from raysvc.progress import Tick
from raysvc.training.evaluation import EvalMeans, Evals, EvalSums, HeldBack, evaluate

if TYPE_CHECKING:
    from raysvc.actors.dispatch.dispatch import WorkerDispatch
    from raysvc.client.evals import EvalStream


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


def test_the_next_mini_batch_is_asked_for_before_one_is_waited_for_and_sums_are_of_all() -> None:
    seen: list[str] = []

    class Fake:
        def evaluate_async(self, group: str, mini: Any) -> Pending[RowValues]:
            seen.append(f"ask {mini}")
            numbers = np.full(2, mini, np.int64)
            rows = {
                "nll": numbers * 3.0,
                "targets": numbers,
                "text_bytes": numbers * 4,
                "text_nll": numbers * 2.0,
            }

            def wait() -> RowValues:
                seen.append(f"wait {mini}")
                return RowValues(np.arange(2), np.ones(2, np.int64), {}, rows)

            return Pending(wait)

    class Stream(list[Step]):
        name = "valid"

    ticks: list[Tick] = []
    dispatch, minis = cast("WorkerDispatch", Fake()), cast("list[Any]", [1, 2, 3, 4])
    stream = Stream(Step(index, 0, (mini,)) for index, mini in enumerate(minis))
    sums = evaluate(dispatch, "policy", cast("EvalStream", stream), ticks.append, EvalSums())
    order = ["ask 1", "ask 2", "wait 1", "ask 3", "wait 2", "ask 4", "wait 3", "wait 4"]
    assert seen == order
    assert [(tick.phase, tick.done, tick.total, tick.final) for tick in ticks] == [
        ("eval valid", done, 4, done == 4) for done in (1, 2, 3, 4)
    ]
    facts = {"rows": 8, "targets": 20, "bytes": 80, "loss": 3.0, "bits_per_byte": 0.5 / math.log(2)}
    assert sums.to_json() == pytest.approx(facts)
    assert EvalSums().to_json()["bits_per_byte"] is None


def test_means_of_an_objective_weigh_every_pair_alike_and_each_label_by_its_examples() -> None:
    """Three mini-batches of 3, 3 and 1 examples; the workers say sums of what is a mean over them."""
    rewards, good = np.array([3.0, 1.0, -2.0, 0.5, 4.0, 1.5, -1.0]), np.array([1, 1, 0, 0, 0, 1, 0], bool)
    asked: list[float] = []

    class Fake:
        def evaluate_loss_async(self, group: str, mini: Any, loss_weight: float) -> Pending[dict[str, float]]:
            asked.append(loss_weight)
            r, g = rewards[mini.rows], good[mini.rows]
            means = {"loss": r.mean() ** 2, "desirable_share": g.mean(), "rewards/accuracies": (r > 0).mean()}
            means |= {
                f"rewards/{name}": r[of].mean() for name, of in (("chosen", g), ("rejected", ~g)) if of.any()
            }
            told = {name: float(value * loss_weight) for name, value in means.items()}
            return Pending(lambda: {**told, "max_reward": float(r.max())})

    class Stream(list[Step]):
        name = "valid"

    def mini_of(start: int, stop: int) -> Any:
        counts = Denominators(tokens=50 * stop, rows=2 * (stop - start), groups=stop - start)
        return SimpleNamespace(rows=slice(start, stop), info=SimpleNamespace(denominators=counts))

    ticks: list[Tick] = []
    stream = Stream(Step(index, 0, (mini_of(*at),)) for index, at in enumerate([(0, 3), (3, 6), (6, 7)]))
    start = EvalMeans("group_mean", "examples")
    found = evaluate(
        cast("WorkerDispatch", Fake()), "policy", cast("EvalStream", stream), ticks.append, start
    )
    assert asked == [3.0, 3.0, 1.0]
    assert found.to_json() == pytest.approx(
        {
            "rows": 14, "examples": 7, "targets": 50 * 16,
            "loss": (3 * (2 / 3) ** 2 + 3 * 2.0**2 + 1.0) / 7, "rewards/accuracies": 5 / 7, "desirable_share": 3 / 7,
            "rewards/chosen": rewards[good].mean(), "rewards/rejected": rewards[~good].mean(),
            "rewards/margins": rewards[good].mean() - rewards[~good].mean(), "max_reward": 4.0,
        }
    )  # fmt: skip
    assert found.to_json()["rewards/accuracies"] == float(f"{5 / 7:.12g}"), "equal shares are equal"
    assert ticks[-1].facts.keys() == {"loss", "rewards/accuracies"}
    assert start.to_json() == {"rows": 0, "examples": 0, "targets": 0, "loss": None}


def test_an_interval_without_an_eval_is_refused() -> None:
    job = {"source": {"path": "rows.jsonl"}, "tokenizer": "here", "trainer": {"eval_every_steps": 5}}
    with pytest.raises(ValidationError, match="eval_every_steps is given, but there are no evals"):
        JobConfig.model_validate(job)
