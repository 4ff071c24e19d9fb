"""Makes the shards of a planned step: read, collate, and tell what was made. No Ray, no state.

Axes: M mini-batches, K roles, R ranks of a role.
Always true:
- shards come mini-batch after mini-batch, in it role after role, in it rank after rank, of a rank part after part;
- every role gets the same rows, in the columns that it asked for; they are read once;
- the same arguments give the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raysvc.actors.server.spec import MiniOutline, Part, Role, StepInfo, StepOutline
from raysvc.collate.collate import Collate, CollateSpec, collate_mini_batch
from raysvc.collate.cp_cut import cp_cut
from raysvc.collate.geometry import geometry_of
from raysvc.collate.info import MiniBatchInfo, info_of
from raysvc.collate.shard import Shard
from raysvc.collate.shard_bytes import ColumnBytes, bytes_by_rank
from raysvc.errors import ConfigError
from raysvc.job.config import PlanConfig
from raysvc.media.medium import COLUMN
from raysvc.plan.plan import MiniBatchPlan, StepPlan
from raysvc.plan.rank_plan import cut_multiple
from raysvc.row_batch import RowBatch

if TYPE_CHECKING:
    from raysvc.actors.server.entry_media import EntryMedia

Read = Callable[[MiniBatchPlan], RowBatch]


@dataclass(frozen=True)
class Recipe:
    """Says how rows become arrays.

    Attributes:
        plan: layout and columns.
        pad_token_id: of the tokenizer.
        media: whether the arrays of media travel, where rows have some.
        batches: what makes them in place of `collate_mini_batch`.
        cp: as in `Role`.
    """

    plan: PlanConfig
    pad_token_id: int
    media: bool = True
    batches: Collate | None = None
    cp: int | None = None

    def of(self, role: Role) -> Recipe:
        """Returns the recipe with the columns of the role alone (`media`: the arrays of media), if it names some, and
        its batches, and widths that divide among its context-parallel ranks.
        """
        widths = {
            name: cut_multiple(getattr(self.plan, name), role.cp or 1)
            for name in ("align", "pad_to_multiple")
        }
        own = replace(self, batches=role.batches, cp=role.cp, plan=self.plan.model_copy(update=widths))
        if role.columns is None:
            return own
        kept = tuple(name for name in role.columns if name != COLUMN)
        return replace(own, plan=own.plan.model_copy(update={"columns": kept}), media=COLUMN in role.columns)

    def cut(self, shard: Shard) -> tuple[Shard, ...]:
        """The parts of a rank's shard; itself where it has none.

        Raises:
            ConfigError: `plan.align` or `plan.pad_to_multiple` do not divide.
        """
        split = self.plan.cp_split
        return (shard,) if split is None or self.cp is None else cp_cut(shard, self.cp, split)


def make_step(
    plans: Sequence[StepPlan],
    read: Read,
    recipes: Sequence[Recipe],
    part: Part | None = None,
    media: EntryMedia | None = None,
) -> tuple[StepInfo, tuple[Shard, ...]]:
    """The info and the shards of one step.

    Args:
        plans: [K], one plan of the step per role.
        read: gives the rows of a mini-batch, in its order.
        recipes: [K], layout, columns and padding of each role.
        part: the shards of this rank alone, with an info about its role; None: of all roles and ranks.
        media: gives shards the arrays of their media; None: rows have none.
    """
    first = plans[0]
    roles = range(len(plans)) if part is None else (part.role,)
    infos: list[MiniBatchInfo] = []
    shards: list[Shard] = []
    read_s = collate_s = 0.0
    for index, mini in enumerate(first.mini_batches):
        begin = time.perf_counter()
        rows = read(mini)
        middle = time.perf_counter()
        made = [
            collate(rows, plans[role].mini_batches[index], first.index, index, recipes[role])
            for role in roles
        ]
        info = info_of(mini, made[0])
        of_ranks = [_parts(role, recipes[number], part) for number, role in zip(roles, made, strict=True)]
        if media is not None:
            _refuse_cut(recipes)
            info = replace(
                info, rank_bytes=media.planned(info.rank_bytes, plans[roles[0]].mini_batches[index])
            )
            of_ranks = [
                [media.fill(shard, rows) for shard in shards] if recipes[role].media else shards
                for role, shards in zip(roles, of_ranks, strict=True)
            ]
        collate_s += time.perf_counter() - middle
        read_s += middle - begin
        infos.append(info)
        shards.extend(shard for role in of_ranks for shard in role)
    positions = tuple(
        tuple(tuple(rank.rows for rank in plan.mini_batches[index].ranks) for plan in plans)
        for index in range(len(first.mini_batches))
    )
    info_of_step = StepInfo(
        first.index, first.epoch, tuple(infos), positions, read_s, collate_s, order=first.order
    )
    return info_of_step, tuple(shards)


def _parts(shards: Sequence[Shard], recipe: Recipe, part: Part | None) -> list[Shard]:
    """Returns what travels of the shards of all ranks."""
    if part is None:
        return [one for shard in shards for one in recipe.cut(shard)]
    rank, number = divmod(part.rank, recipe.cp or 1)
    return [recipe.cut(shards[rank])[number]]


def _refuse_cut(recipes: Sequence[Recipe]) -> None:
    if any(recipe.cp is not None for recipe in recipes):
        what = "is set, and the rows have media, which belong to whole lines"
        raise ConfigError("plan.cp_split", what, "leave it out: every rank gets whole lines then")


def collate(rows: RowBatch, mini: MiniBatchPlan, step: int, index: int, recipe: Recipe) -> tuple[Shard, ...]:
    """The shards of one mini-batch and role."""
    made_by = collate_mini_batch if recipe.batches is None else recipe.batches.collate
    plan = recipe.plan
    spec = CollateSpec(
        step, index, plan.layout, recipe.pad_token_id, plan.columns, plan.pad_to_multiple, plan.align, plan.pad_values
    )  # fmt: skip
    return made_by(rows, mini, spec)


def outline(
    plan: StepPlan,
    recipe: Recipe,
    column_bytes: Callable[[MiniBatchPlan], ColumnBytes],
    media: EntryMedia | None = None,
) -> StepOutline:
    """Returns what is known of a step before it is made; of a role's own batches the most bytes that they can have.

    Args:
        recipe: of the role.
        column_bytes: of a mini-batch.
        media: as in `make_step`.
    """
    minis = tuple(_outline_mini(mini, recipe, column_bytes(mini), media) for mini in plan.mini_batches)
    return StepOutline(plan.index, plan.epoch, minis)


def _outline_mini(
    mini: MiniBatchPlan, recipe: Recipe, column_bytes: ColumnBytes, media: EntryMedia | None
) -> MiniOutline:
    config = recipe.plan
    geometry = geometry_of(mini.ranks, mini.lengths, config.layout, config.pad_to_multiple, config.align)
    rank_bytes = tuple(bytes_by_rank(geometry, column_bytes, even=recipe.batches is not None).tolist())
    return MiniOutline(
        row_ids=mini.row_ids,
        lengths=mini.lengths,
        num_groups=mini.num_groups,
        rank_tokens=tuple(sum(micro.num_tokens for micro in micros) for micros in geometry.micro_batches),
        rank_bytes=rank_bytes if media is None else media.planned(rank_bytes, mini),
        num_micro_batches=len(geometry.micro_batches[0]),
    )
