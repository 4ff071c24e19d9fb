"""Defines what SkyRL's batch has places for, and where responses begin.

Axes: N rows of a mini-batch, B rows of a rank, L width, A columns of responses.
Always true:
- a response begins after at least one token, and no target is before it;
- a column that SkyRL's batch has no place for is refused by name, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from raysvc.collate.columns import IGNORED
from raysvc.collate.flat_rows import FlatRows
from raysvc.collate.shard import BOUNDS, Array, Shard
from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import dtype_name
from raysvc.job.config import Reduction as OurReduction
from raysvc.ragged import Int64s
from raysvc.row_batch import RowBatch

Reduction = Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
REDUCTIONS: dict[str, OurReduction] = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt_mean",
}
ONE_FACTOR = ("token_mean", "constant")  # of ours: all targets weigh the same
THEIR_NAMES = {
    "old_logprobs": "action_log_probs",
    "ref_logprobs": "base_action_log_probs",
    "old_values": "values",
}
WHOLE_ROW = ("rollout_expert_indices", "router_padding_mask")  # [B, L, ...] in SkyRL too
OURS = {"input_ids", "attention_mask", "position_ids", "labels", "loss_mask", "segment_ids"}
OURS |= {"seq_lengths", "row_tokens", "row_group", "row_group_rows", "row_group_tokens"}
OURS |= {"row_trajectory_tokens", "turn_tokens", "cu_seqlens", "cu_seqlens_offsets"}
OF_SHARDS = ("response_lengths", "loss_weights")  # beside OURS
_FEW = 64  # rows, among which the longest response mostly is
THEIR_OWN = ("sequences", "attention_mask", "loss_mask", "response_mask", "sub_seq_lengths")


@dataclass(frozen=True)
class SkyRLRules:
    """Says how SkyRL's batches are made of rows.

    Attributes:
        reduction: SkyRL's `loss_reduction`; None leaves the loss mask and the advantages as they are.
        prompt_tokens: the per-row column that says where a row's response begins, the tokens before it. Without it only loss
            masks travel, as in SkyRL's SFT; `response_mask` and columns of responses need it.
        max_seq_len: c tokens of `seq_mean_token_sum_norm`, SkyRL's `algorithm.max_seq_len`.

    Raises:
        ConfigError: a rule that SkyRL does not have. What is wrong with the rows is raised where a step is made.
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
    """Holds what the batches of all ranks of a mini-batch have in common: B, L and A."""

    rows: int
    width: int
    response: int


def others_of(names: Iterable[str], rules: SkyRLRules) -> list[str]:
    """Columns that travel beside ids, masks and counts."""
    return [name for name in names if name not in OURS and name != rules.prompt_tokens]


def check_packed(names: Sequence[str]) -> None:
    """Raises: ConfigError where there are such columns."""
    if names:
        what = f"{', '.join(names)} with layout: packed, and SkyRL packs tokens and loss masks only"
        raise ConfigError("plan.columns", what, "leave them out, or use plan.layout=padded_left")


def check_places(names: Sequence[str], rows: RowBatch) -> None:
    """Each of `names` has a place of its own in SkyRL's batch.

    Raises:
        ConfigError: it has none.
    """
    places: dict[str, str] = {}
    for name in names:
        place = THEIR_NAMES.get(name, name)
        values = None if name in rows.tokens or name in rows.wide else rows.rows[name]
        if values is not None and (values.ndim > 1 or values.dtype.kind in "UO"):
            what = f"{name!r} is {dtype_name(values.dtype)} {list(values.shape)}: no number per row or token"
            raise ConfigError("plan.columns", what, "leave it out; SkyRL's batch has no place for it")
        if place in THEIR_OWN:
            raise ConfigError(
                "plan.columns", f"{name!r} is what SkyRL's batch has of its own", "rename it, or leave it out"
            )
        if name in OF_SHARDS:
            raise ConfigError(
                "plan.columns",
                f"{name!r} is what these batches have of their own",
                "rename it, or leave it out",
            )
        if place in places:
            what = f"{places[place]!r} and {name!r} are both SkyRL's {place!r}"
            raise ConfigError("plan.columns", what, "leave one out")
        places[place] = name


