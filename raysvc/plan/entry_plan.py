"""The plan over the rows of cache entries, and that of an evaluation.

Axes: N rows, G groups.
Always true:
- a group is a row, the rows that `train_on: each_assistant_turn` made of one conversation, or a pair;
- the two rows of a pair (`preference`, `kto`) are on one rank and in one micro-batch;
- the patches of rows with media decide ranks, never which rows a step has;
- a server and `raysvc plan` ask the same function, so they follow the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError
from raysvc.job.config import PAIRED, PlanConfig
from raysvc.media.medium import PATCHES
from raysvc.plan.groups import Groups
from raysvc.plan.mixture import Mixture, MixtureSource, Stage
from raysvc.plan.order import parse_shuffle
from raysvc.plan.plan import Plan
from raysvc.ragged import Int64s


class Rows(Protocol):
    """What a plan asks of an entry."""

    @property
    def key(self) -> str:
        """Hash of what decides the rows."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Name -> type."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """What decided the rows."""

    def row_values(self, name: str) -> npt.NDArray[Any]:
        """A per-row column of all rows, [N]."""


def plan_of_entries(
    config: PlanConfig,
    entries: Sequence[Rows],
    lengths: npt.NDArray[np.integer[Any]],
    stages: Sequence[tuple[int, tuple[int, ...]]] = (),
) -> Plan:
    """The plan over the rows of `entries`, one after the other.

    Args:
        config: section `plan` of a job.
        entries: one, or those of a mixture.
        lengths: [N], tokens of each row of all entries.
        stages: of a mixture, see `raysvc.plan.mixture`; none for a single entry.
    """
    bounds = [group_bounds(one) for one in entries]
    mixture = None
    if stages:
        counts = [num_groups(one, its) for one, its in zip(entries, bounds, strict=True)]
        sources = tuple(MixtureSource(one.key, count) for one, count in zip(entries, counts, strict=True))
        order = config.seed, parse_shuffle(config.shuffle)
        mixture = Mixture(sources, tuple(Stage(*stage) for stage in stages), *order)
    keys = [one.key for one in entries]
    groups = _joined(entries, bounds, _are_pairs(entries))
    return Plan(
        config, lengths, groups=groups, entry_keys=keys, mixture=mixture, patches=_patches(entries),
        row_values=entries[0].row_values,
    )  # fmt: skip


def _patches(entries: Sequence[Rows]) -> npt.NDArray[np.int32] | None:
    """int32 [N], patches of each row's media; None: no entry has media."""
    if not any(PATCHES in one.columns for one in entries):
        return None
    found = [
        one.row_values(PATCHES) if PATCHES in one.columns else np.zeros(one.num_rows, np.int32)
        for one in entries
    ]
    return np.concatenate(found).astype(np.int32)


def _are_pairs(entries: Sequence[Rows]) -> bool:
    """Whether the rows are pairs.

    Raises:
        PlanError: some are, and some are not.
    """
    formats = {str(one.recipe.get("format")) for one in entries}
    if len(formats) > 1 and formats & set(PAIRED):
        what = f"rows of {', '.join(sorted(formats))} in one stream, and pairs need a loss of their own"
        raise PlanError("mixture", what, "mix pairs of one format")
    return bool(formats & set(PAIRED))


def group_bounds(entry: Rows) -> Int64s | None:
    """First row of each group, and N, int64 [G + 1]; None: every row is its own group.

    The rows of a conversation, or of a pair, lie together, and are known by their equal `source_row`.
    """
    if entry.recipe.get("format") in PAIRED:
        return np.arange(0, entry.num_rows + 1, 2, dtype=np.int64)
    if entry.recipe.get("train_on") != "each_assistant_turn":
        return None
    source_rows = entry.row_values("source_row")
    firsts = np.flatnonzero(source_rows[1:] != source_rows[:-1]) + 1
    return np.concatenate([[0], firsts, [len(source_rows)]]).astype(np.int64)


def num_groups(entry: Rows, bounds: Int64s | None) -> int:
    """Groups of an entry with these `group_bounds`."""
    return entry.num_rows if bounds is None else len(bounds) - 1


def _joined(entries: Sequence[Rows], bounds: Sequence[Int64s | None], pairs: bool) -> Groups | None:
    """Groups over the rows of all entries, one entry after the other; None: every row is its own group."""
    if all(one is None for one in bounds):
        return None
    firsts: list[Int64s] = []
    offset = 0
    for entry, its in zip(entries, bounds, strict=True):
        firsts.append((np.arange(entry.num_rows) if its is None else its[:-1]) + offset)
        offset += entry.num_rows
    return Groups.of_runs(np.concatenate([*firsts, [offset]]).astype(np.int64), pairs)


def eval_plan(config: PlanConfig, batch_size: int, without: Sequence[str] = ()) -> PlanConfig:
    """The plan of an eval: every row once, in the order of the entry, in the shape of training.

    Args:
        without: columns that do not travel.
    """
    return config.model_copy(
        update={
            "batch_size": batch_size,
            "mini_batch_size": None,
            "epochs": 1,
            "update_epochs": 1,
            "shuffle": "none",
            "order": None,
            "tail": "pad",
            "skip_rows": (),
            "columns": tuple(name for name in config.columns if name not in without),
        }
    )
