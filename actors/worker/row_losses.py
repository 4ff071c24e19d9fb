"""Losses of whole rows: of pairs, of rows with a label, of rewards.

Axes: S rows of a micro-batch, dummies included; P = S / 2 pairs, rows 2 p and 2 p + 1; T targets.

With c and r the sums of log-probabilities of the chosen and the rejected row's targets less those of the reference, n_c
and n_r the numbers of targets, a loss of a mini-batch is the mean over its pairs:

    sigmoid   -log s(b (c - r))                           (DPO, arXiv:2305.18290)
    ipo       (c / n_c - r / n_r - 1 / (2 b))^2           (arXiv:2310.12036, per token as its authors do)
    simpo     -log s(b (c / n_c - r / n_r) - m)           (arXiv:2405.14734; no reference)
    orpo      -c / n_c - b log s(o)                       (arXiv:2403.07691; no reference), with
              o = c / n_c - r / n_r - log(1 - e^(c / n_c)) + log(1 - e^(r / n_r))
    KtoLoss   1 - s(b (x - z)) for a good row, 1 - s(b (z - x)) for a bad one  (arXiv:2402.01306), where x is c of the row
              and z >= 0 the mean over the whole mini-batch of the same of the mismatched rows
    RewardLoss  -log s(v_c - v_r - margin), v the value at the last token

A policy has a loss of rows too, the mean over trajectories:
    SequencePolicyLoss  -min(s A, clip(s, 1 - low, 1 + high) A), s = e^((now - old) / n) of the sums over the n targets of a row

Always true:
- pairs weigh the same, however they are split over micro-batches and ranks; dummies weigh nothing;
- z is of the whole mini-batch, over all ranks, and has no gradient;
- `row_loss` and `row_count` among the metrics have the loss of a pair at its first row;
- metrics have TRL's names and are what TRL says of the same rows: rewards are b (c) of `sigmoid` and `ipo`, b c / n_c of
  `simpo` and `orpo`, b x of KTO, and the values of a reward model; `logps/*` are sums over the targets of a row where there
  is a reference, else means. `rewards/accuracies` of KTO, which TRL does not say, is the share of rows on their side of z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from raysvc.actors.worker.losses import ROW_COUNT, ROW_LOSS, LossSum
from raysvc.actors.worker.results import DESIRABLE

if TYPE_CHECKING:
    import torch


Weigh = Literal["group", "sequence"]


@dataclass(frozen=True)
class LossRows:
    """Holds what a loss of rows may look at; every tensor is [S], float32 or wider.

    Attributes:
        weights: of each row, denominators included; 0 for a dummy.
        counts: targets of each row.
        columns: per-row columns, and sums of per-token columns over the targets.
        logprobs: sums over the targets; None where the loss looks at values.
        values: of a critic, at the last token.
        shared: numbers of the whole mini-batch.
    """

    weights: torch.Tensor
    counts: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def ratios(self) -> torch.Tensor:
        """[S], log-probabilities less those of the reference."""
        assert self.logprobs is not None
        return self.logprobs - self.columns["ref_logprobs"]


@runtime_checkable
class RowLoss(Protocol):
    """A loss of rows.

    Attributes:
        columns: per-token columns, whose sums over the targets of each row it needs.
        row_columns: per-row columns that it needs.
        of_values: it looks at values, not at log-probabilities.
        weigh: whether groups weigh the same (`group`), or trajectories (`sequence`).
    """

    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def row_columns(self) -> tuple[str, ...]: ...
    @property
    def of_values(self) -> bool: ...
    @property
    def weigh(self) -> Weigh: ...
    def of_rows(self, rows: LossRows) -> LossSum: ...


@dataclass(frozen=True)
class PairLoss:
    """DPO and its kin.

    Attributes:
        kind: which.
        beta: b.
        margin: m of `simpo`.
    """

    kind: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"
    beta: float = 0.1
    margin: float = 0.0
    row_columns: tuple[str, ...] = ()
    of_values: bool = False
    weigh: Weigh = "group"

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it needs."""
        return ("ref_logprobs",) if self.kind in ("sigmoid", "ipo") else ()

    def of_rows(self, rows: LossRows) -> LossSum:
        """The sum over the pairs of a micro-batch."""
        from torch.nn.functional import logsigmoid

        assert rows.logprobs is not None
        scores = rows.ratios() if self.columns else rows.logprobs
        means = scores / rows.counts.clamp(min=1)
        weights = rows.weights[0::2]
        delta, mean_delta = scores[0::2] - scores[1::2], means[0::2] - means[1::2]
        if self.kind == "sigmoid":
            losses = -logsigmoid(self.beta * delta)
        elif self.kind == "ipo":
            losses = (mean_delta - 1 / (2 * self.beta)) ** 2
        elif self.kind == "simpo":
            losses = -logsigmoid(self.beta * mean_delta - self.margin)
        else:
            odds = mean_delta - _log1mexp(means[0::2]) + _log1mexp(means[1::2])
            losses = -means[0::2] - self.beta * logsigmoid(odds)
        logps = (rows.logprobs if self.columns else means).detach()
        rewards = self.beta * (scores if self.columns else means).detach()
        metrics = {
            **_told_apart(rewards, weights),
            "logps/chosen": (logps[0::2] * weights).sum(),
            "logps/rejected": (logps[1::2] * weights).sum(),
            **_by_pair(losses, rows.weights),
        }
        if self.kind == "orpo":
            metrics["log_odds_chosen"] = (odds.detach() * weights).sum()
            metrics["log_odds_ratio"] = (logsigmoid(odds.detach()) * weights).sum()
        return LossSum((losses * weights).sum(), metrics)


