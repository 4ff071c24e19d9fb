"""Mini-batches as refs that stock SkyRL workers take: one `TrainingInputBatch` per data-parallel rank.

    staged = [batch_refs(mini.shards) for mini in step.mini_batches]  # [mini][dp], as MeshDispatch.stage_chunks
    MeshDispatch.dispatch_from_staged(actor_infos, "forward_backward", staged[0])

Axes: R ranks, B rows of a rank, L width, A columns of responses, S rows and dummies of a shard; packed: B lines.
1. A task takes the shards of all ranks and finds what the ranks must have in common.
2. It gives back each rank's arrays as they are, small; the worker that opens a ref makes the batch.
Always true:
- all ranks have the same B, L and A, so that SkyRL's iterators make equally many micro-batches on each;
- padded: `sequences`, `attention_mask` [B, L], all others [B, A], at the right edge and 0 outside the row's response;
- packed: `loss_mask` [B, L - 1] has at p the weight of token p + 1; `sub_seq_lengths` has the rows of each line;
- the weights of a reduction are in `advantages` where there are some, else in `loss_mask`; SkyRL sums;
- what fills up a rank has no target and is in no denominator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import IGNORED
from raysvc.collate.fill_padded import RowMask
from raysvc.collate.loss_weights import loss_scale, row_weights, token_weights
from raysvc.collate.reused_memory import ReusedMemory
from raysvc.collate.shard import Array, Shard, Wire, read_shard
from raysvc.integrations.skyrl_rules import (
    REDUCTIONS,
    THEIR_NAMES,
    WHOLE_ROW,
    BatchRules,
    Common,
    Reduction,
    common_shape,
    others_of,
    starts_of,
    targets_of,
)
from raysvc.job.carried import scalar_of
from raysvc.plan.rank_plan import DUMMY_LENGTH

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchRules",
    "Common",
    "TrainingInput",
    "batch_refs",
    "common_shape",
    "training_batch",
    "training_input",
]
MEMORY = ReusedMemory(small_bytes=1 << 20)
_LINE = 64  # bytes; every column begins at a multiple of it


def batch_refs(
    shards: Sequence[Any],
    *,
    reduction: Reduction | None = "token_mean",
    prompt_tokens: str = "prompt_tokens",
    max_seq_len: int | None = None,
) -> list[Any]:
    """Refs to a ready `TrainingInputBatch` for each rank; returns at once, also for shards that are not there yet.

    Metadata: `response_length`, and `row_ids` with -1 for what fills up, the order of SkyRL's per-sample outputs.

    Args:
        shards: refs of all ranks of a mini-batch: `Mini.shards`, or those of a role.
        reduction: SkyRL's `loss_reduction`; None scales nothing.
        prompt_tokens: per-row column with the tokens before the response. Without it only loss masks travel, as in
            SkyRL's SFT; `response_mask` and columns of responses need it.
        max_seq_len: SkyRL's `algorithm.max_seq_len`, for `seq_mean_token_sum_norm`.

    Raises:
        ConfigError: a rule that SkyRL does not have. What is wrong with the rows is raised where the refs are used.
    """
    rules = BatchRules(reduction, prompt_tokens, max_seq_len)
    refs = _task().options(num_returns=len(shards)).remote(rules, *shards)
    return [refs] if len(shards) == 1 else list(refs)


@functools.cache
def _task() -> Any:
    """No CPU of its own: a cluster whose CPUs all belong to trainers would wait for one without end."""
    import ray

    return ray.remote(num_cpus=0)(_rank_batches)


def _rank_batches(rules: BatchRules, *values: Wire) -> Any:
    shards = [read_shard(value) for value in values]
    common = common_shape(shards, rules)
    made = [_RankBatch(shard, common, rules) for shard in shards]
    return made[0] if len(made) == 1 else made


class _RankBatch:
    """Opens as a `TrainingInputBatch`: SkyRL's own pickle would copy every tensor three times."""

    def __init__(self, shard: Shard, common: Common, rules: BatchRules) -> None:
        self._parts = (shard.to_wire(), common, rules)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return training_batch, self._parts


