"""What losses of pairs, labels and rewards say of themselves: TRL's own functions on the same rows, and float64 by hand."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from raysvc.actors.worker.results import DESIRABLE, reduce_metrics, step_metrics
from raysvc.actors.worker.row_losses import KtoLoss, LossRows, PairLoss, RewardLoss
from raysvc.collate.shard import Shard
from raysvc.job.objectives.eval_metrics import METRICS
from raysvc.row_batch import RowBatch
from raysvc.training.evaluation import EvalMeans

from . import pair_reference
from .ranks import DoubleWorker, Ranks, gradients_of, tiny_spec
from .test_pair_losses import BETA, LOSSES, PLANS, model_of, pairs, shards_of, some

if TYPE_CHECKING:
    from raysvc.client.steps import MiniBatch

PAIRS = 4
INTERNAL = {"row_loss", "row_count", "loss"}
Told = dict[str, float]


def ours(loss: Any, rows: LossRows) -> Told:
    found = loss.of_rows(rows).metrics
    return {name: float(value) for name, value in found.items() if name not in INTERNAL}


def of_pairs(loss: Any) -> Told:
    own, ref, counts = some()
    weights = torch.full((2 * PAIRS,), 1 / PAIRS, dtype=torch.float64)
    return ours(loss, LossRows(weights, counts, {"ref_logprobs": ref}, own))


def agree(found: Told, theirs: Told, *names: str) -> None:
    """All that we say is what TRL says; of names that it does not have (`names`) nothing is known."""
    assert set(found) - set(names) <= set(theirs)
    assert {"rewards/chosen", "rewards/rejected"} <= set(found)
    for name in set(found) - set(names):
        assert found[name] == pytest.approx(theirs[name], rel=2e-6, abs=1e-12), name


def fake(**fields: Any) -> Any:
    """A trainer of TRL in one process, with nothing but what its loss looks at."""
    trainer = MagicMock(
        aux_loss_enabled=False, precompute_ref_logps=True, beta=BETA, _tp_size=1, _total_train_tokens=0
    )
    trainer.configure_mock(**fields)
    trainer.accelerator.gather_for_metrics = trainer.accelerator.gather = lambda values: values
    trainer.accelerator.device = "cpu"
    trainer.model.training = True
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


def said(trainer: Any) -> Told:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def per_token(own: torch.Tensor, counts: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What a model of TRL gives for rows with these sums, and the mask of their targets."""
    width = int(counts.max())
    mask = torch.zeros(len(own), width + 1, dtype=torch.long)
    logprobs = torch.zeros(len(own), width, dtype=torch.float64)
    for row, count in enumerate(counts.long().tolist()):
        mask[row, 1 : count + 1] = 1
        logprobs[row, :count] = own[row] / count
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()), mask


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_and_ipo_say_what_trl_says(kind: Any) -> None:
    dpo = pytest.importorskip("trl").DPOTrainer
    own, ref, counts = (torch.cat([values[0::2], values[1::2]]) for values in some())
    out, mask = per_token(own, counts)
    trainer = fake(
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        use_weighting=False,
    )
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask,
              "ref_chosen_logps": ref[:PAIRS], "ref_rejected_logps": ref[PAIRS:]}  # fmt: skip
    dpo._compute_loss(trainer, lambda **_: out, inputs, False)
    agree(of_pairs(PairLoss(kind, BETA)), said(trainer))


