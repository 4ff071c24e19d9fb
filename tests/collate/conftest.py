"""Random rows, and the way from rows to shards, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.collate.shard import Shard
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import MiniBatchPlan, Plan
from raysvc.row_batch import RowBatch


@dataclass(frozen=True)
class Data:
    """Rows in memory with the one method of a cache entry that matters here."""

    lengths: np.ndarray
    tokens: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def take(self, row_ids: np.ndarray) -> RowBatch:
        """The rows with these ids, in this order, between other tokens as in a larger file."""
        offsets, lengths = self.offsets, self.lengths[row_ids].astype(np.int64)
        index = [np.arange(offsets[row], offsets[row + 1]) for row in row_ids.tolist()]
        flat = np.concatenate([np.zeros(3, np.int64), *index, np.zeros(2, np.int64)]).astype(np.int64)
        bounds = 3 + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = {
            name: values[flat] if len(values) else np.zeros(5, values.dtype)
            for name, values in self.tokens.items()
        }
        return RowBatch(
            row_ids, bounds, tokens, {name: values[row_ids] for name, values in self.rows.items()}
        )

    def row(self, row_id: int, name: str = "input_ids") -> np.ndarray:
        return self.tokens[name][self.offsets[row_id] : self.offsets[row_id + 1]]


def random_data(lengths: Sequence[int], seed: int = 0, trained: float = 0.6) -> Data:
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int32)
    total = int(sizes.sum())
    return Data(
        lengths=sizes,
        tokens={
            "input_ids": rng.integers(3, 60, total).astype(np.int32),
            "loss_mask": (rng.random(total) < trained).astype(np.uint8),
            "advantages": rng.normal(size=total).astype(np.float32),
            "router": rng.integers(0, 2**16, total).astype(np.uint16),
        },
        rows={"source_row": np.arange(len(sizes)) + 1000, "reward": rng.normal(size=len(sizes))},
    )


def collate_step(
    data: Data,
    config: PlanConfig,
    dp_size: int,
    *,
    uids: Sequence[str] | None = None,
    step: int = 0,
    **kwargs: object,
) -> list[tuple[MiniBatchPlan, tuple[Shard, ...]]]:
    """Every mini-batch of a step: its plan and its shards."""
    plan = Plan(config, data.lengths, uids=uids)
    settings = {"pad_token_id": 1, "columns": config.columns, "align": config.align, **kwargs}
    return [
        (
            mini,
            collate_mini_batch(
                data.take(mini.row_ids),
                mini,
                CollateSpec(
                    step=step,
                    mini_index=number,
                    layout=config.layout,
                    pad_to_multiple=config.pad_to_multiple,
                    **settings,
                ),
            ),
        )
        for number, mini in enumerate(plan.step(step, dp_size).mini_batches)
    ]


@pytest.fixture(scope="session")
def make_data() -> Callable[..., Data]:
    return random_data


@pytest.fixture(scope="session")
def make_shards() -> Callable[..., list[tuple[MiniBatchPlan, tuple[Shard, ...]]]]:
    return collate_step
