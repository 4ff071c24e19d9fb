"""One data-parallel rank's shard, cut for its context-parallel ranks: each gets its tokens of every line.

Axes: B lines, W columns, C context-parallel ranks, L = W / C.
1. A line is cut as one piece, the columns of its micro-batch; with `zigzag` and several rows on a line (`packed`) as a piece per row,
   alignment included, and one for the padding after them. The columns beyond the micro-batch are a piece too.
2. What concerns the token that is predicted (`labels`, `loss_mask`, extra columns) moves to the token that predicts it.
3. A rank gets of each piece, cut into 2 * C equal parts, those of number c and 2 * C - 1 - c (`zigzag`, `head_tail`), or of C parts
   the one of number c (`contiguous`).

Always true:
- over the ranks, every cell of the shard comes once;
- `position_ids`, `segment_ids` and `cu_seqlens` are those of the whole line; `cu_seqlens_local` (`packed`, `zigzag`) says where the rows
  lie on the rank's own line, which is C times shorter;
- denominators, arrays per row and row ids stay whole: weights are those of the whole mini-batch, and no label is lost or doubled;
- a rank's causal work is a C-th of the shard's with `zigzag`, to the diagonal of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import IGNORED
from raysvc.collate.shard import Array, MicroBatchInfo, Shard
from raysvc.errors import ConfigError
from raysvc.job.plan_config import CpSplit
from raysvc.ragged import Int64s, offsets_of

OF_INPUTS = ("input_ids", "attention_mask", "position_ids", "segment_ids")  # they concern the token itself


def cp_cut(shard: Shard, cp_size: int, split: CpSplit) -> tuple[Shard, ...]:
    """The shard of each context-parallel rank.

    Args:
        shard: of a data-parallel rank.
        cp_size: context-parallel ranks; one has all tokens, and its labels move too: a loop runs with any number.
        split: which tokens a rank gets.

    Raises:
        ConfigError: a row or a line does not divide, or the rows have media.
    """
    pieces = _pieces(shard, split)
    if cp_size > 1 and np.any(pieces[:, 1] % (2 * cp_size)):
        what = f"rows and lines do not divide into {2 * cp_size} parts, for cp={cp_size}"
        raise ConfigError("plan.align", what, f"make it and plan.pad_to_multiple multiples of {2 * cp_size}")
    names = [
        name for name, array in shard.arrays.items() if array.ndim >= 2 and name not in shard.row_vectors
    ]
    whole = {name: shard.arrays[name] for name in names}
    cells = {name: array if name in OF_INPUTS else _shifted(name, array) for name, array in whole.items()}
    used = _used(shard)
    return tuple(
        _part(shard, cells, used, _index(pieces, cp_size, rank, split), cp_size, split)
        for rank in range(cp_size)
    )


def _part(
    shard: Shard,
    cells: dict[str, Array],
    used: npt.NDArray[np.bool_],
    index: Int64s,
    cp_size: int,
    split: CpSplit,
) -> Shard:
    """One rank's shard; `index`: int64 [B * L], its cells among those of the shard."""
    lines = len(used)
    arrays = dict(shard.arrays)
    for name, array in cells.items():
        rest = array.shape[2:]
        arrays[name] = np.ascontiguousarray(array).reshape(-1, *rest)[index].reshape(lines, -1, *rest)
    if shard.layout == "packed" and split == "zigzag":
        arrays["cu_seqlens_local"] = shard.arrays["cu_seqlens"] // np.int32(cp_size)
    tokens = used.reshape(-1)[index].reshape(lines, -1).sum(axis=1)
    micros = tuple(
        MicroBatchInfo(
            micro.start, micro.stop, micro.width // cp_size, int(tokens[micro.start : micro.stop].sum())
        )
        for micro in shard.micro_batches
    )
    return replace(shard, arrays=arrays, micro_batches=micros)


def _pieces(shard: Shard, split: CpSplit) -> Int64s:
    """int64 [P, 2], first cell and length of each piece, line after line, in the order of its columns."""
    lines, width = _shape(shard)
    widths = np.concatenate([np.full(micro.stop - micro.start, micro.width) for micro in shard.micro_batches])
    begins = np.arange(lines) * width
    if split != "zigzag" or shard.layout != "packed":
        middle = width - widths if shard.layout == "padded_left" else widths
        starts = np.stack([begins, begins + middle], axis=1).ravel()
    else:
        bounds, offsets = shard.arrays["cu_seqlens"].astype(np.int64), shard.arrays["cu_seqlens_offsets"]
        of_rows = bounds + np.repeat(begins, np.diff(offsets))  # where the last row ends, padding begins
        starts = np.insert(of_rows, offsets[1:], begins + widths)
    return np.stack([starts, np.append(starts[1:], lines * width) - starts], axis=1)


def _index(pieces: Int64s, cp_size: int, rank: int, split: CpSplit) -> Int64s:
    """int64, the cells of one rank, piece after piece."""
    starts, lengths = pieces[:, 0], pieces[:, 1]
    whole = cp_size == 1 or split == "contiguous"
    numbers, count = ([rank], cp_size) if whole else ([rank, 2 * cp_size - 1 - rank], 2 * cp_size)
    parts = np.repeat(lengths // count, len(numbers))
    first = np.repeat(starts, len(numbers)) + np.tile(numbers, len(starts)) * parts
    return np.arange(parts.sum()) + np.repeat(first - offsets_of(parts)[:-1], parts)


def _shifted(name: str, array: Array) -> Array:
    """Each cell with the value of the next one on its line."""
    out = np.empty_like(array)
    out[:, :-1] = array[:, 1:]
    out[:, -1] = IGNORED if name == "labels" else np.zeros((), array.dtype)
    return out


def _used(shard: Shard) -> npt.NDArray[np.bool_]:
    """bool [B, W], cells that hold a token of a row or a dummy."""
    lines, width = _shape(shard)
    lengths, columns = shard.arrays["seq_lengths"].astype(np.int64), np.arange(width)
    if "cu_seqlens" not in shard.arrays:
        if shard.layout == "padded_left":
            columns = columns[::-1]
        return columns < lengths[:, None]
    offsets = shard.arrays["cu_seqlens_offsets"]
    rows = np.diff(offsets) - 1
    begins = np.delete(shard.arrays["cu_seqlens"], offsets[1:] - 1) + np.repeat(
        np.arange(lines) * width, rows
    )
    change = np.zeros(lines * width + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, begins + lengths, -1)
    return np.cumsum(change[:-1]).reshape(lines, width) > 0


def _shape(shard: Shard) -> tuple[int, int]:
    of_tokens: Any = next(
        array for name, array in shard.arrays.items() if array.ndim >= 2 and name not in shard.row_vectors
    )
    return of_tokens.shape[0], of_tokens.shape[1]