@pytest.mark.parametrize(
    ("kind", "module", "name"), [("simpo", "cpo", "CPOTrainer"), ("orpo", "orpo", "ORPOTrainer")]
)
def test_simpo_and_orpo_say_what_trl_says(kind: Any, module: str, name: str) -> None:
    pytest.importorskip("trl")
    their = getattr(pytest.importorskip(f"trl.experimental.{module}"), name)
    own, _, counts = some()
    means, zeros = own / counts, torch.zeros(PAIRS, 1, 1, dtype=torch.float64)
    trainer = fake(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, label_smoothing=0.0, cpo_alpha=0.0)
    forward = (means[0::2], means[1::2], zeros, zeros, torch.tensor(0.0))
    trainer.concatenated_forward = lambda model, batch: forward
    for loss in ("cpo_loss", "odds_ratio_loss"):
        if hasattr(their, loss):
            setattr(trainer, loss, getattr(their, loss).__get__(trainer))
    _, theirs = their.get_batch_loss_metrics(trainer, None, {})
    found = of_pairs(PairLoss(kind, BETA, margin=0.5))
    agree(found, theirs)
    assert ("log_odds_chosen" in found) == (kind == "orpo")


@pytest.mark.parametrize("labels", [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_kto_says_what_trl_says(labels: list[int]) -> None:
    kto = pytest.importorskip("trl").KTOTrainer
    own, ref, counts = some()
    real, other = slice(0, None, 2), slice(1, None, 2)  # each row beside its mismatched one
    out, mask = per_token(own[real], counts[real])
    good = torch.tensor(labels)
    trainer = fake(calculate_KL=True, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0)
    trainer._compute_kl_logps = lambda model, batch: own[other]
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": good.bool(),
              "ref_logps": ref[real], "ref_KL_logps": ref[other]}  # fmt: skip
    kto._compute_loss(trainer, lambda **_: out, inputs, False)
    weights = torch.full((2 * PAIRS,), 1 / PAIRS, dtype=torch.float64)
    kl = (own - ref)[other].mean().clamp(min=0)
    shared = {"mismatched_kl": kl, "desirable_share": good.double().mean()}
    columns = {"ref_logprobs": ref, "label": good.repeat_interleave(2)}
    found = ours(KtoLoss(BETA), LossRows(weights, counts, columns, own, shared=shared))
    theirs = said(trainer)
    names = {f"{what}/{kind}" for what in ("rewards", "logps") for kind in ("chosen", "rejected")}
    names |= {"rewards/margins", "kl"}
    assert names & set(found) == names & set(theirs), "what there is none of is absent"
    for name in names & set(theirs):
        assert found[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name


def test_a_reward_model_says_what_trl_says() -> None:
    trainer_of = pytest.importorskip("trl").RewardTrainer
    values = torch.randn(2 * PAIRS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = fake(args=SimpleNamespace(center_rewards_coefficient=None))
    logits = torch.cat([values[0::2], values[1::2]])[:, None]
    trainer_of.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), {"attention_mask": logits})
    # two dummies more: they are in no figure
    weights = torch.cat([torch.full((2 * PAIRS,), 1 / PAIRS), torch.zeros(2)]).double()
    rows = LossRows(weights, torch.ones(10), {}, values=torch.cat([values, torch.tensor([99.0, -99.0])]))
    agree(ours(RewardLoss(), rows), said(trainer), "rewards/chosen", "rewards/rejected")
    found = ours(RewardLoss(), rows)
    assert found["rewards/chosen"] == pytest.approx(float(values[0::2].mean()))
    assert found["rewards/rejected"] == pytest.approx(float(values[1::2].mean()))


def by_hand(loss: Any, rows: RowBatch) -> Told:
    """Of the rows of `pairs()`, one at a time, in float64."""
    found = pair_reference.scores(model_of(), rows)
    own, ref, counts = (
        np.array([float(torch.as_tensor(row[part]).detach()) for row in found]) for part in range(3)
    )
    has_reference = "ref_logprobs" in loss.columns
    logps = own if has_reference else own / counts
    rewards = loss.beta * (own - ref if has_reference else own / counts)
    if isinstance(loss, KtoLoss):
        good = rows.rows["label"][0::2] > 0
        chosen, rejected = np.flatnonzero(good) * 2, np.flatnonzero(~good) * 2
        kl = max(float((own - ref)[1::2].mean()), 0.0)
        gains = np.where(good, 1, -1) * ((own - ref)[0::2] - kl)
        more = {"kl": kl, "rewards/accuracies": float((gains > 0).mean())}
    else:
        chosen, rejected = np.arange(0, len(rows), 2), np.arange(1, len(rows), 2)
        more = {"rewards/accuracies": float((rewards[chosen] > rewards[rejected]).mean())}
    return {
        "rewards/chosen": rewards[chosen].mean(),
        "rewards/rejected": rewards[rejected].mean(),
        "rewards/margins": rewards[chosen].mean() - rewards[rejected].mean(),
        "logps/chosen": logps[chosen].mean(),
        "logps/rejected": logps[rejected].mean(),
        **more,
    }


def rewards_by_hand(rows: RowBatch) -> Told:
    critic, values = model_of("critic"), []
    for row in range(len(rows)):
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        values.append(critic(input_ids=ids[None], use_cache=False).logits[0, -1, 0].item())
    chosen, rejected = np.array(values[0::2]), np.array(values[1::2])
    return {
        "accuracy": float((chosen > rejected).mean()),
        "margin": float((chosen - rejected).mean()),
        "mean_reward": float(np.mean(values)),
        "min_reward": min(values),
        "max_reward": max(values),
    }


def check(found: list[Any], number: int, expected: Told, what: str) -> None:
    told = reduce_metrics([rank[number][1] for rank in found])
    for name, value in expected.items():
        assert told[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (what, name)


def check_all(found: list[Any], what: str) -> None:
    for number, (loss, _) in enumerate(LOSSES):
        check(found, number, by_hand(loss, pairs()), f"{loss} {what}")


@pytest.mark.parametrize("layout", PLANS)
def test_micro_batches_change_no_metric(layout: str) -> None:
    worker = DoubleWorker(0, 1, "cpu", tiny_spec().model_dump_json())
    worker.setup("")
    check_all(
        [gradients_of(worker, list(shards_of(pairs(), layout, 1)), [loss for loss, _ in LOSSES])], layout
    )
    critic = DoubleWorker(0, 1, "cpu", tiny_spec(role="critic").model_dump_json())
    critic.setup("")
    found = gradients_of(critic, list(shards_of(pairs(), layout, 1)), [RewardLoss(margins=True)])
    check([found], 0, rewards_by_hand(pairs()), layout)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_change_no_metric(ranks: Ranks, strategy: Any) -> None:
    shards = shards_of(pairs(), "packed", 3)  # five pairs: a rank has a dummy or two
    losses = [loss for loss, _ in LOSSES]
    check_all(
        ranks.run(tiny_spec(strategy=strategy), gradients_of, [([one], losses) for one in shards]), strategy
    )
    spec = tiny_spec(role="critic", strategy=strategy)
    found = ranks.run(spec, gradients_of, [([one], [RewardLoss(margins=True)]) for one in shards])
    check(found, 0, rewards_by_hand(pairs()), strategy)


def test_a_step_of_several_mini_batches_weighs_them_by_their_pairs() -> None:
    minis = [
        {"rewards/chosen": 1.0, "max_reward": 3.0, "min_reward": -1.0, "lr": 0.1},
        {"rewards/chosen": 4.0, "rewards/rejected": 2.0, "max_reward": 2.0, "min_reward": -5.0, "lr": 0.2},
    ]
    expected = {"rewards/chosen": 2.0, "max_reward": 3.0, "min_reward": -5.0, "rewards/rejected": 2.0}
    assert step_metrics(minis, [4, 2]) == pytest.approx(expected)


BATCHES = 3  # of 2, 2 and 1 pair


def evaluated(worker: Any, shards: list[Shard]) -> list[Told]:
    """What a worker says of each mini-batch, each weighed by its pairs."""
    found = []
    for step, shard in enumerate(shards):
        worker.stage((-1, step), shard, loss_weight=float(shard.denominators.groups))
        found.append(worker.evaluate_loss((-1, step)))
    assert all(each.grad is None for each in worker.model.parameters())
    assert worker.model.training
    return found


def check_evals(ranks_told: list[list[Told]], shards: list[Any], loss: Any, what: str) -> None:
    """Over all batches it is what a process says that looks at each row by itself."""
    means = EvalMeans("group_mean", "pairs")
    for step, told in enumerate(zip(*ranks_told, strict=True)):
        info = SimpleNamespace(denominators=shards[step][0].denominators)
        means = means.plus(reduce_metrics(told), cast("MiniBatch", SimpleNamespace(info=info)))
    rows, said = pairs(), means.to_json()
    formula = {type_of(each): formula for each, formula in LOSSES}.get(type_of(loss))
    if formula is None:
        expected, losses = rewards_by_hand(rows), pair_reference.reward(model_of("critic"), rows, 0.0)
    else:
        expected, losses = by_hand(loss, rows), formula(pair_reference.scores(model_of(), rows), rows)
    expected["loss"] = float(losses.mean().detach())
    for name, value in expected.items():
        assert said[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (what, name)
    assert (said["pairs"], said["rows"]) == (5, 10)
    exact = said.get("rewards/accuracies", said.get("accuracy"))
    assert exact * 5 == pytest.approx(round(exact * 5), abs=1e-11), "equal shares are equal"
    objective = {"sigmoid": "dpo", RewardLoss: "reward"}.get(type_of(loss), type_of(loss))
    assert set(said) - {"rows", "pairs", "targets", DESIRABLE} == set(METRICS[objective])


def type_of(loss: Any) -> Any:
    return getattr(loss, "kind", type(loss))


PAIRED_LOSSES = [*(loss for loss, _ in LOSSES if isinstance(loss, PairLoss)), RewardLoss(margins=True)]


def spec_of(loss: Any, **more: Any) -> Any:
    return tiny_spec(own_loss=loss, role="critic" if loss.of_values else "policy", **more)


@pytest.mark.parametrize("loss", PAIRED_LOSSES, ids=str)
def test_an_eval_says_the_loss_and_metrics_of_the_objective_whatever_its_batches(loss: Any) -> None:
    worker = DoubleWorker(0, 1, "cpu", spec_of(loss).model_dump_json())
    worker.setup("")
    for layout in ("left", "packed"):
        shards = [list(shards_of(pairs(), layout, 1, 2, step)) for step in range(BATCHES)]
        check_evals([evaluated(worker, [one for (one,) in shards])], shards, loss, layout)


@pytest.mark.ray
@pytest.mark.slow
def test_an_eval_says_the_same_on_several_ranks(ranks: Ranks) -> None:
    for loss in PAIRED_LOSSES:
        for dp_size, strategy in ((2, "fsdp"), (3, "ddp")):
            shards = [list(shards_of(pairs(), "packed", dp_size, 2, step)) for step in range(BATCHES)]
            spec = spec_of(loss, strategy=strategy)
            told = ranks.run(spec, evaluated, [(list(mine),) for mine in zip(*shards, strict=True)])
            check_evals(told, shards, loss, f"{dp_size} ranks")


def test_an_eval_of_kto_says_what_a_process_says_that_looks_at_each_row() -> None:
    loss, formula = LOSSES[-1]
    worker = DoubleWorker(0, 1, "cpu", spec_of(loss).model_dump_json())
    worker.setup("")
    (shard,) = shards_of(pairs(), "packed", 1)
    told = evaluated(worker, [shard])[0]
    rows, count = pairs(), shard.denominators.groups
    expected = by_hand(loss, rows)
    expected["loss"] = float(formula(pair_reference.scores(model_of(), rows), rows).mean().detach())
    for name, value in expected.items():
        assert told[name] / count == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert set(told) - {DESIRABLE} == set(METRICS["kto"])
