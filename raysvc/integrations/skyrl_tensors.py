"""Defines what a ref of a SkyRL batch holds, and the worker's part: SkyRL's tensors of it.

Axes: B rows of a rank, L width, A columns of responses; packed: B lines.
Always true:
- padded: `sequences`, `attention_mask` [B, L], all others [B, A], at the right edge and 0 outside the row's response;
- packed: `loss_mask` [B, L - 1] has at p the weight of token p + 1; `sub_seq_lengths` has the rows of each line;
- the weights of a reduction are in `advantages` where there are some, else in `loss_mask`; SkyRL sums;
- what fills up a rank has no target and is in no denominator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.collate.columns import IGNORED
from raysvc.collate.loss_weights import loss_scale, token_weights
from raysvc.collate.reused_memory import ReusedMemory
from raysvc.collate.shard import Array, Shard
from raysvc.integrations.skyrl_rules import (
    ONE_FACTOR,
    REDUCTIONS,
    THEIR_NAMES,
    WHOLE_ROW,
    Common,
    SkyRLRules,
    check_media,
    targets_of,
)
from raysvc.plan.rank_plan import DUMMY_LENGTH
from raysvc.ragged import Int64s, offsets_of

if TYPE_CHECKING:
    import torch

MEMORY = ReusedMemory(small_bytes=1 << 20)
_LINE = 64  # bytes; every column begins at a multiple of it


@dataclass(frozen=True, eq=False, repr=False)
class BatchShard(Shard):
    """Holds what a rank's batch is made of; a ref of it opens as a `TrainingInputBatch`.

    Its arrays are those of a packed shard, or `input_ids` [B, L], `loss_mask` [B, A], further columns [B, L], [B, A] or [B],
    and of each row `seq_lengths`, `response_lengths` if they are known, and `loss_weights` where targets weigh differently.

    Attributes:
        common: of the mini-batch.
        rules: how.
    """

    common: Common = field(kw_only=True)
    rules: SkyRLRules = field(kw_only=True)

    def to_wire(self) -> Any:
        """Returns what opens as a batch."""
        return _PickledBatch(self)


class _PickledBatch:
    """Pickled as a shard, opened as a `TrainingInputBatch`: SkyRL's own pickle would copy every tensor three times."""

    def __init__(self, shard: BatchShard) -> None:
        self._shard = shard

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[BatchShard]]:
        return training_batch, (self._shard,)


def training_batch(shard: BatchShard) -> Any:
    """SkyRL's `TrainingInputBatch`; its tensors are its own memory. What opening a ref of such a role calls.

    Raises:
        ConfigError: as `training_input`.
    """
    from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch

    columns, response, row_ids, lengths = training_input(shard)
    batch = TrainingInputBatch(columns)
    if lengths:
        batch["sub_seq_lengths"] = TensorList(list(lengths))
    batch.metadata = {"response_length": response, "row_ids": row_ids}
    return batch


class TrainingInput(NamedTuple):
    """Holds what a `TrainingInputBatch` is made of; needs torch alone.

    Attributes:
        columns: name -> tensor.
        response_length: A; L - 1 where rows are packed.
        row_ids: of each row of the batch, -1 for what fills up; packed: of each row of each line.
        sub_seq_lengths: packed: int64 tokens of the rows of each line; else ().
    """

    columns: dict[str, torch.Tensor]
    response_length: int
    row_ids: list[int]
    sub_seq_lengths: tuple[torch.Tensor, ...] = ()


def training_input(shard: BatchShard) -> TrainingInput:
    """The tensors of a rank.

    Further columns of the plan come along under SkyRL's names. One value per row is spread over the response; `rewards`
    stands at its last token.

    Raises:
        ConfigError: it has arrays of media.
    """
    check_media(shard.arrays)
    return (_packed if shard.layout == "packed" else _padded)(shard)