def training_batch(value: Wire | Shard, common: Common | None = None, rules: BatchRules | None = None) -> Any:
    """SkyRL's `TrainingInputBatch` of a shard; its tensors are its own memory.

    Args:
        value: a shard, or what a ref of `Mini.shards` holds.
        common: of the mini-batch (`common_shape`); None: the shard's own.
        rules: how.

    Raises:
        ConfigError: as `training_input`.
    """
    from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch

    shard = read_shard(value)
    columns, response, row_ids, lengths = training_input(shard, common, rules)
    batch = TrainingInputBatch(columns)
    if lengths:
        batch["sub_seq_lengths"] = TensorList(list(lengths))
    batch.metadata = {"response_length": response, "row_ids": row_ids}
    return batch


class TrainingInput(NamedTuple):
    """What a `TrainingInputBatch` is made of; needs torch alone.

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


def training_input(
    shard: Shard, common: Common | None = None, rules: BatchRules | None = None
) -> TrainingInput:
    """The tensors of a shard; see the module.

    Further columns of the plan come along under SkyRL's names. One value per row is spread over the response; `rewards`
    stands at its last token.

    Raises:
        ConfigError: the layout is not `padded_left` or `packed`; a column that SkyRL's batch has no place for; columns of
            responses, but nothing that says where they begin; a target before the response.
    """
    rules = rules or BatchRules()
    common = common or common_shape([shard], rules)
    return (_packed if shard.layout == "packed" else _padded)(shard, common, rules)


def _padded(shard: Shard, common: Common, rules: BatchRules) -> TrainingInput:
    rows, width, response = common
    arrays, names = shard.arrays, others_of(shard, rules)
    weights = None if rules.reduction is None else _each(_row_weights(shard, rules), rows, 0)[:, None]
    in_loss_mask = weights is not None and "advantages" not in arrays
    lengths = _each(arrays["seq_lengths"], rows, DUMMY_LENGTH)
    columns = Room(
        sequences=((rows, width), np.int64),
        attention_mask=((rows, width), np.int64),
        loss_mask=((rows, response), np.float32),
        **({"response_mask": ((rows, response), np.int64)} if rules.prompt_tokens in arrays else {}),
        **{THEIR_NAMES.get(name, name): _shape_of(name, arrays[name], common) for name in names},
    ).take()
    _fill(arrays["input_ids"], columns["sequences"], pad=shard.pad_token_id)
    last_ones(lengths, columns["attention_mask"])
    _fill(targets_of(shard), columns["loss_mask"], factor=weights if in_loss_mask else None)
    if rules.prompt_tokens in arrays:
        counts = lengths - _each(starts_of(shard, rules), rows, DUMMY_LENGTH)
        last_ones(counts, columns["response_mask"])
        inside = RowMask(counts.astype(np.int64), response, left=True)
    for name in names:
        values, cells = arrays[name], columns[THEIR_NAMES.get(name, name)]
        if name in WHOLE_ROW or values.ndim > 2:
            _fill(values, cells)
            if name not in WHOLE_ROW:
                cells[inside.bits(np.dtype(np.uint8)) == 0] = np.zeros((), cells.dtype)
        elif values.ndim == 2:
            _fill(values, cells, inside=inside)
        else:
            cells[...] = inside.spread(_each(values.astype(cells.dtype, copy=False), rows, 0))
            if name == "rewards":
                cells[:, :-1] = 0
        if name == "advantages" and weights is not None:
            columns[name] = cells * weights
    return TrainingInput(tensors_of(columns), response, _ids(shard.row_ids, rows))


def _packed(shard: Shard, common: Common, rules: BatchRules) -> TrainingInput:
    import torch

    rows, width, response = common
    arrays = shard.arrays
    lines = len(arrays["input_ids"])
    columns = Room(
        sequences=((rows, width), np.int64),
        attention_mask=((rows, width), np.int64),
        loss_mask=((rows, response), np.float32),
    ).take()
    _fill(arrays["input_ids"], columns["sequences"], pad=shard.pad_token_id, left=False)
    _fill(np.minimum(arrays["segment_ids"], 1), columns["attention_mask"], left=False)
    _fill(targets_of(shard)[:, 1:], columns["loss_mask"], left=False, factor=_line_weights(shard, rules))
    columns["attention_mask"][lines:, :DUMMY_LENGTH] = 1
    of_line = np.diff(arrays["cu_seqlens_offsets"].astype(np.int64)) - 1  # rows
    by_line = np.split(arrays["seq_lengths"].astype(np.int64), np.cumsum(of_line)[:-1])
    by_line += [np.array([DUMMY_LENGTH])] * (rows - lines)
    row_ids = _ids(shard.row_ids, len(shard.row_ids) + rows - lines)
    return TrainingInput(tensors_of(columns), response, row_ids, tuple(map(torch.from_numpy, by_line)))


def _shape_of(name: str, values: Array, common: Common) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Of the batch's column of an array per row or token."""
    width = common.width if name in WHOLE_ROW else common.response
    dtype = np.dtype(np.float32) if values.dtype in (np.float64, np.float16) else values.dtype
    return (common.rows, width, *values.shape[2:]), dtype


