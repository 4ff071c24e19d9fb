"""The plan over the rows of cache entries, and that of an evaluation.

Axes: N rows, G groups.
Always true:
- a group is a row, the rows that `train_on: each_assistant_turn` made of one conversation, or a pair;
- the two rows of a pair (`preference`, `kto`) are on one rank and in one micro-batch;
- the patches of rows with media decide ranks, never which rows a step has;
- a server and `raysvc plan` ask the same function, so they follow the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.cache.key import rows_key
from raysvc.cache.local.large_array import concatenated
from raysvc.errors import PlanError
from raysvc.job.config import PAIRED, PlanConfig, RowsConfig
from raysvc.media.medium import PATCHES
from raysvc.plan.groups import Groups
from raysvc.plan.mixture import Mixture, MixtureSource, Stage, counts_by_weight
from raysvc.plan.order import Order, parse_shuffle
from raysvc.plan.plan import Plan
from raysvc.plan.plan_rows import HeldRows
from raysvc.plan.schedule import ENDLESS
from raysvc.plan.sliced.followed_order import FollowedOrder
from raysvc.plan.sliced.sliced_rows import (
    MOST,
    OPEN_BEYOND,
    SlicedRows,
    WindowedSource,
    digest_of,
    order_of,
    window_of,
)
from raysvc.plan.sliced.window_order import WindowOrder, is_windowed
from raysvc.ragged import Int64s
from raysvc.row_ids import RowPlaces

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry


SAMPLED = 4  # slices of a source with a window, whose tokens stand for those of all


def plan_of_entries(
    config: PlanConfig,
    entries: Sequence[Entry],
    stages: Sequence[tuple[int, tuple[int, ...]]] = (),
    shuffles: Sequence[str | None] = (),
) -> Plan:
    """The plan over the rows of `entries`, one after the other.

    Args:
        config: section `plan` of a job.
        entries: one, or those of a mixture.
        stages: of a mixture, see `raysvc.plan.mixture`; none for a single entry.
        shuffles: of each source of a mixture, where it is not `config.shuffle`.

    Raises:
        PlanError: see `Plan`.
    """
    keys = [rows_key(one.key, one.recipe) for one in entries]
    pairs = _are_pairs(entries)
    wanted = [one or config.shuffle for one in shuffles] or [config.shuffle] * len(entries)
    if numbers_by_slice(config, shuffles):
        rows = SlicedRows(entries, [_source(*each) for each in zip(entries, wanted, strict=True)])
        if not stages and not entries[0].listings:
            window = window_of(config.shuffle, entries[0])
            config = config.model_copy(update={"shuffle": f"window({window})"})
        mixture = _mixture(config, entries, wanted, stages) if stages else None
        return Plan(config, rows, entry_keys=keys, mixture=mixture)
    starts = [one.slice_starts for one in entries]
    places = RowPlaces(starts)
    entries = chosen_entries(config, entries, shuffles, may_lack=not stages)
    chosen = None if config.rows is None else _positions(entries, starts)
    if chosen is not None:
        places = places.among(chosen)
    mixture = _mixture(config, entries, wanted, stages) if stages else None
    lengths = concatenated([one.lengths() for one in entries])
    held = HeldRows(
        lengths, _groups(entries, pairs), _patches(entries), places, row_values=entries[0].row_values
    )
    return Plan(config, held, entry_keys=keys, mixture=mixture, chosen=chosen)


class ChosenEntry:
    """An entry as a plan of some of its rows sees it: counts, lengths and columns are of these alone.

    Args:
        entry: finished; it answers whatever is not asked of rows.
        positions: int64 [M], of the rows, ascending.
    """

    def __init__(self, entry: Entry, positions: Int64s) -> None:
        self.entry, self.positions = entry, positions
        self.num_rows = len(positions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.entry, name)

    @property
    def num_tokens(self) -> int:
        """The tokens of the rows."""
        return int(self.lengths().sum(dtype=np.int64))

    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of the rows, int32 [M]."""
        return np.asarray(self.entry.lengths()[self.positions], np.int32)

    def row_values(self, name: str) -> npt.NDArray[Any]:
        """A per-row column of the rows, [M]."""
        return self.entry.row_values(name)[self.positions]