def _padded(shard: BatchShard) -> TrainingInput:
    import torch

    rows, width, response = shard.common
    arrays = dict(shard.arrays)
    ids, mask, lengths = (arrays.pop(name) for name in ("input_ids", "loss_mask", "seq_lengths"))
    counts, weights = (arrays.pop(name, None) for name in ("response_lengths", "loss_weights"))
    scale = _factor(shard) if weights is None else weights[:, None]  # [] or [B, 1]
    real, pad = shard.row_ids >= 0, np.int32(shard.pad_token_id)
    whole = _Lines(np.where(real, lengths, 0))
    parts = _Lines(np.where(real, np.minimum(lengths, response), 0) if counts is None else counts)
    columns = room(
        sequences=((rows, width), np.int64),
        attention_mask=((rows, width), np.int64),
        **({} if counts is None else {"response_mask": ((rows, response), np.int64)}),
    )
    differing = whole.padded(ids ^ pad, width)
    differing ^= pad
    torch.from_numpy(columns["sequences"]).copy_(torch.from_numpy(differing))  # faster than numpy's
    last_ones(lengths, columns["attention_mask"])
    loss = mask.astype(np.float32)
    if scale is not None and "advantages" not in arrays:
        loss *= np.repeat(scale, parts.lengths) if scale.ndim else scale
    columns["loss_mask"] = parts.padded(loss, response)
    if counts is not None:
        last_ones(counts, columns["response_mask"])
    for name, given in arrays.items():
        values = given if given.dtype.kind != "f" else given.astype(np.float32, copy=False)
        if values.ndim > 2:
            cells = values.copy() if values is given else values
        elif values.ndim == 1:
            cells = whole.padded(values, width) if name in WHOLE_ROW else parts.padded(values, response)
        elif name == "rewards":
            cells = np.zeros((rows, response), values.dtype)
            cells[:, -1:] = np.where(parts.lengths[:, None] > 0, values, values.dtype.type(0))
        else:
            cells = parts.padded(np.repeat(values[:, 0], parts.lengths), response)
        if name == "advantages" and scale is not None:
            cells = cells * scale
        columns[THEIR_NAMES.get(name, name)] = cells
    return TrainingInput(tensors_of(columns), response, shard.row_ids.tolist())


class _Lines:
    """Pieces one after the other, each brought to a line of its own.

    Attributes:
        lengths: int64 [B], numbers of each.
    """

    def __init__(self, lengths: Array) -> None:
        self.lengths: Int64s = lengths.astype(np.int64, copy=False)
        self._offsets = offsets_of(self.lengths)
        self._bounds: dict[int, Any] = {}  # size of a number -> Arrow's buffer of where each begins, in bytes

    def padded(self, values: Array, width: int) -> Array:
        """[B, width], the pieces of `values` [T] at the right edge, zeros elsewhere. None is longer than `width`.

        They are texts of bytes to Arrow: a copy of memory per row, where indices or masks cost operations per cell.
        """
        size = values.itemsize
        if size not in self._bounds:
            self._bounds[size] = pa.py_buffer(self._offsets * size)
        buffers = [None, self._bounds[size], pa.py_buffer(values)]
        texts = pa.Array.from_buffers(pa.large_string(), len(self.lengths), buffers)
        lines = pc.ascii_lpad(texts, width * size, "\0").buffers()[2]
        return np.frombuffer(lines, values.dtype).reshape(len(self.lengths), width)