def _each(values: Array, rows: int, pad: int) -> Array:
    """[rows], `values` and as many pads as are missing."""
    return (
        values if len(values) == rows else np.append(values, np.full(rows - len(values), pad, values.dtype))
    )


def _row_weights(shard: Shard, rules: BatchRules) -> Array:
    """float32 [S]; SkyRL's gradients are sums over ranks."""
    assert rules.reduction is not None
    ours = REDUCTIONS[rules.reduction]
    weights = row_weights(shard.arrays, shard.denominators, ours, constant=rules.max_seq_len)
    return weights.astype(np.float32)


def _line_weights(shard: Shard, rules: BatchRules) -> Array | None:
    """float32 [B, L - 1], or [] where all targets weigh the same: of predicting the next token."""
    if rules.reduction is None:
        return None
    ours = REDUCTIONS[rules.reduction]
    if ours in ("token_mean", "constant"):
        return np.array(loss_scale(shard.denominators, 1, ours, constant=rules.max_seq_len), np.float32)
    as_labels = {**shard.arrays, "labels": np.where(targets_of(shard), 0, IGNORED)}
    return token_weights(as_labels, shard.denominators, ours, constant=rules.max_seq_len)[:, 1:]


class Room:
    """Arrays of some shapes and types, one after the other in a block that is used again when they are gone."""

    def __init__(self, **columns: tuple[tuple[int, ...], npt.DTypeLike]) -> None:
        self._parts: list[tuple[str, int, int, np.dtype[Any], tuple[int, ...]]] = []
        self._bytes = 0
        for name, (shape, of_type) in columns.items():
            dtype = np.dtype(of_type)
            size = prod(shape) * dtype.itemsize
            self._parts.append((name, self._bytes, self._bytes + size, dtype, shape))
            self._bytes += -(-size // _LINE) * _LINE

    def take(self) -> dict[str, Array]:
        """name -> array, with anything in it."""
        block = MEMORY.take(self._bytes)
        return {name: block[a:b].view(dtype).reshape(shape) for name, a, b, dtype, shape in self._parts}


def last_ones(counts: Array, out: Array) -> None:
    """1 in the last `counts` [B] columns of each row of `out` [B, w], 0 elsewhere."""
    import torch

    left = torch.arange(out.shape[1], 0, -1)
    torch.le(left, torch.from_numpy(counts.astype(np.int64, copy=False)[:, None]), out=torch.from_numpy(out))


def _fill(
    values: Array,
    out: Array,
    *,
    pad: int = 0,
    left: bool = True,
    factor: Array | None = None,
    inside: RowMask | None = None,
) -> None:
    """The last (`left`: else the first) columns of `values` [b, w, ...] into the first rows of `out` [B, W, ...], `pad` elsewhere.

    `factor` multiplies the values, [] or [b, w], or [B, 1]; zeros are outside of `inside` [B, W].
    """
    rows, width = len(values), min(values.shape[1], out.shape[1])
    edge, beside = slice(0, width), slice(width, None)
    if left:
        edge, beside = slice(out.shape[1] - width, None), slice(0, out.shape[1] - width)
        values = values[:, values.shape[1] - width :]
    else:
        values = values[:, :width]
    cells = out[:rows, edge]
    if inside is None:
        cells[...] = values
    else:
        bits = inside.bits(out.dtype)[:rows, edge]
        np.bitwise_and(
            values.astype(out.dtype, copy=False).view(bits.dtype), bits, out=cells.view(bits.dtype)
        )
    if factor is not None:
        import torch  # an inner loop per row costs numpy more than the row

        torch.from_numpy(cells).mul_(torch.from_numpy(factor[:rows] if factor.ndim else factor))
    if cells.shape != out.shape:
        out[:rows, beside] = out[rows:] = scalar_of(pad, out.dtype)


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