def chosen_entries(
    config: PlanConfig,
    entries: Sequence[Any],
    shuffles: Sequence[str | None] = (),
    *,
    may_lack: bool = False,
) -> list[Any]:
    """The entries as a plan sees them: with `plan.rows`, those of the chosen rows; a pair is chosen as a whole.

    Where rows are numbered by slice they stay as they are, and the other rows leave holes, as rows that were dropped do.

    Args:
        may_lack: an entry of several may have none of the rows; a mixture has a share of each.

    Raises:
        PlanError: a row that is not there, or no row of an entry is left.
    """
    if config.rows is None or numbers_by_slice(config, shuffles):
        return list(entries)
    places = RowPlaces([one.slice_starts for one in entries])
    bounds = np.cumsum([0, *(one.num_rows for one in entries)])
    kept = np.full(bounds[-1], config.rows.include is None)
    for name, ids, keeps in (
        ("include", config.rows.include or (), True),
        ("exclude", config.rows.exclude, False),
    ):
        try:
            kept[places.positions_of(np.array(ids, np.int64))] = keeps
        except IndexError as error:
            remedy = "take the ids from the column row_id of CacheEntry.ray_dataset"
            raise PlanError(f"plan.rows.{name}", str(error), remedy) from None
    out = []
    for number, (entry, first, stop) in enumerate(zip(entries, bounds, bounds[1:], strict=False)):
        here = kept[first:stop]
        if entry.recipe.get("format") in PAIRED:
            here = here.reshape(-1, 2).all(axis=1).repeat(2)
        if not (here.any() or (may_lack and kept.any())):
            what = "no row is left" if len(entries) == 1 else f"no row of source {number} is left"
            raise PlanError("plan.rows", what, "include some, or exclude fewer")
        out.append(ChosenEntry(entry, np.flatnonzero(here).astype(np.int64)))
    return out


def _positions(entries: Sequence[ChosenEntry], starts: Sequence[Int64s]) -> Int64s:
    """int64 [M], the positions of chosen rows among the rows of all entries, one entry after the other."""
    firsts = np.cumsum([0, *(int(one[-1]) for one in starts)])
    return np.concatenate([one.positions + first for one, first in zip(entries, firsts, strict=False)])


def _patches(entries: Sequence[Entry]) -> npt.NDArray[np.int32] | None:
    """int32 [N], patches of each row's media; None: no entry has media."""
    if not any(PATCHES in one.columns for one in entries):
        return None
    found = [
        one.row_values(PATCHES) if PATCHES in one.columns else np.zeros(one.num_rows, np.int32)
        for one in entries
    ]
    return np.concatenate(found).astype(np.int32)


def numbers_by_slice(config: PlanConfig, shuffles: Sequence[str | None] = ()) -> bool:
    """Returns whether a plan numbers rows by slice: it does when one source is windowed.

    Args:
        shuffles: as in `plan_of_entries`.
    """
    return any(is_windowed(one or config.shuffle) for one in shuffles or (None,))


def _source(entry: Entry, shuffle: str) -> HeldRows | WindowedSource:
    if is_windowed(shuffle):
        window = MOST if entry.listings and shuffle == "window" else window_of(shuffle, entry)
        return WindowedSource(entry, window + OPEN_BEYOND)
    places = RowPlaces([entry.slice_starts])
    return HeldRows(entry.lengths(), _groups([entry]), _patches([entry]), places)


def _mixture(
    config: PlanConfig,
    entries: Sequence[Entry],
    shuffles: Sequence[str],
    stages: Sequence[tuple[int, tuple[int, ...]]],
) -> Mixture:
    """The mixture; a source that is not shuffled like `config.shuffle`, and one with a window, has an order of its own."""
    sliced = any(map(is_windowed, shuffles))
    mixed = []
    for entry, shuffle in zip(entries, shuffles, strict=True):
        key, num_groups = rows_key(entry.key, entry.recipe), count_groups(entry, shuffle)
        order: Order | WindowOrder | FollowedOrder | None = None
        if is_windowed(shuffle):
            order = order_of(entry, shuffle, config.seed, salt=key)
            if not entry.listings:  # each listing has a window of its own
                shuffle = f"window({window_of(shuffle, entry)})"
        elif shuffle != config.shuffle:
            order = Order(num_groups, config.seed, parse_shuffle(shuffle), salt=key)
        own = shuffle if order else ""
        mixed.append(MixtureSource(key, num_groups, order, own, digest_of(entry) if sliced else ""))
    block = 0 if is_windowed(config.shuffle) else parse_shuffle(config.shuffle)
    return Mixture(tuple(mixed), tuple(Stage(*stage) for stage in stages), config.seed, block)