@dataclass(frozen=True)
class KtoLoss:
    """LossRows with a label, each beside its prompt with another row's completion.

    Attributes:
        beta: b.
        desirable_weight, undesirable_weight: factors of good and of bad rows.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    columns: tuple[str, ...] = ("ref_logprobs",)
    row_columns: tuple[str, ...] = ("label",)
    of_values: bool = False
    weigh: Weigh = "group"

    def of_rows(self, rows: LossRows) -> LossSum:
        """The sum over the rows of a micro-batch that are not mismatched."""
        import torch

        ratios, weights = rows.ratios()[0::2], rows.weights[0::2]
        good, kl = rows.columns["label"][0::2] > 0, rows.shared["mismatched_kl"]
        gains = torch.where(good, ratios - kl, kl - ratios)
        factors = torch.where(good, self.desirable_weight, self.undesirable_weight)
        losses = factors * (1 - torch.sigmoid(self.beta * gains))
        metrics = {
            "rewards/accuracies": ((gains > 0).to(weights.dtype) * weights).sum(),
            "kl": (kl * weights).sum().detach(),
            DESIRABLE: (good * weights).sum(),
            **self._of_each_label(rows, good),
            **_by_pair(losses, rows.weights),
        }
        return LossSum((losses * weights).sum(), metrics)

    def _of_each_label(self, rows: LossRows, good_P: torch.Tensor) -> dict[str, torch.Tensor]:
        """Means over the good rows of the whole mini-batch, and over the bad ones; those of none are absent."""
        assert rows.logprobs is not None
        logps, weights = rows.logprobs[0::2].detach(), rows.weights[0::2]
        rewards, share = self.beta * rows.ratios()[0::2].detach(), rows.shared["desirable_share"]
        found = {}
        for name, these, part in (("chosen", good_P, share), ("rejected", ~good_P, 1 - share)):
            if part > 0:
                of_these = weights * these / part
                found[f"rewards/{name}"] = (rewards * of_these).sum()
                found[f"logps/{name}"] = (logps * of_these).sum()
        if 0 < share < 1:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


@dataclass(frozen=True)
class RewardLoss:
    """A reward model of pairs.

    Attributes:
        margins: the pairs have a column `margin`.
        center: factor of the square of the sum of both values (arXiv:2312.09244).
    """

    margins: bool = False
    center: float = 0.0
    columns: tuple[str, ...] = ()
    of_values: bool = True
    weigh: Weigh = "group"

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Per-row columns that it needs."""
        return ("margin",) if self.margins else ()

    def of_rows(self, rows: LossRows) -> LossSum:
        """The sum over the pairs of a micro-batch."""
        import torch
        from torch.nn.functional import logsigmoid

        assert rows.values is not None
        chosen, rejected, weights = rows.values[0::2], rows.values[1::2], rows.weights[0::2]
        margin = rows.columns["margin"][0::2] if self.margins else 0.0
        losses = -logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected) ** 2
        values, real = rows.values.detach(), rows.weights > 0
        told = _told_apart(values, weights)
        metrics = {
            "accuracy": told["rewards/accuracies"],
            "margin": told["rewards/margins"],
            "mean_reward": (values * rows.weights).sum() / 2,
            "min_reward": values.masked_fill(~real, torch.inf).amin(),
            "max_reward": values.masked_fill(~real, -torch.inf).amax(),
            **{name: told[name] for name in ("rewards/chosen", "rewards/rejected")},
            **_by_pair(losses, rows.weights),
        }
        return LossSum((losses * weights).sum(), metrics)


