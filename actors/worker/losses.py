"""Losses of single targets, summed with weights that already hold the denominators of the whole mini-batch.

Axes: T targets of some micro-batch (or of a piece of it), V vocabulary.

A loss is plain data that a driver can send; called in a worker it gives sum_t w_t l_t and metrics. With r_t the
log-probability now less `old_logprobs`, d_t `ref_logprobs` less the log-probability now, and A_t `advantages`:

    SftLoss      l_t = -logprob_t
    PolicyLoss   l_t = -min(e^r A, clip(e^r, 1 - low, 1 + high) A), for A < 0 at most -c A   (PPO, arXiv:1707.06347;
                       c: dual clip, arXiv:1912.09729) + kl_coef KL_t - entropy_coef H_t
                 by `cispo` the first term is -sg(min(e^r, 1 + high)) A logprob_t (arXiv:2506.13585), sg: no gradient
                 with `tis_cap` the first term counts min(e^(old_logprobs - logprobs), tis_cap) times, `logprobs` those of
                       the engine that sampled (truncated importance sampling, fengyao.notion.site/off-policy-rl)
                 KL_t by `k1` -d, `k2` d^2 / 2, `k3` e^d - d - 1 (joschu.net/blog/kl-approx.html; GRPO takes k3)
    DistillLoss  l_t = T^2 sum_k q_k (log q_k - log p_k) over the teacher's entries, q its probabilities at temperature T,
                       made to sum to 1 over them, p those of the model at T over its whole vocabulary
    StepLoss     l_t = -y log s(v) - (1 - y) log(1 - s(v)), y `step_labels`, v the value at the target itself: a process reward
                       model of one output, as a classifier of two whose logits differ by v (arXiv:2305.20050)
    ValueLoss    l_t = (v - returns)^2 / 2, with `clip` the larger of that and of v held within `clip` of `old_values`

Always true:
- every term of a loss (KL, entropy, clip share) has the weight of its target, so dummies, padding and the way a
  mini-batch is split are in none of them;
- a metric is a share: the sum over micro-batches and ranks is the mean over the mini-batch (`*_max`: the largest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch


# of a micro-batch, by row: which row a target is of; sums of losses; of how many targets or pairs
ROW_INDEX, ROW_LOSS, ROW_COUNT = "row_index", "row_loss", "row_count"


@dataclass(frozen=True)
class Targets:
    """Holds what a loss may look at; every tensor is [T], float32 or wider.

    Attributes:
        weights: of each target, denominators included.
        columns: per-token columns that came with the shard, at the targets.
        logprobs: of the labels; None for a critic.
        entropy: of the distribution, where the loss asked for it.
        values: of a critic.
        top_k: [T, K] log-probabilities of the entries in `teacher_ids`, at the temperature of the loss.
    """

    weights: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    top_k: torch.Tensor | None = None


class LossSum(NamedTuple):
    """A weighted sum over targets."""

    total: torch.Tensor  # scalar with a gradient
    metrics: dict[str, torch.Tensor]  # scalars without


class Loss(Protocol):
    """Something that sums the losses of targets.

    Attributes:
        columns: per-token columns that it needs.
        needs_entropy: whether the entropy has to be computed.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, targets: Targets) -> LossSum: ...