def _are_pairs(entries: Sequence[Entry]) -> bool:
    """Returns whether the rows are pairs.

    Raises:
        PlanError: some are, and some are not.
    """
    formats = {str(one.recipe.get("format")) for one in entries}
    if len(formats) > 1 and formats & set(PAIRED):
        what = f"rows of {', '.join(sorted(formats))} in one stream, and pairs need a loss of their own"
        raise PlanError("mixture", what, "mix pairs of one format")
    return bool(formats & set(PAIRED))


def group_bounds(entry: Entry) -> Int64s | None:
    """First row of each group, and N, int64 [G + 1]; None: every row is its own group.

    The rows of a conversation, or of a pair, lie together, and are known by their equal `source_row`.
    """
    if entry.recipe.get("format") in PAIRED:
        return np.arange(0, entry.num_rows + 1, 2, dtype=np.int64)
    if entry.recipe.get("train_on") != "each_assistant_turn":
        return None
    source_rows = entry.row_values("source_row")
    if not len(source_rows):
        return np.zeros(1, np.int64)
    firsts = np.flatnonzero(source_rows[1:] != source_rows[:-1]) + 1
    return np.concatenate([[0], firsts, [len(source_rows)]]).astype(np.int64)


def count_groups(entry: Entry, shuffle: str) -> int:
    """Groups of an entry; with a window those that its source has rows for, and no row is read. `ENDLESS`: its source is followed."""
    if entry.listings:
        return ENDLESS
    if is_windowed(shuffle):
        return int(entry.source_rows.sum())
    bounds = group_bounds(entry)
    return entry.num_rows if bounds is None else len(bounds) - 1


def weighted_counts(
    entries: Sequence[Entry], weights: Sequence[float], by: str, shuffles: Sequence[str]
) -> tuple[int, ...]:
    """Groups of each entry in a period in which they come by `weights`.

    Args:
        by: what weights count, "rows" or "tokens"; with a window, rows of the source, or the tokens that its sample has.
        shuffles: of each entry.

    Raises:
        PlanError: a weight is negative, or none is above 0.
    """
    groups = [count_groups(*each) for each in zip(entries, shuffles, strict=True)]
    if by == "rows":
        return counts_by_weight(weights, groups)
    return counts_by_weight(
        weights, groups, [_tokens(*each) for each in zip(entries, shuffles, groups, strict=True)]
    )


def sampled_slices(entry: Entry) -> list[int]:
    """The slices whose tokens stand for those of a source with a window: spread evenly over it, or over its first listing, so that
    they are the same while it grows."""
    known = len(entry.listings.known[0].slices) if entry.listings else len(entry.source_rows)
    return sorted({place * (known - 1) // max(SAMPLED - 1, 1) for place in range(SAMPLED)})


def _tokens(entry: Entry, shuffle: str, num_groups: int) -> Fraction | int:
    """Tokens of so many groups of an entry; with a window as many as those of its sample have, each.

    Raises:
        PlanError: no row of the sample is left.
    """
    if not is_windowed(shuffle):
        return entry.num_tokens
    sampled = sampled_slices(entry)
    found = sum(int(entry.slice_lengths(index).sum(dtype=np.int64)) for index in sampled)
    if not found:
        what = f"of a source with the key {entry.key[:12]} slices {sampled} are counted, and no row of them is left"
        raise PlanError("mixture.by: tokens", what, "give by: rows, or fix the source")
    return Fraction(found * num_groups, int(entry.source_rows[sampled].sum()))


def _groups(entries: Sequence[Entry], pairs: bool = False) -> Groups:
    """Groups over the rows of all entries, one entry after the other."""
    bounds = [group_bounds(one) for one in entries]
    if all(one is None for one in bounds):
        return Groups.singles(sum(one.num_rows for one in entries))
    firsts: list[Int64s] = []
    offset = 0
    for entry, its in zip(entries, bounds, strict=True):
        firsts.append((np.arange(entry.num_rows) if its is None else its[:-1]) + offset)
        offset += entry.num_rows
    return Groups.of_runs(np.concatenate([*firsts, [offset]]).astype(np.int64), pairs)


def eval_plan(
    config: PlanConfig,
    batch_size: int,
    without: Sequence[str] = (),
    rows: Sequence[int] | None = None,
) -> PlanConfig:
    """The plan of an eval: every row once, in the order of the entry, in the shape of training.

    Args:
        without: columns that do not travel.
        rows: ids of the rows; None: all.
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
            "rows": None if rows is None else RowsConfig(include=tuple(rows)),
            "columns": tuple(name for name in config.columns if name not in without),
        }
    )