def _packed(shard: BatchShard) -> TrainingInput:
    import torch

    rows, width, response = shard.common
    arrays = shard.arrays
    lines = len(arrays["input_ids"])
    columns = room(
        sequences=((rows, width), np.int64),
        attention_mask=((rows, width), np.int64),
        loss_mask=((rows, response), np.float32),
    )
    _fill(arrays["input_ids"], columns["sequences"], pad=shard.pad_token_id)
    _fill(np.minimum(arrays["segment_ids"], 1), columns["attention_mask"])
    _fill(targets_of(shard)[:, 1:], columns["loss_mask"], factor=_line_weights(shard))
    columns["attention_mask"][lines:, :DUMMY_LENGTH] = 1
    of_line = np.diff(arrays["cu_seqlens_offsets"].astype(np.int64)) - 1  # rows
    by_line = np.split(arrays["seq_lengths"].astype(np.int64), np.cumsum(of_line)[:-1])
    by_line += [np.array([DUMMY_LENGTH])] * (rows - lines)
    row_ids = _ids(shard.row_ids, len(shard.row_ids) + rows - lines)
    return TrainingInput(tensors_of(columns), response, row_ids, tuple(map(torch.from_numpy, by_line)))


def _line_weights(shard: BatchShard) -> Array | None:
    """float32 [B, L - 1], or [] where all targets weigh the same: of predicting the next token."""
    rules = shard.rules
    if rules.reduction is None:
        return None
    if (factor := _factor(shard)) is not None:
        return factor
    ours = REDUCTIONS[rules.reduction]
    as_labels = {**shard.arrays, "labels": np.where(targets_of(shard), 0, IGNORED)}
    return token_weights(as_labels, shard.denominators, ours, constant=rules.max_seq_len)[:, 1:]


def _factor(shard: BatchShard) -> Array | None:
    """float32 [], what every target weighs; None where they differ, or weigh nothing of their own."""
    if (reduction := shard.rules.reduction) is None or REDUCTIONS[reduction] not in ONE_FACTOR:
        return None
    constant = shard.rules.max_seq_len
    return np.array(loss_scale(shard.denominators, 1, REDUCTIONS[reduction], constant=constant), np.float32)


def room(**columns: tuple[tuple[int, ...], npt.DTypeLike]) -> dict[str, Array]:
    """name -> array of a shape and a type, with anything in it: one after the other in a block that is used again when they are gone."""
    begins, end = [], 0
    for shape, of_type in columns.values():
        begins.append(end)
        end += -(-prod(shape) * np.dtype(of_type).itemsize // _LINE) * _LINE
    block = MEMORY.take(end)
    return {
        name: np.ndarray(shape, of_type, block, begin)
        for (name, (shape, of_type)), begin in zip(columns.items(), begins, strict=True)
    }


def last_ones(counts: Array, out: Array) -> None:
    """1 in the last `counts` [B] columns of each row of `out` [B, w], 0 elsewhere."""
    import torch

    of_rows = torch.from_numpy(counts.astype(np.int64)[:, None])
    torch.le(_countdown(out.shape[1]), of_rows, out=torch.from_numpy(out))


@functools.lru_cache(maxsize=4)
def _countdown(width: int) -> torch.Tensor:
    import torch

    return torch.arange(width, 0, -1)


def _fill(values: Array, out: Array, pad: int = 0, factor: Array | None = None) -> None:
    """`values` [b, w] into the first rows and columns of `out` [B, W], times `factor` [] or [b, w]; `pad` elsewhere."""
    rows, width = values.shape
    cells = out[:rows, :width]
    cells[...] = values
    if factor is not None:
        _times(cells, factor)
    if cells.shape != out.shape:
        out[:rows, width:] = out[rows:] = pad


def _times(cells: Array, factor: Array) -> None:
    """Multiply in place; numpy's inner loop per row costs more than the row."""
    import torch

    torch.from_numpy(cells).mul_(torch.from_numpy(factor))


def tensors_of(columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Tensors over the same memory."""
    import torch

    return {  # numpy compares types of records slowly
        name: torch.from_numpy(each["bfloat16"]).view(torch.bfloat16)
        if each.dtype.kind == "V"
        else torch.from_numpy(each)
        for name, each in columns.items()
    }


def _ids(row_ids: Array, count: int) -> list[int]:
    ids: list[int] = row_ids.tolist()
    return ids + [-1] * (count - len(ids))
