"""Losses of pairs and labels: the gradient is that of one process, row by row; the values are TRL's."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from raysvc.actors.worker.row_losses import KtoLoss, LossRows, PairLoss, RewardLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker
from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.job.config import PlanConfig
from raysvc.plan.groups import Groups
from raysvc.plan.plan import Plan
from raysvc.plan.plan_rows import HeldRows
from raysvc.row_batch import RowBatch

from . import pair_reference
from .ranks import DoubleWorker, Ranks, gradients_of, tiny_spec
from .reference import distance
from .shards import COLUMNS, random_rows, some_rows

EXACT = 3e-7  # float64 models; weights and columns travel as float32
BETA = 0.3
LOSSES: list[tuple[Any, Any]] = [
    (PairLoss("sigmoid", BETA), pair_reference.sigmoid(BETA)),
    (PairLoss("ipo", BETA), pair_reference.ipo(BETA)),
    (PairLoss("simpo", 2.0, margin=0.5), pair_reference.simpo(2.0, 0.5)),
    (PairLoss("orpo", BETA), pair_reference.orpo(BETA)),
    (KtoLoss(BETA, 1.0, 0.7), pair_reference.kto(BETA, 1.0, 0.7)),
]
PLANS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "padded_right", "micro_batch_size": 4},
    "left": {"layout": "padded_left", "micro_batch_size": 2},
    "tokens": {"layout": "padded_right", "micro_batch_tokens": 60},
    "packed": {"layout": "packed", "micro_batch_tokens": 48, "align": 4},
}


def pairs(num_pairs: int = 5, seed: int = 3) -> RowBatch:
    rows = random_rows(2 * num_pairs, seed=seed)
    rows.tokens["loss_mask"][rows.offsets[1:] - 1] = 1  # every row has a target
    rows.tokens["loss_mask"][rows.offsets[2] : rows.offsets[3] - 1] = 0  # one has no other
    rows.tokens["ref_logprobs"][:] -= 0.5  # so that the mean that KTO subtracts is above 0
    rng = np.random.default_rng(seed)
    margin = np.repeat(rng.random(num_pairs), 2).astype(np.float32)
    label = np.repeat(np.arange(num_pairs) % 2, 2).astype(np.uint8)
    return RowBatch(rows.row_ids, rows.offsets, rows.tokens, {"margin": margin, "label": label})


def shards_of(rows: RowBatch, layout: str, dp_size: int, batch: int | None = None, step: int = 0) -> Any:
    config = PlanConfig(batch_size=batch or len(rows) // 2, shuffle="none", tail="pad", **PLANS[layout])
    groups = Groups.of_runs(np.arange(0, len(rows) + 1, 2, dtype=np.int64), are_pairs=True)
    plan = Plan(config, HeldRows(rows.lengths.astype(np.int32), groups))
    [mini] = plan.step(step, dp_size).mini_batches
    taken = some_rows(rows, mini.row_ids)
    taken = RowBatch(
        taken.row_ids, taken.offsets, taken.tokens, {n: v[mini.row_ids] for n, v in rows.rows.items()}
    )
    return collate_mini_batch(
        taken, mini, CollateSpec(step=0, mini_index=0, layout=config.layout, pad_token_id=1, align=config.align,
        columns=[*COLUMNS, "ref_logprobs", "margin", "label"])
    )  # fmt: skip


def model_of(role: str = "policy") -> Any:
    torch.manual_seed(0)
    return CausalLMWorker(0, 1, "cpu", tiny_spec(role=role).model_dump_json()).load_lm().double().eval()


def check(results: list[Any], expected: list[tuple[dict[str, np.ndarray], float]], what: str) -> None:
    for number, (grads, loss) in enumerate(expected):
        total = sum(rank[number][1]["loss"] for rank in results)
        assert total == pytest.approx(loss, rel=1e-6), (what, number)
        for rank in results:
            assert distance(rank[number][0], grads) < EXACT, (what, number)


@functools.cache
def expected() -> list[tuple[dict[str, np.ndarray], float]]:
    """Gradient and loss of `pairs()` by each formula."""
    rows, out = pairs(), []
    for _, formula in LOSSES:
        lm = model_of()
        out.append(pair_reference.gradient(lm, formula(pair_reference.scores(lm, rows), rows)))
    return out


@functools.cache
def expected_rewards() -> list[tuple[dict[str, np.ndarray], float]]:
    critic = model_of("critic")
    return [pair_reference.gradient(critic, pair_reference.reward(critic, pairs(), 0.1))]


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each == "packed" else pytest.mark.slow) for each in PLANS]
)
def test_the_gradient_of_one_worker_is_that_of_the_formula(layout: str) -> None:
    rows = pairs()
    worker = DoubleWorker(0, 1, "cpu", tiny_spec().model_dump_json())
    worker.setup("")
    found = gradients_of(worker, list(shards_of(rows, layout, 1)), [loss for loss, _ in LOSSES])
    check([found], expected(), layout)


@pytest.mark.parametrize("layout", PLANS)
def test_a_reward_model_looks_at_the_last_token_of_each_row(layout: str) -> None:
    rows = pairs()
    worker = DoubleWorker(0, 1, "cpu", tiny_spec(role="critic").model_dump_json())
    worker.setup("")
    found = gradients_of(worker, list(shards_of(rows, layout, 1)), [RewardLoss(margins=True, center=0.1)])
    check([found], expected_rewards(), layout)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("dp_size", [2, 3])
def test_ranks_and_layouts_change_no_gradient(ranks: Ranks, dp_size: int, strategy: Any) -> None:
    rows = pairs()
    for layout in PLANS if strategy == "ddp" else ("tokens", "packed"):
        shards = shards_of(rows, layout, dp_size)
        found = ranks.run(
            tiny_spec(strategy=strategy),
            gradients_of,
            [([one], [loss for loss, _ in LOSSES]) for one in shards],
        )
        check(found, expected(), f"{layout} on {dp_size}, {strategy}")
        critic = RewardLoss(margins=True, center=0.1)
        spec = tiny_spec(role="critic", strategy=strategy)
        found = ranks.run(spec, gradients_of, [([one], [critic]) for one in shards])
        check(found, expected_rewards(), f"rewards, {layout} on {dp_size}, {strategy}")


def some(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of log-probabilities of a model and of its reference, and numbers of targets, of four pairs."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(2, 9, (8,), generator=generator).double()
    own, ref = (-counts * torch.rand(8, generator=generator).double() for _ in range(2))
    return own, ref, counts


def ours(loss: Any, **columns: torch.Tensor) -> float:
    own, ref, counts = some()
    weights = torch.full((8,), 0.25, dtype=torch.float64)
    shared = {name: columns.pop(name) for name in ("mismatched_kl",) if name in columns}
    rows = LossRows(weights, counts, {"ref_logprobs": ref, **columns}, own, shared=shared)
    return float(loss.of_rows(rows).total)


def trl_dpo(loss_type: str) -> float:
    """The loss of TRL's own DPOTrainer, given log-probabilities per token."""
    dpo = pytest.importorskip("trl").DPOTrainer
    own, ref, counts = some()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    own, ref, counts = own[order], ref[order], counts[order].long()
    width = int(counts.max())
    mask = torch.zeros(8, width + 1, dtype=torch.long)
    logprobs = torch.zeros(8, width, dtype=torch.float64)
    for row, count in enumerate(counts.tolist()):
        mask[row, 1 : count + 1] = 1
        logprobs[row, :count] = own[row] / count
    zeros = torch.zeros_like(logprobs)
    out = SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = MagicMock(
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
        loss_types=[loss_type], loss_weights=[1.0], beta=BETA, use_weighting=False, _tp_size=1,
        _total_train_tokens=0,
    )  # fmt: skip
    trainer.accelerator.gather_for_metrics = trainer.accelerator.gather = lambda values: values
    trainer.accelerator.device = "cpu"
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask,
              "ref_chosen_logps": ref[:4], "ref_rejected_logps": ref[4:]}  # fmt: skip
    return float(dpo._compute_loss(trainer, lambda **_: out, inputs, False))


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_is_that_of_trl(kind: Any) -> None:
    assert ours(PairLoss(kind, BETA)) == pytest.approx(trl_dpo(kind), rel=1e-9)


def test_simpo_and_the_odds_of_orpo_are_those_of_trl() -> None:
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    own, _, counts = some()
    means = own / counts
    fake = MagicMock(alpha=0.0, loss_type="simpo", beta=BETA, simpo_gamma=0.5, label_smoothing=0.0)
    fake.accelerator.device = "cpu"
    losses = CPOTrainer.cpo_loss(fake, means[0::2], means[1::2])[0]
    assert ours(PairLoss("simpo", BETA, margin=0.5)) == pytest.approx(float(losses.mean()), rel=1e-9)
    ratio = ORPOTrainer.odds_ratio_loss(fake, means[0::2], means[1::2])[0]
    assert ours(PairLoss("orpo", BETA)) == pytest.approx(float((-means[0::2] - ratio).mean()), rel=1e-6)
