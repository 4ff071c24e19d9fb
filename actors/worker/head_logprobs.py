"""Log-probabilities of targets under a large vocabulary on a CPU, without the memory of their logits.

A vocabulary of 150 k makes the head's weight 40 MB and the logits of one target 0.6 MB. Autograd would make a gradient
as large as the weight for every piece of targets, in fresh memory each time; most of a step was the first touch of it.
Here one gradient is added to in place, and the logits of a piece lie in memory that is kept.

Axes: T targets, D hidden, V vocabulary, P targets of a piece.

1. Forward, piece by piece: logits, their log-sum-exp, the logit of the label; the entropy where it is asked for.
2. Backward, piece by piece: logits again, from them the gradient of the logits in place, from that the gradients of
   the rows and, added to one tensor, of the weight.

Always true:
- values and gradients are those of `log_softmax(rows @ weight.T)` in float32, up to the order of sums.

This file imports torch; import it inside the function that builds a model.
"""

from __future__ import annotations

from typing import Any

import torch

LOGIT_BYTES = 32 << 20
_kept: dict[
    int, torch.Tensor
] = {}  # width of the vocabulary -> logits of a piece; a worker computes in one thread


def head_logprobs(
    rows_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T] log-probability of each label, and [T] entropy or None; float32 on the CPU."""
    logprobs_T, entropy_T = _HeadLogprobs.apply(rows_TD, weight_VD, labels_T, entropy)
    return logprobs_T, entropy_T if entropy else None


class _HeadLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    @staticmethod
    def forward(
        ctx: Any, rows_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_T, entropy_T = rows_TD.new_empty(len(rows_TD)), rows_TD.new_zeros(len(rows_TD))
        for part in _pieces(len(rows_TD), len(weight_VD)):
            logits_PV = _logits(rows_TD[part], weight_VD)
            chosen_P = logits_PV.gather(1, labels_T[part, None]).squeeze(1)
            lse_P = torch.logsumexp(logits_PV, 1) if entropy else _log_sum_exp_(logits_PV)
            logprobs_T[part] = chosen_P - lse_P
            if entropy:
                logits_PV.sub_(lse_P[:, None])
                entropy_T[part] = -(logits_PV.exp() * logits_PV).sum(1)
        ctx.save_for_backward(rows_TD, weight_VD, labels_T, entropy_T)
        ctx.entropy = entropy
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor) -> tuple[Any, ...]:
        rows_TD, weight_VD, labels_T, entropy_T = ctx.saved_tensors
        grad_rows_TD, grad_weight_VD = torch.empty_like(rows_TD), torch.zeros_like(weight_VD)
        for part in _pieces(len(rows_TD), len(weight_VD)):
            logits_PV = _logits(rows_TD[part], weight_VD)
            grad_PV = _grad_of_logits_(
                logits_PV,
                grad_logprobs_T[part],
                grad_entropy_T[part] if ctx.entropy else None,
                entropy_T[part],
            )
            grad_PV[torch.arange(len(grad_PV)), labels_T[part]] += grad_logprobs_T[part]
            grad_rows_TD[part] = grad_PV @ weight_VD
            grad_weight_VD.addmm_(grad_PV.T, rows_TD[part])
        return grad_rows_TD, grad_weight_VD, None, None


def _grad_of_logits_(
    logits_PV: torch.Tensor,
    grad_P: torch.Tensor,
    grad_entropy_P: torch.Tensor | None,
    entropy_P: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits, without the share of the label, in the memory of the logits."""
    if grad_entropy_P is None:
        torch.softmax(logits_PV, 1, out=logits_PV)
        return logits_PV.mul_(-grad_P[:, None])
    logprobs_PV = logits_PV.log_softmax(1)
    of_entropy_PV = (logprobs_PV + entropy_P[:, None]).mul_(grad_entropy_P[:, None])
    return logprobs_PV.exp_().mul_(of_entropy_PV.add_(grad_P[:, None])).neg_()


def _log_sum_exp_(logits_PV: torch.Tensor) -> torch.Tensor:
    """[P], in the memory of the logits."""
    most_P = logits_PV.amax(1)
    return logits_PV.sub_(most_P[:, None]).exp_().sum(1).log_().add_(most_P)


def _logits(rows_PD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    width = len(weight_VD)
    if width not in _kept:
        _kept[width] = torch.empty(_at_once(width), width)
    return torch.mm(rows_PD, weight_VD.T, out=_kept[width][: len(rows_PD)])


def _pieces(count: int, width: int) -> list[slice]:
    step = _at_once(width)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _at_once(width: int) -> int:
    return max(16, LOGIT_BYTES // (4 * width))
