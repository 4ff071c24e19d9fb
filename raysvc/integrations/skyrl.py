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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import IGNORED
from raysvc.collate.loss_weights import loss_scale, row_weights, token_weights
from raysvc.collate.reused_memory import ReusedMemory
from raysvc.collate.shard import Array, Shard, Wire, read_shard
from raysvc.errors import ConfigError
from raysvc.job.carried import BF16, dtype_name, scalar_of
from raysvc.job.config import Reduction as OurReduction
from raysvc.plan.rank_plan import DUMMY_LENGTH
from raysvc.ragged import offsets_of

if TYPE_CHECKING:
    import torch

Reduction = Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
REDUCTIONS: dict[str, OurReduction] = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt_mean",
}
THEIR_NAMES = {
    "old_logprobs": "action_log_probs",
    "ref_logprobs": "base_action_log_probs",
    "old_values": "values",
}
WHOLE_ROW = ("rollout_expert_indices", "router_padding_mask")  # [B, L, ...] in SkyRL too
OURS = {"input_ids", "attention_mask", "position_ids", "labels", "loss_mask", "segment_ids"}
OURS |= {"seq_lengths", "row_tokens", "row_group", "row_group_rows", "row_group_tokens"}
OURS |= {"cu_seqlens", "cu_seqlens_offsets"}
MEMORY = ReusedMemory(small_bytes=1 << 20)
_LINE = 64  # bytes; every column begins at a multiple of it


@dataclass(frozen=True)
class BatchRules:
    """How a batch is made of a shard.

    Attributes:
        reduction: SkyRL's `loss_reduction`; None leaves the loss mask and the advantages as they are.
        prompt_tokens: the per-row column that says where a row's response begins.
        max_seq_len: c tokens of `seq_mean_token_sum_norm`, SkyRL's `algorithm.max_seq_len`.
    """

    reduction: Reduction | None = "token_mean"
    prompt_tokens: str = "prompt_tokens"
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        if self.reduction is not None and self.reduction not in REDUCTIONS:
            what = f"{self.reduction!r} is not one of {', '.join(REDUCTIONS)}"
            raise ConfigError(
                "reduction", what, "use one of them; token_mean_legacy depends on micro-batches"
            )
        if self.reduction == "seq_mean_token_sum_norm" and not (self.max_seq_len and self.max_seq_len > 0):
            raise ConfigError("max_seq_len", f"is {self.max_seq_len!r}", "give SkyRL's algorithm.max_seq_len")


class Common(NamedTuple):
    """What the batches of all ranks of a mini-batch have in common: B, L and A."""

    rows: int
    width: int
    response: int


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


def common_shape(shards: Sequence[Shard], rules: BatchRules | None = None) -> Common:
    """Of the mini-batch whose shards these are.

    Raises:
        ConfigError: as `training_input`.
    """
    rules = rules or BatchRules()
    for shard in shards:
        _check(shard, rules)
    lines = [shard.arrays["input_ids"].shape for shard in shards]
    rows, width = max(shape[0] for shape in lines), max(shape[1] for shape in lines)
    if shards[0].layout == "packed":
        return Common(rows, width, width - 1)
    responses = [shard.arrays["seq_lengths"] - _starts(shard, rules) for shard in shards]
    return Common(rows, width, max(1, *(int(each.max()) for each in responses)))


