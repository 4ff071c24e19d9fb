"""The loss of every row, as the shipped worker reports it beside a step, against one forward a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raysvc.actors.staging.staging import StagingOptions
from raysvc.actors.worker.losses import StepLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker
from raysvc.collate.row_values import RowValues
from raysvc.row_batch import RowBatch

from . import pair_reference, test_pair_losses, test_step_loss
from .ranks import tiny_spec
from .shards import minis_of, random_rows

PLANS = {
    "padded_right": {"micro_batch_size": 2},
    "padded_left": {"layout": "padded_left", "micro_batch_size": 3},
    "packed": {"layout": "packed", "micro_batch_tokens": 32},
    "packed and aligned": {"layout": "packed", "micro_batch_tokens": 48, "align": 8},
}


def plain(rows: RowBatch) -> dict[int, tuple[float, int]]:
    """Row -> nats and number of its targets: one row a forward, nothing of the project's maths."""
    worker = CausalLMWorker(0, 1, "cpu", tiny_spec().model_dump_json())
    torch.manual_seed(0)
    lm = worker.load_lm()
    found = {}
    for row in range(len(rows.lengths)):
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        mask = torch.tensor(rows.tokens["loss_mask"][here].astype(bool))[1:]
        with torch.no_grad():
            logits = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        found[row] = (float(losses[mask].sum()), int(mask.sum()))
    return found


def trained(rows: RowBatch, plan: dict[str, Any], rank_of: int = 1) -> list[tuple[RowValues, float, int]]:
    """What each mini-batch of the first step says of its rows, its loss and its targets; weights stay as they are."""
    spec = tiny_spec(learning_rate=1e-30, staging=StagingOptions(ring_bytes=1 << 24))
    out = []
    for number, (_, shards, info) in enumerate(minis_of(rows, {"shuffle": "none", **plan}, rank_of)):
        for rank, shard in enumerate(shards):
            worker = CausalLMWorker(0, 1, "cpu", spec.model_dump_json())
            worker.setup("")
            worker.stage((0, number), shard)
            (result,) = worker.train_step([(0, number)])
            assert result.rows is not None, rank
            out.append((result.rows, result.loss, info.denominators.tokens))
    return out


@pytest.mark.parametrize("name", PLANS)
def test_the_losses_of_rows_are_those_of_one_forward_a_row(name: str) -> None:
    rows = random_rows(10, seed=2)
    rows.tokens["loss_mask"][int(rows.offsets[3]) : int(rows.offsets[4])] = 0  # a row without a target
    expected = plain(rows)
    found: dict[int, tuple[float, int]] = {}
    for values, loss, tokens in trained(rows, {"batch_size": 10, "mini_batch_size": 5, **PLANS[name]}):
        assert loss == pytest.approx(values.rows["loss"].sum() / tokens, rel=1e-5)
        for row, nll, targets in zip(
            values.row_ids, values.rows["loss"], values.rows["targets"], strict=True
        ):
            found[int(row)] = (float(nll), int(targets))
    assert sorted(found) == list(range(10))
    for row, (nll, targets) in expected.items():
        assert found[row] == (pytest.approx(nll, rel=1e-4, abs=1e-5), targets), row


def test_dummies_are_among_no_rows() -> None:
    rows = random_rows(5, seed=4)
    seen = trained(rows, {"batch_size": 5, "micro_batch_size": 2}, rank_of=2)
    assert sorted(int(row) for values, _, _ in seen for row in values.row_ids) == list(range(5))


def test_a_mini_batch_without_a_target_says_so_of_its_rows() -> None:
    rows = random_rows(4, seed=5)
    rows.tokens["loss_mask"][:] = 0
    ((values, loss, _),) = trained(rows, {"batch_size": 4, "micro_batch_size": 2})
    assert (loss, values.rows["loss"].tolist(), values.rows["targets"].tolist()) == (0.0, [0.0] * 4, [0] * 4)


def own_losses(
    rows: RowBatch, loss: Any, shards: Any, role: str
) -> tuple[dict[int, tuple[float, int]], float]:
    """Row -> loss and count, and the loss of the mini-batch, of workers whose own loss it is."""
    spec = tiny_spec(
        learning_rate=1e-30, staging=StagingOptions(ring_bytes=1 << 24), own_loss=loss, role=role
    )
    found, total = {}, 0.0
    for shard in shards:
        worker = CausalLMWorker(0, 1, "cpu", spec.model_dump_json())
        worker.setup("")
        worker.stage((0, 0), shard)
        (result,) = worker.train_step([(0, 0)])
        assert result.rows is not None
        total += result.loss
        for row, each, count in zip(
            result.rows.row_ids.tolist(),
            result.rows.rows["loss"].tolist(),
            result.rows.rows["targets"].tolist(),
            strict=True,
        ):
            found[row] = (each, count)
    assert sorted(found) == list(range(len(rows)))
    return found, total


@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("number", range(len(test_pair_losses.LOSSES) - 1))
def test_a_pair_has_its_loss_at_its_first_row(number: int, layout: str) -> None:
    rows = test_pair_losses.pairs()
    loss, formula = test_pair_losses.LOSSES[number]
    shards = test_pair_losses.shards_of(rows, layout, 2)
    found, total = own_losses(rows, loss, shards, "policy")
    with torch.no_grad():
        lm = test_pair_losses.model_of().float()
        expected = formula(pair_reference.scores(lm, rows), rows).tolist()
    assert [found[2 * pair] for pair in range(5)] == [(pytest.approx(one, rel=1e-4), 1) for one in expected]
    assert [found[2 * pair + 1] for pair in range(5)] == [(0.0, 0)] * 5
    assert total == pytest.approx(sum(loss for loss, _ in found.values()) / 5, rel=1e-5)


@pytest.mark.parametrize("layout", ["rows", "left", "packed"])
def test_a_row_of_steps_has_the_losses_of_its_steps(layout: str) -> None:
    rows = test_step_loss.solutions()
    found, total = own_losses(rows, StepLoss(), test_step_loss.shards_of(rows, layout, 2), "critic")
    sums = [found[row] for row in range(len(rows))]
    counts = np.add.reduceat(rows.tokens["loss_mask"].astype(int), rows.offsets[:-1]).tolist()
    assert [count for _, count in sums] == counts
    assert sums[4] == (0.0, 0)
    assert total == pytest.approx(sum(loss for loss, _ in sums) / sum(counts), rel=1e-5)
    assert total == pytest.approx(test_step_loss.expected_of(rows)[1], rel=1e-4)
