"""Denominators into loss weights, so that summed gradients are those of the whole mini-batch at once.

With l_t the loss of target t, T targets, S rows, G groups of the mini-batch (`Denominators`), n_s targets of
row s and m_g rows of group g, the loss of a mini-batch is

    token_mean      sum_t l_t / T
    sequence_mean   sum_s (1 / S) sum_{t in s} l_t / n_s
    group_mean      sum_g (1 / G) sum_{s in g} (1 / m_g) sum_{t in s} l_t / n_s
    constant        sum_t l_t / c

Each is sum_t w_t l_t with w_t known before the split. A rank adds `dp_size * w_t * l_t` over its
micro-batches where the gradient reducer averages over ranks (DDP, FSDP), `w_t * l_t` where it sums.
Always true:
- a row without a target weighs nothing, and counts in S and in its group;
- weights of dummies and padding are 0;
- with dp_size = 1 the weights of a mini-batch sum to 1 where every row has a target (`constant`: to T / c).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import IGNORED
from raysvc.collate.shard import Array, Denominators

Reduction = Literal["token_mean", "sequence_mean", "group_mean", "constant"]


def row_weights(
    arrays: Mapping[str, Array],
    denominators: Denominators,
    reduction: Reduction,
    *,
    dp_size: int = 1,
    constant: float | None = None,
) -> npt.NDArray[np.float64]:
    """float64 [S], the weight of every target of each row in `arrays` (of a shard or a micro-batch).

    Args:
        arrays: with `row_tokens`, `row_group_rows` and `row_group`.
        denominators: of the mini-batch.
        reduction: which mean.
        dp_size: number of ranks where the reducer averages; 1 where it sums.
        constant: c, for `constant`.
    """
    targets = np.maximum(arrays["row_tokens"], 1).astype(np.float64)
    real = (arrays["row_group"] >= 0).astype(np.float64) * dp_size
    if reduction == "token_mean":
        return real / max(denominators.tokens, 1)
    if reduction == "sequence_mean":
        return real / (max(denominators.rows, 1) * targets)
    if reduction == "group_mean":
        return real / (max(denominators.groups, 1) * np.maximum(arrays["row_group_rows"], 1) * targets)
    if constant is None or constant <= 0:
        raise ValueError(f"reduction 'constant' needs a positive constant, got {constant}")
    return real / constant


def token_weights(
    arrays: Mapping[str, Array],
    denominators: Denominators,
    reduction: Reduction,
    *,
    dp_size: int = 1,
    constant: float | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> npt.NDArray[Any]:
    """[B, W] in `dtype`, the weight of each label in `arrays`.

    It lies like `labels`: shift both alike, multiply with the loss of each target, sum.
    """
    rows = row_weights(arrays, denominators, reduction, dp_size=dp_size, constant=constant).astype(dtype)
    labels = arrays["labels"]
    if "segment_ids" not in arrays:
        per_token = np.broadcast_to(rows[:, None], labels.shape)
    else:
        offsets = arrays["cu_seqlens_offsets"]
        firsts = offsets[:-1] - offsets[0] - np.arange(len(offsets) - 1)
        per_token = rows[np.maximum(arrays["segment_ids"] - 1, 0) + firsts[:, None]]
    return np.where(labels != IGNORED, per_token, np.zeros((), dtype))