def _check(shard: Shard, rules: BatchRules) -> None:
    if shard.layout not in ("padded_left", "packed"):
        what = f"is {shard.layout}, and SkyRL pads on the left or packs"
        raise ConfigError("plan.layout", what, "use plan.layout=padded_left, or packed")
    names = _others(shard, rules)
    for name in names:
        values = shard.arrays[name]
        if name in shard.row_vectors or values.dtype.kind == "U":
            what = f"{name!r} is {dtype_name(values.dtype)} {list(values.shape)}: no number per row or token"
            raise ConfigError("plan.columns", what, "leave it out; SkyRL's batch has no place for it")
    if shard.layout == "packed":
        if names:
            what = f"{', '.join(names)} with layout: packed, and SkyRL packs tokens and loss masks only"
            raise ConfigError("plan.columns", what, "leave them out, or use plan.layout=padded_left")
        return
    starts, real = _starts(shard, rules), shard.row_ids >= 0
    if rules.prompt_tokens not in shard.arrays:
        if inside := [name for name in names if name not in WHOLE_ROW]:
            what = f"{', '.join(inside)} belong to responses, and no column says where those begin"
            remedy = f"add a per-row column {rules.prompt_tokens!r}, the tokens before the response"
            raise ConfigError("plan.columns", what, remedy)
    elif bool(((starts < 1) | (starts > shard.arrays["seq_lengths"]))[real].any()):
        row = int(np.flatnonzero(real & ((starts < 1) | (starts > shard.arrays["seq_lengths"])))[0])
        what = f"is {int(starts[row])} for a row of {int(shard.arrays['seq_lengths'][row])} tokens"
        raise ConfigError(rules.prompt_tokens, what, "a response begins after at least one token")
    elif bool((_first_targets(shard) < starts)[real].any()):
        row = int(shard.row_ids[np.flatnonzero(real & (_first_targets(shard) < starts))[0]])
        what = f"row {row} has a target before its response"
        raise ConfigError(rules.prompt_tokens, what, "mask the prompt, or begin the response earlier")


def _others(shard: Shard, rules: BatchRules) -> list[str]:
    return [name for name in shard.arrays if name not in OURS and name != rules.prompt_tokens]


def _targets(shard: Shard) -> Array:
    """bool [B, L]."""
    if "loss_mask" in shard.arrays:
        return shard.arrays["loss_mask"].view(np.bool_)
    return np.asarray(shard.arrays["labels"] != IGNORED)


def _first_targets(shard: Shard) -> Array:
    """int [S], tokens of each row before its first target; all of them where it has none."""
    targets = _targets(shard)
    first = targets.argmax(axis=1) - (targets.shape[1] - shard.arrays["seq_lengths"])
    return np.where(shard.arrays["row_tokens"] > 0, first, shard.arrays["seq_lengths"])


def _starts(shard: Shard, rules: BatchRules) -> Array:
    """int [S], tokens of each row before its response; all of a dummy's."""
    starts = shard.arrays.get(rules.prompt_tokens)
    if starts is None:
        return _first_targets(shard)
    return np.where(shard.row_ids >= 0, starts, shard.arrays["seq_lengths"])


def _padded(shard: Shard, common: Common, rules: BatchRules) -> TrainingInput:
    rows, width, response = common
    arrays = shard.arrays
    lengths = _filled(arrays["seq_lengths"][:, None], (rows, 1), pad=DUMMY_LENGTH)
    weights = None if rules.reduction is None else _filled(_row_weights(shard, rules)[:, None], (rows, 1))
    in_loss_mask = weights is not None and "advantages" not in arrays
    ids, attention, mask, in_response = _room(
        (rows, width, np.int64),
        (rows, width, np.int64),
        (rows, response, np.float32),
        (rows, response, np.int64),
    )
    factor = weights if in_loss_mask else None
    columns = {
        "sequences": _filled(arrays["input_ids"], (rows, width), pad=shard.pad_token_id, out=ids),
        "attention_mask": _last_ones(lengths, attention),
        "loss_mask": _filled(_targets(shard), (rows, response), factor=factor, out=mask),
    }
    if rules.prompt_tokens in arrays:
        starts = _filled(_starts(shard, rules)[:, None], (rows, 1), pad=DUMMY_LENGTH)
        columns["response_mask"] = _last_ones(lengths - starts, in_response)
        outside = in_response == 0
    for name in _others(shard, rules):
        values, theirs = arrays[name], THEIR_NAMES.get(name, name)
        if name in WHOLE_ROW:
            columns[name] = _filled(values, (rows, width))
            continue
        if values.ndim > 1:
            cells = _filled(values, (rows, response))
        else:
            cells = np.repeat(_filled(values[:, None], (rows, 1)), response, axis=1)
            if name == "rewards":
                cells[:, :-1] = 0
        cells[outside] = np.zeros((), cells.dtype)
        columns[theirs] = cells if name != "advantages" or weights is None else cells * weights
    return TrainingInput(_tensors(columns), response, _ids(shard.row_ids, rows))


