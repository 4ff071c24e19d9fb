"""What SkyRL's batch has places for, where responses begin, and what the ranks of a mini-batch must have in common.

Axes: B rows of a rank, L width, A columns of responses, S rows and dummies of a shard.
Always true:
- a response begins after at least one token, and no target is before it;
- a column that SkyRL's batch has no place for is refused by name, with what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from raysvc.collate.columns import IGNORED
from raysvc.collate.shard import BOUNDS, Array, Shard
from raysvc.errors import ConfigError
from raysvc.job.carried import dtype_name
from raysvc.job.config import Reduction as OurReduction

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
THEIR_OWN = ("sequences", "attention_mask", "loss_mask", "response_mask", "sub_seq_lengths")


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


def common_shape(shards: Sequence[Shard], rules: BatchRules | None = None) -> Common:
    """Of the mini-batch whose shards these are.

    Raises:
        ConfigError: as `training_input`.
    """
    rules = rules or BatchRules()
    responses = [_response_lengths(shard, rules) for shard in shards]
    lines = [shard.arrays["input_ids"].shape for shard in shards]
    rows, width = max(shape[0] for shape in lines), max(shape[1] for shape in lines)
    if shards[0].layout == "packed":
        return Common(rows, width, width - 1)
    return Common(rows, width, max(1, *(int(each.max()) for each in responses)))


def _response_lengths(shard: Shard, rules: BatchRules) -> Array:
    """int [S], tokens of each row's response; [0] where rows are packed.

    Raises:
        ConfigError: as `training_input`.
    """
    if shard.layout not in ("padded_left", "packed"):
        what = f"is {shard.layout}, and SkyRL pads on the left or packs"
        raise ConfigError("plan.layout", what, "use plan.layout=padded_left, or packed")
    names = others_of(shard, rules)
    _check_places(shard, names)
    if shard.layout == "packed":
        if names:
            what = f"{', '.join(names)} with layout: packed, and SkyRL packs tokens and loss masks only"
            raise ConfigError("plan.columns", what, "leave them out, or use plan.layout=padded_left")
        return np.zeros(1, np.int32)
    given, lengths, real = (
        shard.arrays.get(rules.prompt_tokens),
        shard.arrays["seq_lengths"],
        shard.row_ids >= 0,
    )
    if given is not None and (given.ndim > 1 or given.dtype.kind not in "iu"):
        what = f"is {dtype_name(given.dtype)} {list(given.shape)}"
        raise ConfigError(
            rules.prompt_tokens, what, "give one integer per row, the tokens before its response"
        )
    starts = starts_of(shard, rules)
    if given is None:
        if inside := [name for name in names if name not in WHOLE_ROW]:
            what = f"{', '.join(inside)} belong to responses, and no column says where those begin"
            remedy = f"add a per-row column {rules.prompt_tokens!r}, the tokens before the response"
            raise ConfigError("plan.columns", what, remedy)
    elif len(wrong := np.flatnonzero(real & ((starts < 1) | (starts > lengths)))):
        row = int(wrong[0])
        what = (
            f"is {int(starts[row])} for row {int(shard.row_ids[row])}, which has {int(lengths[row])} tokens"
        )
        raise ConfigError(rules.prompt_tokens, what, "a response begins after at least one token")
    elif len(wrong := np.flatnonzero(real & (_first_targets(shard) < starts))):
        what = f"row {int(shard.row_ids[wrong[0]])} has a target before its response"
        raise ConfigError(rules.prompt_tokens, what, "mask the prompt, or begin the response earlier")
    return np.asarray(lengths - starts)


def _check_places(shard: Shard, names: Sequence[str]) -> None:
    """Each of `names` has a place of its own in SkyRL's batch."""
    places: dict[str, str] = {}
    for name in names:
        values, place = shard.arrays[name], THEIR_NAMES.get(name, name)
        if name + BOUNDS in shard.arrays:
            what = f"{name!r} belongs to media, which these batches do not carry"
            raise ConfigError(
                "plan.columns", what, "train on rows without media, or read mini.shards on the worker"
            )
        if name in shard.row_vectors or values.dtype.kind == "U":
            what = f"{name!r} is {dtype_name(values.dtype)} {list(values.shape)}: no number per row or token"
            raise ConfigError("plan.columns", what, "leave it out; SkyRL's batch has no place for it")
        if place in THEIR_OWN:
            raise ConfigError(
                "plan.columns", f"{name!r} is what SkyRL's batch has of its own", "rename it, or leave it out"
            )
        if place in places:
            what = f"{places[place]!r} and {name!r} are both SkyRL's {place!r}"
            raise ConfigError("plan.columns", what, "leave one out")
        places[place] = name


def others_of(shard: Shard, rules: BatchRules) -> list[str]:
    """Names of the columns that travel beside ids, masks and counts."""
    return [name for name in shard.arrays if name not in OURS and name != rules.prompt_tokens]


def targets_of(shard: Shard) -> Array:
    """bool [B, L]."""
    if "loss_mask" in shard.arrays:
        return shard.arrays["loss_mask"].view(np.bool_)
    return np.asarray(shard.arrays["labels"] != IGNORED)


def _first_targets(shard: Shard) -> Array:
    """int [S], tokens of each row before its first target; all of them where it has none."""
    targets = targets_of(shard)
    first = targets.argmax(axis=1) - (targets.shape[1] - shard.arrays["seq_lengths"])
    return np.where(shard.arrays["row_tokens"] > 0, first, shard.arrays["seq_lengths"])


def starts_of(shard: Shard, rules: BatchRules) -> Array:
    """int [S], tokens of each row before its response; all of a dummy's."""
    starts = shard.arrays.get(rules.prompt_tokens)
    if starts is None:
        return _first_targets(shard)
    return np.where(shard.row_ids >= 0, starts, shard.arrays["seq_lengths"])
