"""Process rewards: the gradient is that of one process, row by row, on a value at the last token of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raysvc.actors.worker.losses import StepLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
from raysvc.row_batch import RowBatch

from . import pair_reference
from .ranks import DoubleWorker, Ranks, gradients_of, tiny_spec
from .reference import distance
from .shards import minis_of, random_rows

EXACT = 3e-7  # float64 models; weights and columns travel as float32
PLANS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "padded_right", "micro_batch_size": 4},
    "left": {"layout": "padded_left", "micro_batch_size": 3},
    "tokens": {"layout": "padded_right", "micro_batch_tokens": 60},
    "packed": {"layout": "packed", "micro_batch_tokens": 48, "align": 4},
}
Expected = tuple[dict[str, np.ndarray], float]


def solutions(num_rows: int = 9, seed: int = 2) -> RowBatch:
    """Rows with some steps; one has none that is labelled, as truncation may leave it."""
    rows, rng = random_rows(num_rows, seed=seed), np.random.default_rng(seed)
    rows.tokens["loss_mask"][:] = rng.random(len(rows.tokens["loss_mask"])) < 0.3
    rows.tokens["loss_mask"][rows.offsets[:-1]] = 0
    rows.tokens["loss_mask"][rows.offsets[4] : rows.offsets[5]] = 0
    labels = rng.choice([0.0, 0.25, 1.0], len(rows.tokens["loss_mask"])).astype(np.float32)
    rows.tokens["step_labels"] = np.where(rows.tokens["loss_mask"] > 0, labels, -1).astype(np.float32)
    return rows


def critic_of() -> Any:
    torch.manual_seed(0)
    spec = tiny_spec(role="critic").model_dump_json()
    return CausalLMWorker(0, 1, "cpu", spec).load_lm().double().eval()


def expected_of(rows: RowBatch) -> Expected:
    """The mean over all steps of -log of the probability of the label, one row a forward."""
    critic, losses = critic_of(), []
    for row in range(len(rows)):
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        values = critic(input_ids=ids[None], use_cache=False).logits[0, :, 0]
        for place in np.flatnonzero(rows.tokens["loss_mask"][here]).tolist():
            label, right = float(rows.tokens["step_labels"][here][place]), torch.sigmoid(values[place])
            losses.append(-label * torch.log(right) - (1 - label) * torch.log(1 - right))
    return pair_reference.gradient(critic, torch.stack(losses))


def shards_of(rows: RowBatch, layout: str, dp_size: int) -> Any:
    plan = {"batch_size": len(rows), "shuffle": "none", **PLANS[layout]}
    [(_, shards, _)] = minis_of(rows, plan, dp_size, columns=["step_labels"])
    return shards


def check(results: list[Any], expected: Expected, what: str) -> None:
    grads, loss = expected
    assert sum(rank[0][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6), what
    for rank in results:
        assert distance(rank[0][0], grads) < EXACT, what


@pytest.mark.parametrize("layout", PLANS)
def test_the_gradient_of_one_worker_is_that_of_the_formula(layout: str) -> None:
    rows = solutions()
    worker = DoubleWorker(0, 1, "cpu", tiny_spec(role="critic").model_dump_json())
    worker.setup("")
    found = gradients_of(worker, list(shards_of(rows, layout, 1)), [StepLoss()])
    check([found], expected_of(rows), layout)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("dp_size", [2, 3])
def test_ranks_and_layouts_change_no_gradient(ranks: Ranks, dp_size: int, strategy: str) -> None:
    rows = solutions()
    expected, spec = expected_of(rows), tiny_spec(role="critic", strategy=strategy)
    for layout in PLANS if strategy == "ddp" else ("tokens", "packed"):
        found = ranks.run(
            spec, gradients_of, [([one], [StepLoss()]) for one in shards_of(rows, layout, dp_size)]
        )
        check(found, expected, f"{layout} on {dp_size}, {strategy}")


def test_the_loss_is_that_of_a_classifier_of_two() -> None:
    """As TRL's PRMTrainer trains it: logits (0, v), cross-entropy at the last tokens."""
    from raysvc.actors.worker.losses import Targets

    values, labels = torch.randn(7, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    found = StepLoss()(Targets(weights, {"step_labels": labels.float()}, values=values))
    logits = torch.stack([torch.zeros_like(values), values], 1)
    assert float(found.total) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)))
    right = (logits.argmax(1) == labels).double().mean()
    assert float(found.metrics["accuracy"]) == pytest.approx(float(right))


@pytest.mark.parametrize("layout", PLANS)
def test_scores_of_steps_are_the_values_at_their_last_tokens(layout: str) -> None:
    rows, critic = solutions(), critic_of()
    worker = DoubleWorker(0, 1, "cpu", tiny_spec(role="critic", own_loss=StepLoss()).model_dump_json())
    worker.setup("")
    [shard] = shards_of(rows, layout, 1)
    worker.stage((0, 0), shard)
    found = worker.forward((0, 0))
    for index, row in enumerate(found.row_ids.tolist()):
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        with torch.no_grad():
            values = critic(input_ids=ids[None], use_cache=False).logits[0, :, 0].numpy()
        mask = rows.tokens["loss_mask"][here] > 0
        assert found.row(index, "values")[mask] == pytest.approx(values[mask], rel=1e-5)


def test_a_spec_with_the_loss_travels_as_text() -> None:
    spec = tiny_spec(own_loss=StepLoss())
    assert ModelSpec.model_validate_json(spec.model_dump_json()).own_loss == StepLoss()