def check_media(arrays: Mapping[str, Array]) -> None:
    """Raises: ConfigError where there are arrays of media."""
    for name in arrays:
        if name + BOUNDS in arrays:
            what = f"{name!r} belongs to media, which these batches do not carry"
            raise ConfigError(
                "plan.columns", what, "train on rows without media, or read mini.shards on the worker"
            )


class Responses(NamedTuple):
    """Says where the responses of a mini-batch are.

    Attributes:
        counts: int64 [N], tokens of each, the last ones of its row. Without `prompt_tokens` at most A of the row.
        longest: A.
        given: whether a column says where they begin.
    """

    counts: Int64s
    longest: int
    given: bool


def responses_of(
    source: FlatRows, others: Sequence[str], rules: SkyRLRules, given: Array | None
) -> Responses:
    """Finds the responses from `given`, the column of `rules.prompt_tokens`, or else from the first targets.

    Raises:
        ConfigError: what it says cannot be; or `others` belong to responses, and there is none.
    """
    lengths, row_ids = source.lengths, source.mini.row_ids
    if given is None:
        if inside := [name for name in others if name not in WHOLE_ROW]:
            what = f"{', '.join(inside)} belong to responses, and no column says where those begin"
            remedy = f"add a per-row column {rules.prompt_tokens!r}, the tokens before the response"
            raise ConfigError("plan.columns", what, remedy)
        longest = max(1, _longest_response(source))
        return Responses(np.minimum(lengths, longest), longest, given=False)
    if given.ndim > 1 or given.dtype.kind not in "iu":
        what = f"is {dtype_name(given.dtype)} {list(given.shape)}"
        raise ConfigError(
            rules.prompt_tokens, what, "give one integer per row, the tokens before its response"
        )
    starts: Int64s = given.astype(np.int64)
    if len(wrong := np.flatnonzero((starts < 1) | (starts > lengths))):
        row = int(wrong[0])
        what = f"is {int(starts[row])} for row {int(row_ids[row])}, which has {int(lengths[row])} tokens"
        raise ConfigError(rules.prompt_tokens, what, "a response begins after at least one token")
    counts = lengths - starts
    return Responses(counts, max(1, int(counts.max(initial=0))), given=True)


def refuse_early_target(source: FlatRows, responses: Responses, rules: SkyRLRules) -> None:
    """Name a row with a target before its response.

    Raises:
        ConfigError: always.
    """
    starts = source.lengths - responses.counts
    first = np.array(
        [int(row.argmax()) if row.any() else len(row) for row in np.split(source.trained, source.firsts[1:])]
    )
    row = int(source.mini.row_ids[np.flatnonzero(first < starts)[0]])
    raise ConfigError(
        rules.prompt_tokens,
        f"row {row} has a target before its response",
        "mask the prompt, or begin the response earlier",
    )


def _longest_response(source: FlatRows) -> int:
    """Tokens from a row's first target to its end, of the row where they are most; 0 where no row has a target.

    A row cannot have more than it is long, so a few of the longest rows mostly decide.
    """
    found, few = 0, min(_FEW, len(source.lengths))
    longest = np.argpartition(source.lengths, -few)[-few:] if few else np.zeros(0, np.int64)
    for row in longest[np.argsort(-source.lengths[longest])].tolist():
        if source.lengths[row] <= found:
            return found
        of_row = source.trained[source.offsets[row] : source.offsets[row + 1] - found]
        first = int(of_row.argmax())
        if of_row[first]:
            found = len(of_row) + found - first
    longer = source.lengths > found
    if not longer.any():
        return found
    targets = np.append(np.flatnonzero(source.trained.view(np.bool_)), source.offsets[-1])
    firsts = targets[np.searchsorted(targets, source.firsts[longer])]
    return max(found, int((source.offsets[1:][longer] - firsts).max()))


def targets_of(shard: Shard) -> Array:
    """bool [B, L]."""
    if "loss_mask" in shard.arrays:
        return shard.arrays["loss_mask"].view(np.bool_)
    return np.asarray(shard.arrays["labels"] != IGNORED)
