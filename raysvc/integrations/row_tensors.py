"""Columns of rows as tensors, rows padded on the right; labels as hosts want them that do not move them themselves.

Always true:
- rows are in the order in which they were read;
- no Python runs per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import BF16, scalar_of

if TYPE_CHECKING:
    import torch

    from raysvc.row_batch import Array, RowBatch

Tensors = dict[str, "torch.Tensor"]


def laid(rows: RowBatch, name: str, width: int, pad: float | int) -> Array:
    """[B, width, *shape] of a column per token, [B, *shape] of one per row."""
    cell = rows.cell(name)
    if cell is None:
        return np.array(rows.rows[name])
    dtype, shape = cell
    sheet = np.full((len(rows), width, *shape), scalar_of(pad, dtype), dtype)
    for line, (start, length) in enumerate(zip(rows.offsets.tolist(), rows.lengths.tolist(), strict=False)):
        whole = (
            rows.wide[name].pieces[line] if name in rows.wide else rows.tokens[name][start : start + length]
        )
        kept = min(length, width)  # a collator may have cut the row's end
        sheet[line, :kept] = whole[:kept]
    return sheet


def moved_labels(labels: torch.Tensor, cp: int = 1) -> torch.Tensor:
    """The labels of whole lines, int64 [B, L], each at the token that predicts it: before a host cuts lines for `cp` ranks.

    Raises:
        ConfigError: it cannot cut them into two parts a rank.
    """
    parts, width = 2 * cp, labels.shape[1]
    if cp > 1 and width % parts:
        what = f"makes lines of {width} tokens, which do not divide into {parts} parts, for cp={cp}"
        raise ConfigError("plan.pad_to_multiple", what, f"make it a multiple of {parts}")
    moved = labels.long().roll(-1, 1)
    moved[:, -1] = IGNORED
    return moved


def tensor_of(values: np.ndarray[Any, Any]) -> Any:
    """The array as a tensor of its own type; text as a list."""
    import torch

    if values.dtype.kind in "OU":
        return values.tolist()
    if values.dtype == BF16:
        return torch.from_numpy(values["bfloat16"]).view(torch.bfloat16)
    return torch.from_numpy(values)
