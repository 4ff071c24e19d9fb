"""Small shards for tests of workers, made by the project's own plan and collation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.collate.info import MiniBatchInfo, info_of
from raysvc.collate.shard import Denominators, MicroBatchInfo, Shard
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import MiniBatchPlan, Plan
from raysvc.row_batch import RowBatch

COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels")


def bytes_shard(number: int, nbytes: int = 640) -> Shard:
    """A shard of two arrays whose bytes all depend on `number`."""
    rng = np.random.default_rng(number)
    arrays = {
        "input_ids": rng.integers(0, 2**31, (2, nbytes // 16), dtype=np.int32),
        "loss_mask": rng.integers(0, 256, nbytes // 2, dtype=np.uint8),
        "empty": np.zeros((0, 3), np.float32),
    }
    for array in arrays.values():
        array.flags.writeable = False
    micro = (MicroBatchInfo(0, 2, nbytes // 16, 2),)
    rows = np.arange(2, dtype=np.int64)
    return Shard(number, 0, 0, "padded_right", arrays, rows, Denominators(1, 2, 2), micro)


def random_rows(num_rows: int, seed: int = 0, low: int = 3, high: int = 14, vocab: int = 60) -> RowBatch:
    """Rows with per-token advantages, old and reference log-probabilities, returns and old values."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high, num_rows)
    total = int(lengths.sum())
    tokens: dict[str, Any] = {
        "input_ids": rng.integers(3, vocab, total).astype(np.int32),
        "loss_mask": (rng.random(total) < 0.7).astype(np.uint8),
        "advantages": rng.normal(size=total).astype(np.float32),
        "old_logprobs": (-4 + 0.5 * rng.normal(size=total)).astype(np.float32),
        "ref_logprobs": (-4 + 0.5 * rng.normal(size=total)).astype(np.float32),
        "returns": rng.normal(size=total).astype(np.float32),
        "old_values": rng.normal(size=total).astype(np.float32),
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return RowBatch(np.arange(num_rows, dtype=np.int64), offsets, tokens, {})


def some_rows(rows: RowBatch, ids: np.ndarray) -> RowBatch:
    """The rows `ids`, in that order."""
    index = np.concatenate([np.arange(rows.offsets[i], rows.offsets[i + 1]) for i in ids.tolist()])
    offsets = np.concatenate([[0], np.cumsum(rows.lengths[ids])]).astype(np.int64)
    return RowBatch(ids, offsets, {name: values[index] for name, values in rows.tokens.items()}, {})


def minis_of(
    rows: RowBatch,
    plan: dict[str, Any],
    dp_size: int,
    *,
    uids: Sequence[str] | None = None,
    step: int = 0,
    columns: Sequence[str] = (),
) -> list[tuple[MiniBatchPlan, tuple[Shard, ...], MiniBatchInfo]]:
    """Every mini-batch of a step: plan, shards of the ranks, info."""
    config = PlanConfig(**plan)
    whole = Plan(config, rows.lengths.astype(np.int32), uids=uids)
    out = []
    for index, mini in enumerate(whole.step(step, dp_size).mini_batches):
        shards = collate_mini_batch(
            some_rows(rows, mini.row_ids),
            mini,
            CollateSpec(
                step=step,
                mini_index=index,
                layout=config.layout,
                pad_token_id=1,
                columns=[*COLUMNS, *columns],
                align=config.align,
            ),
        )
        out.append((mini, shards, info_of(mini, shards)))
    return out
