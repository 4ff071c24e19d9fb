"""From a planned step to its shards: read, collate, and tell what was made. No Ray, no state.

Axes: M mini-batches, K roles, R ranks of a role.
Always true:
- shards come mini-batch after mini-batch, in it role after role, in it rank after rank;
- every role gets the same rows, in the columns that it asked for; they are read once;
- the same arguments give the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raysvc.actors.server.spec import MiniOutline, StepInfo, StepOutline
from raysvc.collate.collate import collate_mini_batch
from raysvc.collate.columns import SEVERAL_ROWS, column_names
from raysvc.collate.geometry import geometry_of
from raysvc.collate.info import MiniBatchInfo, info_of
from raysvc.collate.shard import Shard
from raysvc.config import PlanConfig
from raysvc.plan.plan import MiniBatchPlan, StepPlan
from raysvc.row_batch import Array, RowBatch

Read = Callable[[MiniBatchPlan], RowBatch]
_OWN_2D = {
    "input_ids": 4,
    "labels": 4,
    "position_ids": 4,
    "segment_ids": 4,
    "attention_mask": 1,
    "loss_mask": 1,
}
_OWN_PER_ROW = 4 * 4 + 8  # seq_lengths, row_tokens, row_group, row_group_rows; row_ids


@dataclass(frozen=True)
class Recipe:
    """How rows become arrays."""

    plan: PlanConfig
    pad_token_id: int

    def carrying(self, columns: tuple[str, ...] | None) -> Recipe:
        """With these columns alone; None: as it is."""
        return (
            self if columns is None else replace(self, plan=self.plan.model_copy(update={"columns": columns}))
        )


def make_step(
    plans: Sequence[StepPlan], read: Read, recipes: Sequence[Recipe]
) -> tuple[StepInfo, tuple[Shard, ...]]:
    """The info and the shards of one step.

    Args:
        plans: [K], one plan of the step per role.
        read: gives the rows of a mini-batch, in its order.
        recipes: [K], layout, columns and padding of each role.
    """
    first = plans[0]
    infos: list[MiniBatchInfo] = []
    shards: list[Shard] = []
    read_s = collate_s = 0.0
    for index, mini in enumerate(first.mini_batches):
        begin = time.perf_counter()
        rows = read(mini)
        middle = time.perf_counter()
        made = [
            collate(rows, plan.mini_batches[index], first.index, index, recipe)
            for plan, recipe in zip(plans, recipes, strict=True)
        ]
        collate_s += time.perf_counter() - middle
        read_s += middle - begin
        infos.append(info_of(mini, made[0]))
        shards.extend(shard for role in made for shard in role)
    positions = tuple(
        tuple(tuple(rank.rows for rank in plan.mini_batches[index].ranks) for plan in plans)
        for index in range(len(first.mini_batches))
    )
    return StepInfo(first.index, first.epoch, tuple(infos), positions, read_s, collate_s), tuple(shards)


def collate(rows: RowBatch, mini: MiniBatchPlan, step: int, index: int, recipe: Recipe) -> tuple[Shard, ...]:
    """The shards of one mini-batch and role."""
    return collate_mini_batch(
        rows,
        mini,
        step=step,
        mini_index=index,
        layout=recipe.plan.layout,
        pad_token_id=recipe.pad_token_id,
        columns=recipe.plan.columns,
        pad_to_multiple=recipe.plan.pad_to_multiple,
        align=recipe.plan.align,
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of what travels: per cell, and per row beside its tokens."""

    per_cell: int
    per_row: int

    @classmethod
    def of(cls, some_rows: RowBatch, config: PlanConfig) -> Sizes:
        """Sizes for rows with these columns.

        Raises:
            ConfigError: `plan.columns` names something that the rows do not have.
        """
        names = column_names(config.columns, some_rows, config.layout)
        cells = [_OWN_2D.get(name) or _itemsize(some_rows.tokens, name) for name in names]
        rows = [_itemsize(some_rows.rows, name) for name in names if name not in some_rows.tokens]
        return cls(sum(cells), _OWN_PER_ROW + sum(rows))


def outline(plan: StepPlan, config: PlanConfig, sizes: Sizes) -> StepOutline:
    """What the plan alone says of a step."""
    minis = tuple(_outline_mini(mini, config, sizes) for mini in plan.mini_batches)
    return StepOutline(plan.index, plan.epoch, minis)


def _outline_mini(mini: MiniBatchPlan, config: PlanConfig, sizes: Sizes) -> MiniOutline:
    geometry = geometry_of(mini.ranks, mini.lengths, config.layout, config.pad_to_multiple, config.align)
    cells, rows, lines = (
        np.diff(b) for b in (geometry.cell_bounds, geometry.sequence_bounds, geometry.line_bounds)
    )
    nbytes = cells * sizes.per_cell + rows * sizes.per_row
    if config.layout in SEVERAL_ROWS:
        nbytes = nbytes + 4 * (rows + lines) + 4 * (lines + 1)
    return MiniOutline(
        row_ids=mini.row_ids,
        lengths=mini.lengths,
        num_groups=mini.num_groups,
        rank_tokens=tuple(sum(micro.num_tokens for micro in micros) for micros in geometry.micro_batches),
        rank_bytes=tuple(nbytes.tolist()),
        num_micro_batches=len(geometry.micro_batches[0]),
    )


def _itemsize(columns: Mapping[str, Array], name: str) -> int:
    return columns[name].dtype.itemsize if name in columns else 0
