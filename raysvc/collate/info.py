"""Defines what a driver may know of a mini-batch without its tensors.

Axes: N real rows, R ranks.
Always true:
- the size does not depend on the number of tokens;
- `info_of_plain(info.plain)` is the same info;
- `rank_tokens` sums to the tokens of all rows and dummies; the padding share is of all cells that
  micro-batches compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.collate.shard import Denominators, Shard, plain, whole

if TYPE_CHECKING:
    from raysvc.plan.plan import MiniBatchPlan


@dataclass(frozen=True, eq=False)
class MiniBatchInfo:
    """Numbers about one mini-batch.

    Attributes:
        row_ids: int64 [N].
        lengths: int32 [N].
        denominators: of the mini-batch.
        num_dummies: over all ranks.
        num_cells: cells that the micro-batches of all ranks compute.
        pad_share: share of those cells without a token of a real row.
        rank_tokens: [R], tokens of each rank, dummies included.
        rank_bytes: [R], bytes of each rank's arrays.
        num_micro_batches: of each rank.
        num_truncated: rows cut to the budget.
        num_dropped: rows over the budget that were left out.
        num_alone: rows over the budget, in a micro-batch of their own.
        num_skipped: rows in `skip_rows`.
    """

    row_ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    denominators: Denominators
    num_dummies: int
    num_cells: int
    pad_share: float
    rank_tokens: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    num_micro_batches: int
    num_truncated: int = 0
    num_dropped: int = 0
    num_alone: int = 0
    num_skipped: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.rank_bytes)

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The info of types that Ray sends without pickling; made once for all ranks, who all get it."""
        per_rank = {name: plain(np.array(getattr(self, name))) for name in ("rank_tokens", "rank_bytes")}
        arrays = {"row_ids": plain(self.row_ids), "lengths": plain(self.lengths)}
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**counts, **per_rank, **arrays, "denominators": list(vars(self.denominators).values())}


def info_of_plain(made: dict[str, Any]) -> MiniBatchInfo:
    """The info of `MiniBatchInfo.plain`."""
    per_rank = {name: tuple(whole(made[name]).tolist()) for name in ("rank_tokens", "rank_bytes")}
    arrays = {name: whole(made[name]) for name in ("row_ids", "lengths")}
    return MiniBatchInfo(
        **{**made, **per_rank, **arrays, "denominators": Denominators(*made["denominators"])}
    )


def info_of(mini: MiniBatchPlan, shards: Sequence[Shard]) -> MiniBatchInfo:
    """The info of a mini-batch that was planned as `mini` and collated to `shards`."""
    cells = sum((micro.stop - micro.start) * micro.width for shard in shards for micro in shard.micro_batches)
    return MiniBatchInfo(
        row_ids=mini.row_ids,
        lengths=mini.lengths,
        denominators=shards[0].denominators,
        num_dummies=sum(int((shard.row_ids < 0).sum()) for shard in shards),
        num_cells=cells,
        pad_share=1.0 - int(mini.lengths.sum()) / cells,
        rank_tokens=tuple(sum(micro.num_tokens for micro in shard.micro_batches) for shard in shards),
        rank_bytes=tuple(shard.nbytes for shard in shards),
        num_micro_batches=len(shards[0].micro_batches),
        num_truncated=mini.num_truncated,
        num_dropped=mini.num_dropped,
        num_alone=mini.num_alone,
        num_skipped=mini.num_skipped,
    )
