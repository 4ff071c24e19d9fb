"""Mini-batches as refs that stock SkyRL workers take: one `TrainingInputBatch` per data-parallel rank.

    client = raysvc.attach("demo", roles={"policy": raysvc.Role(dp_size, batches=BatchRules("token_mean"))})
    staged = [list(mini.shards) for mini in step.mini_batches]  # [mini][dp], as MeshDispatch.stage_chunks
    MeshDispatch.dispatch_from_staged(actor_infos, "forward_backward", staged[0])

Axes: N rows, T their tokens, R ranks, B rows of a rank with what fills it up, L width, A columns of responses.
1. The server finds B, L and A, and deals rows to [R, B], with dummies where a rank has fewer.
2. Rows, or the responses in them, are pieces of bytes to Arrow, which puts them in the order of the ranks, without padding.
3. The worker that opens a ref pads them into SkyRL's types (`skyrl_tensors`).
Always true:
- all ranks have the same B, L and A, so that SkyRL's iterators make equally many micro-batches on each;
- what fills up a rank is two pads with attention, without a target and in no denominator;
- no Python runs per token; none per row but where a cell holds many numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.collate.columns import column_names
from raysvc.collate.flat_rows import FlatRows, has_turns
from raysvc.collate.loss_weights import row_weights
from raysvc.collate.shard import Array, MicroBatchInfo, Shard
from raysvc.errors import ConfigError
from raysvc.integrations.skyrl_rules import (
    ONE_FACTOR,
    REDUCTIONS,
    WHOLE_ROW,
    Common,
    Responses,
    SkyRLRules,
    check_packed,
    check_places,
    others_of,
    refuse_early_target,
    responses_of,
)
from raysvc.integrations.skyrl_tensors import BatchShard
from raysvc.plan.plan import MiniBatchPlan
from raysvc.plan.rank_plan import DUMMY, DUMMY_LENGTH
from raysvc.ragged import Int64s, offsets_of
from raysvc.row_batch import RowBatch


@dataclass(frozen=True)
class BatchRules(SkyRLRules):
    """Says how SkyRL's batches are made of rows: `batches` of a `raysvc.Role`, whose refs then open as a
    `TrainingInputBatch`.

    Metadata of a batch: `response_length`, and `row_ids` with -1 for what fills up, the order of SkyRL's per-sample outputs.

    Attributes:
        reduction: SkyRL's `loss_reduction`; None leaves the loss mask and the advantages as they are.
        prompt_tokens: the per-row column that says where a row's response begins, the tokens before it. Without it only loss
            masks travel, as in SkyRL's SFT; `response_mask` and columns of responses need it.
        max_seq_len: c tokens of `seq_mean_token_sum_norm`, SkyRL's `algorithm.max_seq_len`.

    Raises:
        ConfigError: a rule that SkyRL does not have. What is wrong with the rows is raised where a step is made.
    """

    def collate(self, rows: RowBatch, mini: MiniBatchPlan, spec: CollateSpec) -> tuple[Shard, ...]:
        """Returns what the batches of all ranks are made of.

        Raises:
            ConfigError: the layout is not `padded_left` or `packed`; a column that SkyRL's batch has no place for; columns of
                responses, but nothing that says where they begin; a target before the response.
        """
        if spec.layout == "packed":
            return packed_shards(collate_mini_batch(rows, mini, spec), self)
        if spec.layout != "padded_left":
            what = f"is {spec.layout}, and SkyRL pads on the left or packs"
            raise ConfigError("plan.layout", what, "use plan.layout=padded_left, or packed")
        return padded_shards(rows, mini, self, spec)


def packed_shards(shards: Sequence[Shard], rules: SkyRLRules) -> tuple[Shard, ...]:
    """Makes the batches from the packed shards of a mini-batch.

    Raises:
        ConfigError: they have columns of responses.
    """
    check_packed(others_of(shards[0].arrays, rules))
    lines = [shard.arrays["input_ids"].shape for shard in shards]
    rows, width = max(shape[0] for shape in lines), max(shape[1] for shape in lines)
    common = Common(rows, width, width - 1)
    names = [each.name for each in fields(Shard)]
    return tuple(
        BatchShard(**{name: getattr(shard, name) for name in names}, common=common, rules=rules)
        for shard in shards
    )


def padded_shards(
    rows: RowBatch, mini: MiniBatchPlan, rules: SkyRLRules, spec: CollateSpec
) -> tuple[Shard, ...]:
    """Makes the batches from the rows of a mini-batch, whose plan is of `padded_left`.

    Raises:
        ConfigError: as `BatchRules.collate`.
    """
    columns = column_names(spec.columns, rows, spec.layout)
    source, others = FlatRows(rows, mini, "padded_left"), others_of(columns, rules)
    check_places(others, rows)
    given = rows.rows.get(rules.prompt_tokens) if rules.prompt_tokens in columns else None
    responses = responses_of(source, others, rules, given)
    deal = _deal(mini)  # 1
    lengths = _dealt(source.lengths, deal, DUMMY_LENGTH)
    planned = [lengths[rank, : len(plan.rows)] for rank, plan in enumerate(mini.ranks)]
    width = max(1, *(int(each.max()) for each in planned))
    width = -(-width // spec.pad_to_multiple) * spec.pad_to_multiple
    common = Common(deal.shape[1], width, responses.longest)
    whole = _Pieces(source.offsets, source.offsets[-1:], deal)  # 2
    two = np.where(deal == DUMMY, DUMMY, 2 * deal + 1)
    parts = _Pieces(_bounds(source, responses), source.offsets[-1:], two)
    arrays: dict[str, list[Array] | Array] = {
        "input_ids": whole.dealt(source.tokens("input_ids")),
        "loss_mask": parts.dealt(source.trained),
        "seq_lengths": lengths.astype(np.int32),
    }
    if responses.given:
        if sum(map(np.count_nonzero, arrays["loss_mask"])) != source.denominators.tokens:
            refuse_early_target(source, responses, rules)
        arrays["response_lengths"] = _dealt(responses.counts, deal).astype(np.int32)
    if rules.reduction is not None and REDUCTIONS[rules.reduction] not in ONE_FACTOR:
        arrays["loss_weights"] = _dealt(_weights(source, rules), deal)
    for name in others:
        is_whole = name in WHOLE_ROW
        if name in rows.tokens:
            values = source.tokens(name)
            values = values.astype(np.float32) if values.dtype == np.float64 else values
            arrays[name] = (whole if is_whole else parts).dealt(values)
        elif name in rows.wide:
            counts = source.lengths if is_whole else responses.counts
            arrays[name] = _wide(source, name, counts, deal, width if is_whole else responses.longest)
        else:
            arrays[name] = _dealt(rows.rows[name], deal)[:, :, None]
    row_ids = _dealt(mini.row_ids, deal, -1)
    return tuple(
        BatchShard(
            spec.step, spec.mini_index, rank, "padded_left", {name: values[rank] for name, values in arrays.items()}, row_ids[rank],
            source.denominators, (MicroBatchInfo(0, len(ours), width, int(ours.sum())),), (), spec.pad_token_id, common=common, rules=rules,
        )
        for rank, ours in enumerate(lengths)
    )  # fmt: skip


def _deal(mini: MiniBatchPlan) -> Int64s:
    """int64 [R, B], position of each row in the mini-batch, DUMMY for none."""
    deal = np.full((len(mini.ranks), max(len(plan.rows) for plan in mini.ranks)), DUMMY, np.int64)
    for ours, plan in zip(deal, mini.ranks, strict=True):
        ours[: len(plan.rows)] = plan.rows
    return deal


def _dealt(values: Array, deal: Int64s, pad: int = 0) -> Array:
    """[R, B], the value of each row, `pad` for a dummy."""
    last = np.full(1, pad, values.dtype) if pad else np.zeros(1, values.dtype)
    return np.concatenate([values, last])[deal]  # DUMMY is the last one


def _bounds(source: FlatRows, responses: Responses) -> Int64s:
    """int64 [2 N + 1], where each prompt and each response begins among the tokens, and T."""
    bounds = np.repeat(source.offsets, 2)[1:]
    bounds[:-1:2] = source.firsts
    bounds[1::2] = source.offsets[1:] - responses.counts
    return bounds


def _weights(source: FlatRows, rules: SkyRLRules) -> Array:
    """float32 [N], of the targets of each row; SkyRL's gradients are sums over ranks."""
    assert rules.reduction is not None
    arrays = {
        "row_group": source.mini.group_index,
        "row_tokens": source.row_tokens,
        "row_group_rows": source.group_rows,
        "row_group_tokens": source.group_tokens,
    }
    ours = REDUCTIONS[rules.reduction]
    if ours == "sequence_mean" and has_turns(source.rows):
        what = f"rows hold several turns, which weigh differently under {rules.reduction!r}"
        raise ConfigError("plan.columns", what, "serve with rows='keep'")
    return row_weights(arrays, source.denominators, ours, constant=rules.max_seq_len).astype(np.float32)


