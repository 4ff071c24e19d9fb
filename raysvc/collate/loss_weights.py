"""Denominators into loss weights, so that summed gradients are those of the whole mini-batch at once.

With l_t the loss of target t, T targets, S rows, J trajectories, G groups of the mini-batch (`Denominators`), n_s targets of
row s, n_j of trajectory j, m_g rows and k_g targets of group g, the loss of a mini-batch is

    token_mean      sum_t l_t / T
    sequence_mean   sum_s (1 / S) sum_{t in s} l_t / n_s
    trajectory_mean sum_j (1 / J) sum_{t in j} l_t / n_j
    group_mean      sum_g (1 / G) sum_{s in g} (1 / m_g) sum_{t in s} l_t / n_s
    prompt_mean     sum_g (1 / G) sum_{t in g} l_t / k_g
    constant        sum_s (1 / S) sum_{t in s} l_t / c         (Dr. GRPO; c tokens, the longest answer allowed)

A row that names no trajectory is one. A row that holds several turns is as many rows: n_s is of the turn that t is of.
Each is sum_t w_t l_t with w_t known before the split. A rank adds `dp_size * w_t * l_t` over its
micro-batches where the gradient reducer averages over ranks (DDP, FSDP), `w_t * l_t` where it sums.
Always true:
- a row without a target weighs nothing, and counts in S and in its group;
- a group without a target weighs nothing, and counts in G;
- weights of dummies and padding are 0;
- with dp_size = 1 the weights of a mini-batch sum to 1 where every row has a target (`constant`: to T / (S c)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import IGNORED
from raysvc.collate.shard import Array, Denominators
from raysvc.job.config import Reduction

__all__ = ["Reduction", "loss_scale", "mean_count", "row_weights", "sequence_weights", "token_weights"]


def loss_scale(
    denominators: Denominators,
    ranks: int,
    reduction: Reduction = "token_mean",
    *,
    constant: float | None = None,
) -> float:
    """The factor for the sum of a micro-batch's token losses with which no gradient depends on the number of ranks.

    Args:
        denominators: of the mini-batch: `micro.denominators`, `shard.denominators`, `mini.info.denominators`.
        ranks: data-parallel ranks where gradients are averaged over them (DDP, FSDP); 1 where they are summed.
        reduction: `token_mean` or `constant`. Under the other means rows weigh differently: use `token_weights`.
        constant: c tokens, for `constant`.

    Raises:
        ValueError: `reduction` has no one factor, or `ranks` or `constant` is not positive.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if reduction == "token_mean":
        return ranks / max(denominators.tokens, 1)
    if reduction != "constant":
        what = f"reduction {reduction!r} has no one factor, its rows weigh differently"
        raise ValueError(f"{what}; multiply each token's loss with raysvc.collate.token_weights")
    if constant is None or constant <= 0:
        raise ValueError(f"reduction 'constant' needs a positive constant, got {constant}")
    return ranks / (max(denominators.rows, 1) * constant)


def row_weights(
    arrays: Mapping[str, Any],
    denominators: Denominators,
    reduction: Reduction,
    *,
    dp_size: int = 1,
    constant: float | None = None,
) -> npt.NDArray[np.float64]:
    """float64 [S], the weight of every target of each row in `arrays` (of a shard or a micro-batch).

    Args:
        arrays: numpy or torch, with `row_tokens`, `row_group`, `row_group_rows` and `row_group_tokens`.
        denominators: of the mini-batch.
        reduction: which mean.
        dp_size: number of ranks where the reducer averages; 1 where it sums.
        constant: c, for `constant`.

    Raises:
        ValueError: rows hold several turns, which weigh differently under this mean.
    """
    if _by_turn(arrays, reduction):
        what = f"a row holds several turns, which weigh differently under {reduction!r}"
        raise ValueError(f"{what}; take raysvc.collate.token_weights")
    return _row_weights(arrays, denominators, reduction, dp_size, constant)


