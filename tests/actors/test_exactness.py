"""The gradient of a mini-batch is that of one process, row by row, whatever the ranks, layout and micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raysvc.actors.worker.losses import PolicyLoss, SftLoss, ValueLoss
from raysvc.actors.worker.row_losses import SequencePolicyLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker

from . import reference
from .ranks import DoubleWorker, Ranks, gradients_of, tiny_spec
from .reference import distance, reference_gradient
from .shards import minis_of, random_rows, some_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# float64 models; loss weights and columns travel as float32
EXACT = 3e-7
POLICY = PolicyLoss(clip_low=0.2, clip_high=0.3, dual_clip=1.5, kl_coef=0.1, entropy_coef=0.05)
LOSSES = [SftLoss(), POLICY]
FORMULAS = [reference.sft, reference.policy(0.2, 0.3, 0.1, 0.05, dual=1.5)]
COLUMNS = ("advantages", "old_logprobs", "ref_logprobs", "returns", "old_values")
UIDS = ["a", "a", "a", "b", "b", "c", "d"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "padded_right", "micro_batch_size": 2},
    "left": {"layout": "padded_left", "micro_batch_size": 1},
    "tokens": {"layout": "padded_right", "micro_batch_tokens": 40},
    "packed": {"layout": "packed", "micro_batch_tokens": 30, "align": 4},
}


def plan_of(name: str) -> dict[str, Any]:
    return {"batch_size": 7, "shuffle": "none", "oversize": "alone", **LAYOUTS[name]}


def model_of(role: str = "policy") -> Any:
    """The model that every worker starts from."""
    torch.manual_seed(0)
    worker = CausalLMWorker(0, 1, "cpu", tiny_spec(role=role).model_dump_json())
    return worker.load_lm().double().eval()  # its classifier has a dropout that workers leave out


@pytest.mark.parametrize(
    ("dp_size", "strategy", "again"),
    [(1, "ddp", False), (2, "ddp", False), (3, "ddp", False), (2, "fsdp", False), (3, "fsdp", False), (2, "ddp", True), (2, "fsdp", True)],
)  # one rank shards nothing  # fmt: skip
def test_gradients_equal_those_of_one_process_row_by_row(
    ranks: Ranks, dp_size: int, strategy: str, again: bool
) -> None:
    rows = random_rows(7, seed=3)
    expected = [
        reference_gradient(model_of(), rows, formula, "logits", list(range(7)), "token_mean")
        for formula in FORMULAS
    ]
    for layout in LAYOUTS:
        ((_, shards, info),) = minis_of(rows, plan_of(layout), dp_size, columns=COLUMNS)
        spec = tiny_spec(strategy=strategy, gradient_checkpointing=again)
        results = ranks.run(spec, gradients_of, [([shard], LOSSES) for shard in shards])
        for number, (grads, loss) in enumerate(expected):
            assert sum(rank[number][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6), layout
            for rank in results:
                assert distance(rank[number][0], grads) < EXACT, (layout, number)
        assert info.num_dummies == int(sum((shard.row_ids < 0).sum() for shard in shards))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_gradients_of_one_worker_are_the_same_on_any_device(device: str) -> None:
    rows = random_rows(7, seed=3)
    worker = DoubleWorker(0, 1, device, tiny_spec().model_dump_json())
    worker.setup("")
    for layout in LAYOUTS:
        ((_, (shard,), _),) = minis_of(rows, plan_of(layout), 1, columns=COLUMNS)
        for number, (grads, metrics) in enumerate(gradients_of(worker, [shard], LOSSES)):
            expected, loss = reference_gradient(
                model_of(), rows, FORMULAS[number], "logits", list(range(7)), "token_mean"
            )
            assert metrics["loss"] == pytest.approx(loss, rel=1e-6), layout
            assert distance(grads, expected) < EXACT, layout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_of_dummies_changes_nothing(ranks: Ranks, strategy: str) -> None:
    rows = random_rows(2, seed=5)
    for layout in ("rows", "packed"):
        plan = {**plan_of(layout), "batch_size": 2}
        ((_, shards, _),) = minis_of(rows, plan, 3, columns=COLUMNS)
        assert (shards[2].row_ids == -1).all()
        results = ranks.run(
            tiny_spec(strategy=strategy), gradients_of, [([shard], LOSSES) for shard in shards]
        )
        for number, formula in enumerate(FORMULAS):
            grads, loss = reference_gradient(model_of(), rows, formula, "logits", [0, 1], "token_mean")
            assert sum(rank[number][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6)
            assert all(value == 0 for value in results[2][number][1].values())
            assert distance(results[0][number][0], grads) < EXACT


@pytest.mark.parametrize("reduction", ["sequence_mean", "group_mean", "prompt_mean", "constant"])
def test_means_over_rows_and_groups_are_exact_too(ranks: Ranks, reduction: str) -> None:
    rows = random_rows(7, seed=8)
    groups = [UIDS.index(uid) for uid in UIDS]
    plan = {**plan_of("rows"), "batch_size": 4}
    ((_, shards, _),) = minis_of(rows, plan, 3, uids=UIDS, columns=COLUMNS)
    spec = tiny_spec(loss=reduction, loss_constant=9.0 if reduction == "constant" else None)
    results = ranks.run(spec, gradients_of, [([shard], LOSSES) for shard in shards])
    for number, formula in enumerate(FORMULAS):
        grads, loss = reference_gradient(model_of(), rows, formula, "logits", groups, reduction)
        assert sum(rank[number][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6)
        assert distance(results[1][number][0], grads) < EXACT


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_one_ratio_a_row_is_exact_too(ranks: Ranks, layout: str) -> None:
    rows = random_rows(7, seed=6)
    ((_, shards, _),) = minis_of(rows, plan_of(layout), 2, columns=COLUMNS)
    loss = SequencePolicyLoss(clip_low=0.05, clip_high=0.1)
    results = ranks.run(tiny_spec(), gradients_of, [([shard], [loss]) for shard in shards])
    formula = reference.sequence_policy(0.05, 0.1)
    grads, expected = reference_gradient(model_of(), rows, formula, "logits", list(range(7)), "sequence_mean")
    assert sum(rank[0][1]["loss"] for rank in results) == pytest.approx(expected, rel=1e-6)
    assert distance(results[0][0][0], grads) < EXACT


def test_a_critic_is_exact_on_two_ranks(ranks: Ranks) -> None:
    rows = random_rows(7, seed=9)
    ((_, shards, _),) = minis_of(rows, plan_of("packed"), 2, columns=COLUMNS)
    results = ranks.run(
        tiny_spec(role="critic"), gradients_of, [([shard], [ValueLoss(clip=0.2)]) for shard in shards]
    )
    grads, loss = reference_gradient(
        model_of("critic"), rows, reference.value(0.2), "values", list(range(7)), "token_mean"
    )
    assert sum(rank[0][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6)
    assert distance(results[0][0][0], grads) < EXACT


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_critic_whose_head_sees_no_target_on_one_rank_does_not_hang(ranks: Ranks, strategy: str) -> None:
    rows = random_rows(2, seed=5)
    ((_, shards, _),) = minis_of(rows, {**plan_of("rows"), "batch_size": 2}, 3, columns=COLUMNS)
    assert (shards[2].arrays["labels"] == -100).all()
    results = ranks.run(
        tiny_spec(role="critic", strategy=strategy),
        gradients_of,
        [([shard], [ValueLoss(clip=0.2)]) for shard in shards],
    )
    grads, _ = reference_gradient(
        model_of("critic"), rows, reference.value(0.2), "values", [0, 1], "token_mean"
    )
    assert distance(results[2][0][0], grads) < EXACT


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_mini_batches_may_be_added_up_with_weights_of_their_own(ranks: Ranks, strategy: str) -> None:
    rows = random_rows(7, seed=4)
    plan = {**plan_of("rows"), "mini_batch_size": 4}
    minis = minis_of(rows, plan, 2, columns=COLUMNS)
    shards = [[mini[1][rank] for mini in minis] for rank in range(2)]
    results = ranks.run(
        tiny_spec(strategy=strategy), gradients_of, [(mine, [SftLoss()], (0.25, 0.75)) for mine in shards]
    )
    expected: dict[str, np.ndarray] = {}
    for weight, (mini, _, _) in zip((0.25, 0.75), minis, strict=True):
        part = some_rows(rows, mini.row_ids)
        grads, _ = reference_gradient(
            model_of(), part, reference.sft, "logits", list(range(len(mini.row_ids))), "token_mean"
        )
        expected = {name: expected.get(name, 0.0) + weight * grad for name, grad in grads.items()}
    assert distance(results[0][0][0], expected) < EXACT


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bfloat16_rounds_like_bfloat16_and_no_weight_is_rounded_with_it(ranks: Ranks, strategy: str) -> None:
    rows = random_rows(7, seed=3)
    apart: dict[int, list[float]] = {0: [], 1: []}
    for dp_size, layout in ((1, "rows"), (2, "rows"), (3, "tokens"), (2, "packed"), (3, "packed")):
        ((_, shards, _),) = minis_of(rows, plan_of(layout), dp_size, columns=COLUMNS)
        spec = tiny_spec(strategy=strategy, precision="bf16")
        results = ranks.run(spec, gradients_of, [([shard], LOSSES) for shard in shards])
        for number, formula in enumerate(FORMULAS):
            grads, loss = reference_gradient(
                model_of(), rows, formula, "logits", list(range(7)), "token_mean"
            )
            # bfloat16 has 8 bits: 0.4 % a number, and the mean over targets less than that
            total = sum(rank[number][1]["loss"] for rank in results)
            assert total == pytest.approx(loss, rel=2e-3, abs=5e-4)  # the policy's terms have both signs
            apart[number].append(distance(results[0][number][0], grads))
    for seen in apart.values():
        assert max(seen) < 0.03
        # no way to split the mini-batch adds to what bfloat16 itself rounds
        assert max(seen) < 2 * min(seen)


def outputs_and_loss(worker: Any, shard: Any) -> tuple[Any, float]:
    """Log-probabilities of a shard, and its share of the loss, by the same weights."""
    worker.stage((0, 0), shard)
    outputs = worker.forward((0, 0))
    worker.stage((0, 1), shard)
    return outputs, worker.forward_backward((0, 1), SftLoss())["loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_loss_in_bfloat16_is_the_mean_of_its_own_log_probabilities_in_float32(
    ranks: Ranks, strategy: str
) -> None:
    rows = random_rows(7, seed=3)
    for dp_size, layout in ((1, "rows"), (2, "packed"), (3, "rows")):
        ((_, shards, _),) = minis_of(rows, plan_of(layout), dp_size)
        spec = tiny_spec(strategy=strategy, precision="bf16", loss="sequence_mean")
        results = ranks.run(spec, outputs_and_loss, [(shard,) for shard in shards])
        means = []
        for outputs, _ in results:
            for row, length in enumerate(outputs.lengths.tolist()):
                logprobs = outputs.row(row, "logprobs").astype(np.float64)
                assert np.count_nonzero(logprobs) < length
                means.append(-logprobs.sum() / max(1, np.count_nonzero(logprobs)))
        # a seventh is no bfloat16: a weight or a loss that was rounded to one on the way is seen
        assert sum(loss for _, loss in results) == pytest.approx(np.mean(means), rel=1e-6), (dp_size, layout)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_of_dummies_changes_nothing_in_bfloat16_either(ranks: Ranks, strategy: str) -> None:
    rows = random_rows(2, seed=5)
    spec = tiny_spec(strategy=strategy, precision="bf16")
    found = []
    for dp_size in (1, 3):
        ((_, shards, _),) = minis_of(rows, {**plan_of("rows"), "batch_size": 2}, dp_size, columns=COLUMNS)
        found.append(ranks.run(spec, gradients_of, [([shard], LOSSES) for shard in shards]))
    (alone,), three = found
    for number in range(len(LOSSES)):
        assert all(value == 0 for value in three[2][number][1].values())
        grads, metrics = alone[number]
        assert sum(rank[number][1]["loss"] for rank in three) == pytest.approx(
            metrics["loss"], rel=2e-3, abs=5e-4
        )
        assert distance(three[0][number][0], grads) < 0.03