def _wide(source: FlatRows, name: str, counts: Int64s, deal: Int64s, width: int) -> Array:
    """[R, B, width, *shape], the last `counts` [N] tokens of each row at the right edge."""
    its = source.rows.wide[name]
    out = np.zeros((*deal.shape, width, *its.shape), its.dtype)
    pieces = source.pieces(name)
    for place in np.argwhere(deal != DUMMY).tolist():
        row = int(deal[tuple(place)])
        if count := int(counts[row]):
            out[tuple(place)][-count:] = pieces[row][-count:]
    return out


class _Pieces:
    """Some pieces of the flat tokens, in the order of the ranks."""

    def __init__(self, bounds: Int64s, end: Int64s, which: Int64s) -> None:
        """Pieces to be dealt.

        Args:
            bounds: int64 [P + 1], where each of P pieces begins, and the `end` [1] of all.
            which: int64 [R, B], DUMMY for none.
        """
        self._offsets = np.concatenate([bounds, end])  # an empty piece is the last one
        places = np.where(which == DUMMY, len(bounds) - 1, which)
        self._which = pa.array(places.ravel())
        self._ranks = offsets_of(np.diff(self._offsets)[places].sum(axis=1)).tolist()

    def dealt(self, values: Array) -> list[Array]:
        """R arrays, the pieces of `values` [T] one after the other."""
        values, size = np.ascontiguousarray(values), values.itemsize
        buffers = [None, pa.py_buffer(self._offsets * size), pa.py_buffer(values.view(np.uint8))]
        pieces = pa.Array.from_buffers(pa.large_binary(), len(self._offsets) - 1, buffers)
        made = pc.take(pieces, self._which, boundscheck=False).buffers()[2]
        flat = np.frombuffer(made, values.dtype, self._ranks[-1])
        return [flat[a:b] for a, b in pairwise(self._ranks)]