def _packed(shard: Shard, common: Common, rules: BatchRules) -> TrainingInput:
    import torch

    rows, width, response = common
    arrays = shard.arrays
    lines = len(arrays["input_ids"])
    next_is_target = _targets(shard)[:, 1:]
    ids, attention, mask = _room(
        (rows, width, np.int64), (rows, width, np.int64), (rows, response, np.float32)
    )
    pad, factor = shard.pad_token_id, _line_weights(shard, rules)
    columns = {
        "sequences": _filled(arrays["input_ids"], (rows, width), pad=pad, left=False, out=ids),
        "attention_mask": _filled(arrays["segment_ids"] > 0, (rows, width), left=False, out=attention),
        "loss_mask": _filled(next_is_target, (rows, response), left=False, factor=factor, out=mask),
    }
    columns["attention_mask"][lines:, :DUMMY_LENGTH] = 1
    of_line = np.diff(arrays["cu_seqlens_offsets"].astype(np.int64)) - 1  # rows
    by_line = np.split(arrays["seq_lengths"].astype(np.int64), np.cumsum(of_line)[:-1])
    by_line += [np.array([DUMMY_LENGTH])] * (rows - lines)
    row_ids = _ids(shard.row_ids, len(shard.row_ids) + rows - lines)
    return TrainingInput(_tensors(columns), response, row_ids, tuple(map(torch.from_numpy, by_line)))


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
    as_labels = {**shard.arrays, "labels": np.where(_targets(shard), 0, IGNORED)}
    return token_weights(as_labels, shard.denominators, ours, constant=rules.max_seq_len)[:, 1:]


def _room(*columns: tuple[int, int, npt.DTypeLike]) -> list[Array]:
    """Arrays of these shapes and types, in one block that is used again when the batch in it is gone."""
    sizes = [-(-rows * width * np.dtype(dtype).itemsize // _LINE) * _LINE for rows, width, dtype in columns]
    block, starts = MEMORY.take(sum(sizes)), offsets_of(sizes).tolist()
    return [
        block[start : start + rows * width * np.dtype(dtype).itemsize].view(dtype).reshape(rows, width)
        for start, (rows, width, dtype) in zip(starts, columns, strict=False)
    ]


def _last_ones(counts: Array, out: Array) -> Array:
    """`out` [B, w], with 1 in the last `counts` [B, 1] columns of each row, 0 elsewhere."""
    import torch

    left = torch.arange(out.shape[1], 0, -1)
    torch.le(left, torch.from_numpy(counts.astype(np.int64)), out=torch.from_numpy(out))
    return out


def _filled(
    values: Array,
    shape: tuple[int, int],
    *,
    pad: int = 0,
    left: bool = True,
    factor: Array | None = None,
    out: Array | None = None,
) -> Array:
    """[*shape, ...] with the last (`left`: else the first) columns of `values` [b, w, ...] in its first rows, `pad` elsewhere.

    `factor` multiplies the values, [] or [b, w], or [shape[0], 1].
    """
    if out is None:
        dtype = np.float32 if values.dtype in (np.float64, np.float16) else values.dtype
        out = np.empty((*shape, *values.shape[2:]), dtype)
    rows, width = len(values), min(values.shape[1], shape[1])
    of_out = slice(shape[1] - width, None) if left else slice(0, width)
    of_values = slice(values.shape[1] - width, None) if left else slice(0, width)
    beside = slice(0, shape[1] - width) if left else slice(width, None)
    if factor is None:
        out[:rows, of_out] = values[:, of_values]
    else:
        np.multiply(values[:, of_values], factor[:rows] if factor.ndim else factor, out=out[:rows, of_out])
    out[:rows, beside] = out[rows:] = scalar_of(pad, out.dtype)
    return out


def _tensors(columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    import torch

    plain = {name: torch.from_numpy(each) for name, each in columns.items() if each.dtype != BF16}
    halves = {name: each["bfloat16"] for name, each in columns.items() if each.dtype == BF16}
    return plain | {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in halves.items()}


def _ids(row_ids: Array, count: int) -> list[int]:
    ids: list[int] = row_ids.tolist()
    return ids + [-1] * (count - len(ids))
