"""Steps as a trainer gets them: a driver refs of all ranks' shards, a rank its own arrays.

Axes: N rows of a mini-batch, R ranks of a role, S rows and dummies of a rank, B rows of a micro-batch, L its width.
Always true:
- a driver's shards are refs: it passes them on and opens none;
- a rank's arrays are private copies, the object store's pages are let go;
- the last micro-batch of a mini-batch `ends_mini`, the last one of a step `ends_step`;
- `restore` gives row n of the result to row n of `info.row_ids`, without dummies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.job.column_dtypes import BF16
from raysvc.plan.fact_table import facts_html, facts_text

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from raysvc.collate.info import MiniBatchInfo
    from raysvc.collate.shard import Denominators, Shard
    from raysvc.rl.rollout_facts import RolloutFacts


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimizer step's worth of a step.

    Attributes:
        shards: [R], one ObjectRef per data-parallel rank (of the first role); pass them on, do not open them here.
            A worker makes a `Shard` of the value with `raysvc.read_shard`; without raysvc, docs/wire.md.
        info: row ids, lengths, denominators; None while the step is only fetched ahead.
        by_role: role -> its shards; {} when the client was attached without roles.
        rows: by_role's order -> [R] of int32 [S], position of each row in `info.row_ids`, -1 for a dummy.
    """

    shards: tuple[Any, ...]
    info: MiniBatchInfo | None
    by_role: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rows: tuple[tuple[npt.NDArray[np.int32], ...], ...] = ()

    def restore(self, per_rank: Sequence[npt.NDArray[Any]], role: str | None = None) -> npt.NDArray[Any]:
        """[N, ...], what the ranks of a role returned per row, in the order of `info.row_ids`.

        Args:
            per_rank: [R] of [S, ...], in the order of each shard's `row_ids`, dummies included.
            role: None: the first one.
        """
        assert self.info is not None, "a step that is only fetched ahead has no rows yet"
        number = 0 if role is None else list(self.by_role).index(role)
        rows = np.concatenate(self.rows[number])
        values = np.concatenate(list(per_rank))
        out = np.empty((len(self.info.row_ids), *values.shape[1:]), values.dtype)
        out[rows[rows >= 0]] = values[rows >= 0]
        return out


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """A global batch, which a trainer asks for by number.

    Attributes:
        index: 0-based.
        epoch: 0-based.
        mini_batches: each ends in one optimizer step.
        update_epochs: passes over the mini-batches.
        weight_versions: oldest and newest weight version of its rows (rollouts); None: it has none.
        read_s: the server read its rows.
        collate_s: the server wrote its arrays.
        groups_s: the server waited for producers of rollouts.
        build_s: the server waited for its rows to be tokenized.
        rollouts: rewards, lengths and other per-row columns of its rows, also by weight version (rollouts), else None.
    """

    index: int
    epoch: int
    mini_batches: tuple[MiniBatch, ...]
    update_epochs: int = 1
    weight_versions: tuple[int, int] | None = None
    read_s: float = 0.0
    collate_s: float = 0.0
    groups_s: float = 0.0
    build_s: float = 0.0
    rollouts: RolloutFacts | None = None

    def __repr__(self) -> str:
        return facts_text("step", self._facts())

    def _repr_html_(self) -> str:
        return facts_html("Step", self._facts())

    def _facts(self) -> dict[str, Any]:
        facts = {"step": self.index, "epoch": self.epoch, "mini-batches": len(self.mini_batches)}
        facts["ranks"] = len(self.mini_batches[0].shards) if self.mini_batches else 0
        infos = [mini.info for mini in self.mini_batches if mini.info is not None]
        if infos:
            facts["rows"] = sum(len(info.row_ids) for info in infos)
            facts["tokens"] = sum(int(info.lengths.sum()) for info in infos)
            facts["trained tokens"] = sum(info.denominators.tokens for info in infos)
            facts["dummies"] = sum(info.num_dummies for info in infos)
            facts["bytes"] = sum(info.nbytes for info in infos)
        return facts

    def optimizer_steps(self) -> Iterator[MiniBatch]:
        """The mini-batches as often as they are trained: all of them, `update_epochs` times."""
        for _ in range(self.update_epochs):
            yield from self.mini_batches


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step as a rank sees it.

    Attributes:
        index: 0-based.
        epoch: 0-based.
        shards: one per mini-batch, numpy, private.
        infos: of the mini-batches over all ranks.
        read_s: the server read its rows.
        collate_s: the server wrote its arrays.
        copy_s: this process copied the shards.
        groups_s: the server waited for producers of rollouts.
        build_s: the server waited for its rows to be tokenized.
        rollout_metrics: `RolloutFacts.metrics` of its rows over all ranks (rollouts).
        is_first: whether no peer on this node took the same bytes before.
    """

    index: int
    epoch: int
    shards: tuple[Shard, ...]
    infos: tuple[MiniBatchInfo, ...]
    read_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    groups_s: float = 0.0
    build_s: float = 0.0
    rollout_metrics: Mapping[str, float] = field(default_factory=dict)
    is_first: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes that this process took."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def node_bytes(self) -> int:
        """Bytes that came to this node for this process: 0 where a peer brought them."""
        return self.nbytes if self.is_first else 0


@dataclass(frozen=True, eq=False, repr=False)
class MicroBatch:
    """One forward and backward of a rank.

    Attributes:
        step: index of the step.
        epoch: of the step.
        mini: number of the mini-batch in the step.
        tensors: name -> tensor, as `Shard.micro`; and `row_ids`, int64 [B], -1 for a dummy. Text stays numpy.
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

    def __repr__(self) -> str:
        return facts_text("micro-batch", self._facts())

    def _repr_html_(self) -> str:
        return facts_html("Micro-batch", self._facts())

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"step": self.step, "mini": self.mini, "layout": self.layout}
        facts |= {name: list(value.shape) for name, value in self.tensors.items()}
        return {**facts, "ends mini-batch": self.ends_mini, "ends step": self.ends_step}


def micros_of(steps: Iterable[RankStep], device: str) -> Iterator[MicroBatch]:
    """The micro-batches of steps, in order, as tensors on a device."""
    for step in steps:
        for number, shard in enumerate(step.shards):
            with_ids = replace(shard, arrays={**shard.arrays, "row_ids": shard.row_ids})
            for index in range(len(shard.micro_batches)):
                ends_mini = index + 1 == len(shard.micro_batches)
                yield MicroBatch(
                    step=step.index,
                    epoch=step.epoch,
                    mini=number,
                    tensors=_on(device, with_ids.micro(index)),
                    denominators=shard.denominators,
                    layout=shard.layout,
                    ends_mini=ends_mini,
                    ends_step=ends_mini and number + 1 == len(step.shards),
                )


def _on(device: str, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    def tensor(array: npt.NDArray[Any]) -> Any:
        if array.dtype.kind == "U":
            return array
        if array.dtype == BF16:
            return torch.from_numpy(array["bfloat16"]).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)

    return {name: tensor(array) for name, array in arrays.items()}


class ClientStats(NamedTuple):
    """Counts of what a client has done since it attached.

    Attributes:
        steps: yielded.
        wait_s: how long the caller waited for steps, in total.
        last_wait_s: how long it waited for the newest step.
        outstanding: fetches that were not yielded yet.
        outstanding_bytes: their planned bytes; 0 without a limit in bytes.
    """

    steps: int
    wait_s: float
    last_wait_s: float
    outstanding: int
    outstanding_bytes: int
