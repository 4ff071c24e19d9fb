"""Losses of a policy that have a name; oracle: TRL's own loss, and float64 formulas written out."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.actors.worker.losses import PolicyLoss, Targets
from raysvc.actors.worker.row_losses import LossRows, SequencePolicyLoss
from raysvc.errors import ConfigError
from raysvc.rl.advantages import overlong_penalty

torch: Any = pytest.importorskip("torch")
ROWS, LENGTH = 6, 9


def drawn(seed: int) -> dict[str, Any]:
    """[ROWS, LENGTH] in float64: what was sampled, trained before, and now; some ratios far from 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Any:
        return scale * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

    old = -normal(1.0).abs()
    mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).to(torch.float64)
    mask[:, 0] = 1
    advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return {
        "old": old,
        "now": old + normal(0.5),
        "engine": old + normal(0.7),
        "mask": mask,
        "advantages": advantages,
    }


def ours(loss: PolicyLoss, given: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Mean over the targets, its gradient, and the metrics."""
    mask = given["mask"].bool()
    now = given["now"].clone().requires_grad_()
    columns = {
        "advantages": given["advantages"][:, None].expand(-1, LENGTH)[mask],
        "old_logprobs": given["old"][mask],
        "logprobs": given["engine"][mask],
    }
    weights = torch.full((int(mask.sum()),), 1 / int(mask.sum()), dtype=torch.float64)
    assert set(loss.columns) <= set(columns)
    total, metrics = loss(Targets(weights, columns, logprobs=now[mask]))
    total.backward()
    return total.detach(), now.grad, metrics


def of_trl(
    kind: str, given: dict[str, Any], low: float, high: float, cap: float | None, level: str = "token"
) -> tuple[Any, Any]:
    """The same by TRL's trainer, which is given the log-probabilities instead of a model."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    now = given["now"].clone().requires_grad_()
    mask = given["mask"]
    gathers = SimpleNamespace(gather=lambda value: value, reduce=lambda value, **_: value, num_processes=1)
    it = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        loss_type=kind,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=gathers,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "num_items_in_batch": mask.sum(),
    }
    if cap is not None:
        inputs["importance_sampling_ratio"] = (given["old"] - given["engine"]).exp().clamp(max=cap)
    loss = trainer._compute_loss(it, None, inputs)
    loss.backward()
    return loss.detach(), now.grad


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(("how", "kind", "high"), [("clip", "dapo", 0.28), ("cispo", "cispo", 0.6)])
def test_losses_and_gradients_are_those_of_trl(how: Any, kind: str, high: float, cap: float | None) -> None:
    for seed in range(5):
        given = drawn(seed)
        loss = PolicyLoss(clip_low=0.2, clip_high=high, how=how, tis_cap=cap)
        total, gradient, _ = ours(loss, given)
        # TRL's epsilon_high of CISPO is the bound itself
        expected, wanted = of_trl(kind, given, 0.2, high + (kind == "cispo"), cap)
        assert total == pytest.approx(float(expected), abs=1e-12)
        assert torch.allclose(gradient, wanted, atol=1e-12)
        assert gradient.abs().sum() > 0


def test_one_ratio_a_row_is_that_of_trl() -> None:
    shares = []
    for seed in range(5):
        given = drawn(seed)
        now, mask = given["now"].clone().requires_grad_(), given["mask"]
        counts = mask.sum(1)
        sums = {"old_logprobs": (given["old"] * mask).sum(1), "advantages": given["advantages"] * counts}
        weights = torch.full((ROWS,), 1 / ROWS, dtype=torch.float64)
        loss = SequencePolicyLoss(clip_low=0.1, clip_high=0.15)
        total, metrics = loss.of_rows(LossRows(weights, counts, sums, (now * mask).sum(1)))
        total.backward()
        expected, wanted = of_trl("grpo", given, 0.1, 0.15, None, "sequence")
        assert total.detach() == pytest.approx(float(expected), abs=1e-12)
        assert torch.allclose(now.grad, wanted, atol=1e-12)
        shares.append(float(metrics["clip_ratio/region_mean"]))
    assert 0 < sum(shares) < len(shares)


def test_the_penalty_of_long_answers_is_that_of_trl() -> None:
    trl = pytest.importorskip("trl.rewards")
    lengths = np.array([1, 79, 80, 81, 90, 99, 100, 101, 500])
    for buffer in (20, 1):
        theirs = trl.get_soft_overlong_punishment(100, buffer)([[1] * int(each) for each in lengths])
        assert np.allclose(overlong_penalty(lengths, 100, buffer), theirs)
    assert overlong_penalty(lengths, 100, 0).tolist() == [0.0] * 7 + [-1.0] * 2


def test_a_bounded_token_learns_by_cispo_only_and_the_shares_count_what_was_bounded() -> None:
    given = drawn(1)
    given["now"] = given["old"] + 1.0  # every ratio is e
    given["advantages"] = torch.ones(ROWS, dtype=torch.float64)
    given["engine"] = given["old"] - torch.where(torch.arange(LENGTH) < 3, 2.0, 0.1)
    mask = given["mask"].bool()
    _, clipped, metrics = ours(PolicyLoss(clip_high=0.3), given)
    assert not clipped.any()
    assert metrics["clip_ratio/region_mean"] == pytest.approx(1.0)
    total, gradient, metrics = ours(PolicyLoss(clip_high=0.3, how="cispo", tis_cap=2.0), given)
    weight = torch.where(torch.arange(LENGTH) < 3, 2.0, 0.1).double()
    weight[3:] = weight[3:].exp()
    by_hand = torch.where(mask, -1.3 * weight / mask.sum(), 0.0)
    assert torch.allclose(gradient, by_hand, atol=1e-8)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(1.0)
    assert metrics["tis_capped_share"] == pytest.approx(float(mask[:, :3].sum() / mask.sum()))
    assert metrics["policy_loss"] == pytest.approx(float(total))


def test_columns_are_asked_for_where_the_loss_needs_them() -> None:
    assert PolicyLoss().columns == ("advantages", "old_logprobs")
    assert PolicyLoss(tis_cap=2.0, kl_coef=0.1).columns == (
        "advantages",
        "old_logprobs",
        "ref_logprobs",
        "logprobs",
    )


def test_a_dual_clip_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="dual_clip"):
        PolicyLoss(how="cispo", dual_clip=2.0)