def _row_weights(
    arrays: Mapping[str, Any],
    denominators: Denominators,
    reduction: Reduction,
    dp_size: int,
    constant: float | None,
) -> npt.NDArray[np.float64]:
    """float64 [S]; where turns weigh differently, without the division by the targets of a turn."""
    real = (_on_host(arrays["row_group"]) >= 0).astype(np.float64)
    if reduction in ("token_mean", "constant"):
        return real * loss_scale(denominators, dp_size, reduction, constant=constant)
    if reduction == "prompt_mean":
        return real * dp_size / (max(denominators.groups, 1) * _counts(arrays, "row_group_tokens"))
    if reduction == "trajectory_mean" and "row_trajectory_tokens" in arrays:
        return real * dp_size / (max(denominators.trajectories, 1) * _counts(arrays, "row_trajectory_tokens"))
    targets = 1.0 if _by_turn(arrays, reduction) else _counts(arrays, "row_tokens")
    if reduction in ("sequence_mean", "trajectory_mean"):
        return real * dp_size / (max(denominators.rows, 1) * targets)
    return real * dp_size / (max(denominators.groups, 1) * _counts(arrays, "row_group_rows") * targets)


def token_weights(
    arrays: Mapping[str, Any],
    denominators: Denominators,
    reduction: Reduction,
    *,
    dp_size: int = 1,
    constant: float | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> npt.NDArray[Any]:
    """[B, W] in `dtype`, the weight of each label in `arrays` (numpy or torch, of a shard or a micro-batch).

    It lies like `labels`: shift both alike, multiply with the loss of each target, sum.
    """
    by_row = _row_weights(arrays, denominators, reduction, dp_size, constant)
    by_turn = _by_turn(arrays, reduction)
    rows = by_row if by_turn else by_row.astype(dtype)
    labels = _on_host(arrays["labels"])
    per_token = rows[_row_of_cells(arrays)]
    if by_turn:
        per_token = (per_token / _counts(arrays, "turn_tokens")).astype(dtype)
    return np.where(labels != IGNORED, per_token, np.zeros((), dtype))


def sequence_weights(
    arrays: Mapping[str, Any], denominators: Denominators, *, dp_size: int = 1
) -> npt.NDArray[np.float64]:
    """float64 [S], the weight of each row of `arrays` in the mean over trajectories, for a loss that is one number a row (GSPO).

    The rows of a trajectory share its weight by their targets, the turns of a row add up; a row without a target weighs nothing.
    """
    cells = token_weights(arrays, denominators, "trajectory_mean", dp_size=dp_size, dtype=np.float64)
    count = len(_on_host(arrays["row_tokens"]))
    index = np.broadcast_to(_row_of_cells(arrays), cells.shape)
    return np.bincount(index.ravel(), cells.ravel(), count).astype(np.float64)


def mean_count(denominators: Denominators, reduction: Reduction) -> int:
    """Returns what the loss of a mini-batch is a mean over: targets, rows, trajectories or groups."""
    if reduction == "token_mean":
        return denominators.tokens
    if reduction == "trajectory_mean":
        return denominators.trajectories or denominators.rows
    return denominators.rows if reduction in ("sequence_mean", "constant") else denominators.groups


def _row_of_cells(arrays: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """int64 [B, W], or [B, 1] where a line is a row: the row of each cell; that of padding is any of its line."""
    if "segment_ids" not in arrays:
        return np.arange(len(_on_host(arrays["labels"])))[:, None]
    offsets = _on_host(arrays["cu_seqlens_offsets"])
    firsts = offsets[:-1] - offsets[0] - np.arange(len(offsets) - 1)
    found: npt.NDArray[np.int64] = np.maximum(_on_host(arrays["segment_ids"]) - 1, 0) + firsts[:, None]
    return found


def _by_turn(arrays: Mapping[str, Any], reduction: Reduction) -> bool:
    """Returns whether the targets of one row may weigh differently."""
    if reduction == "trajectory_mean":
        return "turn_tokens" in arrays and "row_trajectory_tokens" not in arrays
    return "turn_tokens" in arrays and reduction in ("sequence_mean", "group_mean")


def _counts(arrays: Mapping[str, Any], name: str) -> npt.NDArray[np.float64]:
    """At least 1 each: what is 0 has no target, so nothing has its weight."""
    return np.maximum(_on_host(arrays[name]), 1).astype(np.float64)


def _on_host(values: Any) -> Array:
    return values if isinstance(values, np.ndarray) else np.asarray(values.cpu())
