"""Log-probabilities of targets under a large vocabulary on a CPU, without the memory of their logits.

A vocabulary of 150 k makes the head's weight 40 MB and the logits of one target 0.6 MB. Autograd would make a gradient
as large as the weight for every piece of targets, in fresh memory each time; most of a step was the first touch of it.
Here logits exist a tile at a time, some targets by some of the vocabulary, and a tile stays in the cache of a core.

Axes: T targets, D hidden, V vocabulary, P targets of a tile, W entries of the vocabulary of a tile.

1. Forward, tile by tile: logits, and their log-sum-exp, added to that of the tiles before.
2. The entropy, where it is asked for: a second pass, with the whole log-sum-exp.
3. Backward, tile by tile: log-probabilities again; from them the gradient of the logits in place; from that the
   gradients of the rows and of the weight, added to one tensor each. Without entropy the factor of a target is the
   same for all entries, and is multiplied in where there are D numbers, not V.
4. The label's own share of either gradient is one row of the other factor, added at the end.

In all passes each thread of torch has a share of the entries, and computes its tiles by itself.

Always true:
- values and gradients are those of `log_softmax(rows @ weight.T)` in float32, up to the order of sums, also under
  autocast: a tile in bfloat16 would be slower on a CPU and say less.

This file imports torch; import it inside the function that builds a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import torch

GATHERED = 32  # targets whose entries are gathered at once: 8 MB at 64 entries and a width of 1024
TARGETS, ENTRIES = 256, 2048  # of a tile: 2 MB of logits, what a core's second cache holds


def head_logprobs(
    rows_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T] log-probability of each label, and [T] entropy or None; float32 on the CPU."""
    logprobs_T, entropy_T = _HeadLogprobs.apply(rows_TD, weight_VD, labels_T, entropy)
    return logprobs_T, entropy_T if entropy else None


class _HeadLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, rows_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse_T, entropy_T = _lse(rows_TD, weight_VD), rows_TD.new_zeros(len(rows_TD))

        def entropy_of(share: slice) -> torch.Tensor:
            found_T = torch.zeros_like(entropy_T)
            for part, entries, logprobs_PW in _tiles(rows_TD, share):
                _logprobs(rows_TD[part], weight_VD[entries], lse_T[part], logprobs_PW)
                found_T[part] -= (logprobs_PW.exp() * logprobs_PW).sum(1)
            return found_T

        if entropy:
            entropy_T = reduce(torch.add, _of_shares(len(weight_VD), entropy_of))
        ctx.save_for_backward(rows_TD, weight_VD, labels_T, lse_T, entropy_T)
        ctx.entropy = entropy
        return (rows_TD * weight_VD[labels_T]).sum(1) - lse_T, entropy_T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor) -> tuple[Any, ...]:
        rows_TD, weight_VD, labels_T, lse_T, entropy_T = ctx.saved_tensors
        grad_weight_VD = torch.zeros_like(weight_VD)
        factor_T1 = -(grad_logprobs_T.new_ones(len(rows_TD)) if ctx.entropy else grad_logprobs_T)[:, None]
        scaled_TD = rows_TD * factor_T1

        def grad_rows_of(share: slice) -> torch.Tensor:
            found_TD = torch.zeros_like(rows_TD)
            for part, entries, tile_PW in _tiles(rows_TD, share):
                weight_WD = weight_VD[entries]
                _logprobs(rows_TD[part], weight_WD, lse_T[part], tile_PW)
                if ctx.entropy:
                    _grad_with_entropy_(tile_PW, grad_logprobs_T[part], entropy_T[part], grad_entropy_T[part])
                else:
                    tile_PW.exp_()
                found_TD[part].addmm_(tile_PW, weight_WD)
                grad_weight_VD[entries].addmm_(tile_PW.T, scaled_TD[part])
            return found_TD

        grad_rows_TD = reduce(torch.add, _of_shares(len(weight_VD), grad_rows_of))
        grad_rows_TD.mul_(factor_T1).addcmul_(grad_logprobs_T[:, None], weight_VD[labels_T])
        grad_weight_VD.index_add_(0, labels_T, grad_logprobs_T[:, None] * rows_TD)
        return grad_rows_TD, grad_weight_VD, None, None