@dataclass(frozen=True)
class SequencePolicyLoss:
    """GSPO: the clipped policy gradient with one ratio a row, that of its geometric mean (arXiv:2507.18071).

    A row of several turns has one ratio for all of them: with `rows: merge` that is a trajectory. A row's advantage is the mean
    over its targets.

    Attributes:
        clip_low: the ratio counts down to 1 - clip_low; the paper has 3e-4.
        clip_high: ... and up to 1 + clip_high; the paper has 4e-4.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    columns: tuple[str, ...] = ("advantages", "old_logprobs")
    row_columns: tuple[str, ...] = ()
    of_values: bool = False
    weigh: Weigh = "sequence"

    def of_rows(self, rows: LossRows) -> LossSum:
        """The sum over the rows of a micro-batch."""
        import torch

        assert rows.logprobs is not None
        counts, weights = rows.counts.clamp(min=1), rows.weights
        advantages = rows.columns["advantages"] / counts
        ratio = ((rows.logprobs - rows.columns["old_logprobs"]) / counts).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        total = (losses * weights).sum()
        moved = (clipped * advantages < ratio * advantages).to(weights.dtype)
        metrics = {
            "clip_ratio/region_mean": (moved * weights).sum(),
            "policy_loss": total.detach(),
            "ratio_max": torch.where(weights > 0, ratio, 0.0).amax().detach()
            if len(ratio)
            else total.detach(),
        }
        return LossSum(total, metrics)


@dataclass(frozen=True)
class MismatchedKl:
    """No loss: the sum over the mismatched rows of a micro-batch that z is the mean of; `desirable`: its good rows."""

    columns: tuple[str, ...] = ("ref_logprobs",)
    row_columns: tuple[str, ...] = ("label",)
    of_values: bool = False
    weigh: Weigh = "group"

    def of_rows(self, rows: LossRows) -> LossSum:
        """The sums."""
        real = (rows.weights[1::2] > 0).to(rows.weights.dtype)
        good = (rows.columns["label"][0::2] > 0) * real
        return LossSum((rows.ratios()[1::2] * real).sum(), {"desirable": good.sum()})


MISMATCHED = MismatchedKl()


def _told_apart(rewards_S: torch.Tensor, weights_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns what is said of the rewards of pairs: weighted sums over those of a micro-batch."""
    chosen, rejected = rewards_S[0::2], rewards_S[1::2]
    return {
        "rewards/chosen": (chosen * weights_P).sum(),
        "rewards/rejected": (rejected * weights_P).sum(),
        "rewards/accuracies": ((chosen > rejected) * weights_P).sum(),
        "rewards/margins": ((chosen - rejected) * weights_P).sum(),
    }


def _by_pair(losses_P: torch.Tensor, weights_S: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss of each pair at its first row, and 1 pair there; 0 at second rows and dummies."""
    import torch

    first = torch.zeros_like(weights_S)
    first[0::2] = (weights_S[0::2] > 0).to(first.dtype)
    return {ROW_LOSS: losses_P.detach().repeat_interleave(2) * first, ROW_COUNT: first}


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x < 0, by the better of two forms (Maechler 2012)."""
    import torch

    values = values.clamp(max=-1e-7)
    small = values > -0.6931471805599453
    near = torch.log(-torch.expm1(torch.where(small, values, -0.5)))
    far = torch.log1p(-torch.exp(torch.where(small, -1.0, values)))
    return torch.where(small, near, far)