@dataclass(frozen=True)
class SftLoss:
    """Cross-entropy of the targets.

    Attributes:
        num_rows: of the micro-batch: then `row_loss` [num_rows] is among the metrics, the nats of each row's targets.
    """

    num_rows: int | None = None
    needs_entropy: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it needs."""
        return _index(self.num_rows)

    def __call__(self, targets: Targets) -> LossSum:
        assert targets.logprobs is not None
        metrics = by_row(-targets.logprobs, targets, self.num_rows)
        return LossSum(-(targets.logprobs * targets.weights).sum(), metrics)


@dataclass(frozen=True)
class PolicyLoss:
    """PPO and GRPO: clipped policy gradient with KL to a reference and entropy.

    Attributes:
        clip_low: the ratio counts down to 1 - clip_low; unused by `cispo`.
        clip_high: ... and up to 1 + clip_high; larger than clip_low is DAPO's clip-higher.
        how: `clip` gives no gradient to tokens beyond the clip, `cispo` a bounded one.
        tis_cap: bound of the weight that corrects for an engine whose probabilities are not the trainer's; None: no
            correction. Needs the column `logprobs`.
        dual_clip: for `clip`, bound c > 1 of the loss where the advantage is negative; None: no bound.
        kl_coef: weight of the KL term; 0 needs no reference.
        kl: which estimator.
        entropy_coef: weight of the entropy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    how: Literal["clip", "cispo"] = "clip"
    tis_cap: float | None = None
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.how == "cispo" and self.dual_clip is not None:
            raise ConfigError(
                "PolicyLoss(dual_clip)", "is for how='clip', and how is 'cispo'", "leave it out"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it needs."""
        needed = {"ref_logprobs": self.kl_coef, "logprobs": self.tis_cap}
        return ("advantages", "old_logprobs", *(name for name, wanted in needed.items() if wanted))

    @property
    def needs_entropy(self) -> bool:
        """Returns whether the entropy is a term of it."""
        return self.entropy_coef != 0

    def __call__(self, targets: Targets) -> LossSum:
        import torch

        assert targets.logprobs is not None
        weights, advantages = targets.weights, targets.columns["advantages"]
        log_ratio = targets.logprobs - targets.columns["old_logprobs"]
        ratio = log_ratio.exp()
        policy, moved = self._policy(ratio, advantages, targets.logprobs)
        metrics = {
            "clip_ratio/region_mean": (moved.to(weights.dtype) * weights).sum(),
            "old_kl": ((ratio - log_ratio - 1) * weights).sum(),
            "ratio_max": torch.where(weights > 0, ratio, 0.0).amax() if len(ratio) else weights.sum(),
        }
        if self.tis_cap is not None:
            engine = (targets.columns["old_logprobs"] - targets.columns["logprobs"]).exp()
            policy = policy * engine.clamp(max=self.tis_cap)
            metrics["tis_capped_share"] = ((engine > self.tis_cap).to(weights.dtype) * weights).sum()
        metrics["policy_loss"] = (policy * weights).sum()
        terms = policy
        if self.kl_coef:
            kl = kl_estimate(targets.columns["ref_logprobs"] - targets.logprobs, self.kl)
            terms = terms + self.kl_coef * kl
            metrics["kl"] = (kl * weights).sum()
        if self.needs_entropy:
            assert targets.entropy is not None
            terms = terms - self.entropy_coef * targets.entropy
            metrics["entropy"] = (targets.entropy * weights).sum()
        return LossSum((terms * weights).sum(), {name: value.detach() for name, value in metrics.items()})

    def _policy(
        self, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first term of each target, and whether its ratio was bounded."""
        import torch

        if self.how == "cispo":
            bounded = ratio.detach().clamp(max=1 + self.clip_high)
            return -bounded * advantages * logprobs, ratio.detach() > bounded
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        policy = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            bounded = torch.minimum(policy, -self.dual_clip * advantages)
            policy = torch.where(advantages < 0, bounded, policy)
        return policy, clipped * advantages < ratio * advantages


@dataclass(frozen=True)
class ValueLoss:
    """Squared error of a critic.

    Attributes:
        clip: how far a value may move from `old_values` before moving further pays nothing; None: no bound.
    """

    clip: float | None = None
    needs_entropy: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it needs."""
        return ("returns",) if self.clip is None else ("returns", "old_values")

    def __call__(self, targets: Targets) -> LossSum:
        import torch

        assert targets.values is not None
        values, returns, weights = targets.values, targets.columns["returns"], targets.weights
        error = (values - returns) ** 2
        if self.clip is not None:
            old = targets.columns["old_values"]
            held = old + (values - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (held - returns) ** 2)
        metrics = {"value_mean": (values * weights).sum().detach()}
        return LossSum((0.5 * error * weights).sum(), metrics)


@dataclass(frozen=True)
class DistillLoss:
    """Forward KL from the K likeliest entries of a teacher.

    Of a target, `teacher_ids` [K] are the entries, -1 where there are fewer, and `teacher_logprobs` [K] their
    log-probabilities at temperature 1; whichever teacher a row has, they are its own.

    Attributes:
        temperature: T, of both.
        temperature_column: a per-row column with T instead.
        weight_column: a per-row column with a factor of the row's loss.
        num_rows: as of `SftLoss`.
    """

    temperature: float = 1.0
    temperature_column: str | None = None
    weight_column: str | None = None
    num_rows: int | None = None
    needs_entropy: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it needs; those per row are spread over the targets."""
        extra = [name for name in (self.temperature_column, self.weight_column) if name]
        return ("teacher_ids", "teacher_logprobs", *extra, *_index(self.num_rows))

    def temperatures(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor | float:
        """[T], or one for all."""
        return self.temperature if self.temperature_column is None else columns[self.temperature_column]

    def __call__(self, targets: Targets) -> LossSum:
        import torch

        assert targets.top_k is not None
        there = targets.columns["teacher_ids"].long() >= 0  # torch compares no uint16 to uint64
        temperatures = torch.as_tensor(self.temperatures(targets.columns)).to(targets.top_k)
        scale = temperatures.expand(len(there))
        teacher = targets.columns["teacher_logprobs"].to(targets.top_k.dtype) / scale[:, None]
        teacher = teacher.masked_fill(~there, -torch.inf).log_softmax(-1)
        # no entry at all: no loss, and no NaN in the backward pass
        known = there.any(-1)
        teacher = torch.where(there, teacher, 0.0)
        share = torch.where(there & known[:, None], teacher.exp(), 0.0)
        losses = scale**2 * (share * (teacher - torch.where(there, targets.top_k, 0.0))).sum(-1)
        weights = targets.weights
        if self.weight_column is not None:
            weights = weights * targets.columns[self.weight_column]
        metrics = {"teacher_targets": (known * weights).sum().detach()}
        return LossSum((losses * weights).sum(), metrics | by_row(losses, targets, self.num_rows))


@dataclass(frozen=True)
class StepLoss:
    """A process reward model: the label of each step at its last token.

    Attributes:
        num_rows: as of `SftLoss`.
    """

    num_rows: int | None = None
    needs_entropy: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it needs."""
        return ("step_labels", *_index(self.num_rows))

    def __call__(self, targets: Targets) -> LossSum:
        from torch.nn.functional import softplus

        assert targets.values is not None
        values, weights = targets.values, targets.weights
        labels = targets.columns["step_labels"].to(values.dtype)
        right = ((values > 0) == (labels > 0.5)).to(weights.dtype)
        losses = softplus(values) - labels * values
        metrics = {"accuracy": (right * weights).sum().detach()}
        return LossSum((losses * weights).sum(), metrics | by_row(losses, targets, self.num_rows))


def by_row(losses_T: torch.Tensor, targets: Targets, num_rows: int | None) -> dict[str, torch.Tensor]:
    """`row_loss` [num_rows], the sums of each row's losses, without weights; {} where nobody asked."""
    if num_rows is None:
        return {}
    losses_T = losses_T.detach()
    return {ROW_LOSS: losses_T.new_zeros(num_rows).index_add_(0, targets.columns[ROW_INDEX], losses_T)}


def _index(num_rows: int | None) -> tuple[str, ...]:
    return () if num_rows is None else (ROW_INDEX,)


def kl_estimate(log_ratio_T: torch.Tensor, kind: str) -> torch.Tensor:
    """[T], an estimate of KL(now | reference) from reference less present log-probabilities."""
    if kind == "k1":
        return -log_ratio_T
    if kind == "k2":
        return 0.5 * log_ratio_T**2
    return log_ratio_T.exp() - log_ratio_T - 1