def head_top_k(rows_TD: torch.Tensor, weight_VD: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """[T, K] log-probabilities of some entries of each target; float32 on the CPU, no [T, V] at any time."""
    picked_TK, lse_T = _HeadTopK.apply(rows_TD, weight_VD, ids_TK)
    return picked_TK - lse_T[:, None]


class _HeadTopK(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """Logits of the entries, gathered, and the log-sum-exp of all, tile by tile."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, rows_TD: torch.Tensor, weight_VD: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse_T = _lse(rows_TD, weight_VD)
        picked_TK = rows_TD.new_empty(ids_TK.shape)
        for part in _pieces(len(rows_TD), GATHERED):
            picked_TK[part] = torch.einsum("pd,pkd->pk", rows_TD[part], weight_VD[ids_TK[part]])
        ctx.save_for_backward(rows_TD, weight_VD, ids_TK, lse_T)
        return picked_TK, lse_T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_picked_TK: torch.Tensor, grad_lse_T: torch.Tensor) -> tuple[Any, ...]:
        rows_TD, weight_VD, ids_TK, lse_T = ctx.saved_tensors
        grad_weight_VD = torch.zeros_like(weight_VD)

        def grad_rows_of(share: slice) -> torch.Tensor:
            found_TD = torch.zeros_like(rows_TD)
            for part, entries, tile_PW in _tiles(rows_TD, share):
                _logprobs(rows_TD[part], weight_VD[entries], lse_T[part], tile_PW)
                tile_PW.exp_().mul_(grad_lse_T[part, None])
                found_TD[part].addmm_(tile_PW, weight_VD[entries])
                grad_weight_VD[entries].addmm_(tile_PW.T, rows_TD[part])
            return found_TD

        grad_rows_TD = reduce(torch.add, _of_shares(len(weight_VD), grad_rows_of))
        for part in _pieces(len(rows_TD), GATHERED):
            grad_PK, ids_PK = grad_picked_TK[part], ids_TK[part]
            grad_rows_TD[part] += torch.einsum("pk,pkd->pd", grad_PK, weight_VD[ids_PK])
            share_PKD = grad_PK[:, :, None] * rows_TD[part][:, None]
            grad_weight_VD.index_add_(0, ids_PK.flatten(), share_PKD.flatten(0, 1))
        return grad_rows_TD, grad_weight_VD, None


def _lse(rows_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """[T] log-sum-exp of the logits of each target."""

    def lse_of(share: slice) -> torch.Tensor:
        found_T = rows_TD.new_full((len(rows_TD),), -torch.inf)
        for part, entries, logits_PW in _tiles(rows_TD, share):
            torch.mm(rows_TD[part], weight_VD[entries].T, out=logits_PW)
            found_T[part] = torch.logaddexp(found_T[part], _log_sum_exp_(logits_PW))
        return found_T

    return reduce(torch.logaddexp, _of_shares(len(weight_VD), lse_of))


def _of_shares(num_entries: int, work: Callable[[slice], torch.Tensor]) -> list[torch.Tensor]:
    """`work` of a share of the entries for each thread of torch, in a thread of its own, which torch computes in without Python's lock.

    Several threads at one tile would wait for each other after each operation, some thousands of times a step.
    """
    threads = torch.get_num_threads()
    shares = _pieces(num_entries, max(ENTRIES, -(-num_entries // threads)))
    if len(shares) == 1:
        return [work(shares[0])]

    def alone(share: slice) -> torch.Tensor:
        torch.set_num_threads(1)  # of this thread, and of threads to come
        with torch.no_grad():
            return work(share)

    try:
        with ThreadPoolExecutor(len(shares)) as pool:
            return list(pool.map(alone, shares))
    finally:
        torch.set_num_threads(threads)


def _tiles(rows_TD: torch.Tensor, share: slice) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(targets, entries, [P, W] memory for them), all targets of some entries of the share before the next entries."""
    memory = rows_TD.new_empty(TARGETS * ENTRIES)
    for entries in _pieces(share.stop, ENTRIES, share.start):
        for part in _pieces(len(rows_TD), TARGETS):
            shape = part.stop - part.start, entries.stop - entries.start
            yield part, entries, memory[: shape[0] * shape[1]].view(shape)


def _pieces(stop: int, size: int, first: int = 0) -> list[slice]:
    return [slice(start, min(start + size, stop)) for start in range(first, stop, size)]


def _logprobs(
    rows_PD: torch.Tensor, weight_WD: torch.Tensor, lse_P: torch.Tensor, out_PW: torch.Tensor
) -> None:
    torch.addmm(lse_P[:, None], rows_PD, weight_WD.T, beta=-1, out=out_PW)


def _log_sum_exp_(logits_PW: torch.Tensor) -> torch.Tensor:
    """[P], in the memory of the logits."""
    most_P = logits_PW.amax(1)
    return logits_PW.sub_(most_P[:, None]).exp_().sum(1).log_().add_(most_P)


def _grad_with_entropy_(
    logprobs_PW: torch.Tensor, grad_P: torch.Tensor, entropy_P: torch.Tensor, grad_entropy_P: torch.Tensor
) -> None:
    """Minus the gradient of the logits, without the share of the label, in the memory of the log-probabilities."""
    factor_PW = (logprobs_PW + entropy_P[:, None]).mul_(grad_entropy_P[:, None]).add_(grad_P[:, None])
    logprobs_PW.exp_().mul_(factor_PW)
