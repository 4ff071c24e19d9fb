"""What a rank gets for a step number, and how it is cut into micro-batches.

Axes: B rows of a micro-batch, L its width.
Always true:
- arrays are private copies, the object store's pages are let go;
- the last micro-batch of a mini-batch `ends_mini`, the last one of a step `ends_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from raysvc.collate.info import MiniBatchInfo
    from raysvc.collate.shard import Denominators, Shard


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step as a rank sees it.

    Attributes:
        index: 0-based.
        epoch: 0-based.
        shards: one per mini-batch, numpy, private.
        infos: of the mini-batches over all ranks.
    """

    index: int
    epoch: int
    shards: tuple[Shard, ...]
    infos: tuple[MiniBatchInfo, ...]


@dataclass(frozen=True, eq=False)
class RankMicro:
    """One forward and backward of a rank.

    Attributes:
        step: index of the step.
        epoch: of the step.
        mini: number of the mini-batch in the step.
        tensors: name -> tensor, as `Shard.micro`; and `row_ids`, int64 [B], -1 for a dummy.
        denominators: of the whole mini-batch, over all ranks.
        layout: of the arrays.
        ends_mini: the optimizer steps after this one.
        ends_step: the last one of the step; commit after it.
    """

    step: int
    epoch: int
    mini: int
    tensors: dict[str, torch.Tensor]
    denominators: Denominators
    layout: str
    ends_mini: bool
    ends_step: bool


def micros_of(steps: Iterable[RankStep], device: str) -> Iterator[RankMicro]:
    """The micro-batches of steps, in order, as tensors on a device."""
    for step in steps:
        for number, shard in enumerate(step.shards):
            with_ids = replace(shard, arrays={**shard.arrays, "row_ids": shard.row_ids})
            for index in range(len(shard.micro_batches)):
                ends_mini = index + 1 == len(shard.micro_batches)
                yield RankMicro(
                    step=step.index,
                    epoch=step.epoch,
                    mini=number,
                    tensors=_on(device, with_ids.micro(index)),
                    denominators=shard.denominators,
                    layout=shard.layout,
                    ends_mini=ends_mini,
                    ends_step=ends_mini and number + 1 == len(step.shards),
                )


def private(shard: Shard) -> Shard:
    """The shard with memory of its own."""
    arrays = {name: array.copy() for name, array in shard.arrays.items()}
    return replace(shard, arrays=arrays, row_ids=shard.row_ids.copy())


def _on(device: str, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
