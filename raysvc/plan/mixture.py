"""Several sources in one stream of groups, by exact counts.

Axes: K sources, P positions of the stream, epochs counted through.
A stage gives every source a count; the pattern that spreads these counts evenly has the sum of the counts as
its period and goes on until the next stage begins.
Always true:
- over every period of a stage each source comes exactly as often as its count;
- over the first q positions of a stage a source with share w comes q * w times, but for at most K / 2;
- each group of a source comes once before any of that source comes again, through stages and epochs;
- positions before a stage do not depend on it: a source or a weight can be added at a later step;
- what was decided while the stream was read (`decided`) changes neither its identity nor the length of an epoch;
- time and memory depend on the positions asked for, K and the stages, never on the size of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc import row_ids
from raysvc.errors import PlanError
from raysvc.plan.order import GroupOrder, Order
from raysvc.plan.schedule import ENDLESS
from raysvc.plan.sliced.followed_order import FollowedOrder
from raysvc.plan.sliced.window_order import WindowOrder

Int64s = npt.NDArray[np.int64]
ENDLESS_PERIOD = 10_000
_LARGEST_PERIOD = 3_000_000_000  # its square fits int64


@dataclass(frozen=True)
class MixtureSource:
    """One cache entry of a mixture.

    Attributes:
        key: of the entry; its order depends on it, not on its place in the list.
        num_groups: groups of the entry.
        order: of its groups, where it is not that of the mixture.
        shuffle: which order that is.
        slices: digest of where its slices begin, where rows are numbered by slice.
    """

    key: str
    num_groups: int
    order: Order | WindowOrder | FollowedOrder | None = None
    shuffle: str = ""
    slices: str = ""

    def identity(self) -> list[str | int]:
        """Returns what decides its groups and their order, as JSON."""
        return [self.key, self.num_groups, *(one for one in (self.shuffle, self.slices) if one)]


@dataclass(frozen=True)
class Stage:
    """A stretch of the stream: from position `first` on, a period has `counts` groups of each source; missing ones
    are 0.
    """

    first: int
    counts: tuple[int, ...]

    @property
    def period(self) -> int:
        """Positions after which the pattern starts again."""
        return sum(self.counts)


@dataclass(frozen=True)
class Mixture(GroupOrder):
    """A stream of groups of several sources; group numbers run through the sources in their order.

    Where rows are numbered by slice, the groups of source k are numbered from `row_ids.source_base(k)` on.

    Attributes:
        sources: K of them; new ones are appended.
        stages: by ascending `first`, the first one at 0; its period is the length of an epoch, unless all sources in it are followed.
        seed: of the run.
        block: see `Order`.
        decided: stages that came later, by ascending `first`; one takes the place of a stage that begins where it does.

    Raises:
        PlanError: an empty source, two with one key, or stages that do not fit together.
    """

    sources: tuple[MixtureSource, ...]
    stages: tuple[Stage, ...]
    seed: int = 0
    block: int | None = 0
    decided: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        keys = [source.key for source in self.sources]
        firsts = [stage.first for stage in self.stages]
        every = (*self.stages, *self.decided)
        problem = ""
        if empty := [source.key for source in self.sources if source.num_groups < 1]:
            problem = f"source {empty[0]!r} has no groups"
        elif len(set(keys)) < len(keys):
            problem = f"source {max(keys, key=keys.count)!r} comes twice"
        elif not firsts or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            problem = f"stages begin at {firsts}, not at 0 and ascending"
        elif not all(0 < stage.period < _LARGEST_PERIOD for stage in every):
            problem = f"a stage has a period of {[stage.period for stage in every]} groups"
        elif any(len(stage.counts) > len(keys) or min(stage.counts) < 0 for stage in every):
            problem = "a stage has more counts than there are sources, or a negative one"
        if problem:
            raise PlanError("plan.mixture", problem, "give each source groups, and stages with counts")

    @property
    def num_groups(self) -> int:
        """Positions of one epoch."""
        return groups_of_epoch(self.stages[0].counts, [source.num_groups for source in self.sources])

    @property
    def last_join(self) -> int:
        """See `GroupOrder`."""
        return self.stages[-1].first

    def decided_by(self, stages: Sequence[Stage]) -> Mixture:
        """See `GroupOrder`."""
        return replace(self, decided=tuple(stages))

    def turns_before(self, position: int, num_sources: int = 1) -> list[int]:
        """[K], how many groups of each of its sources come before a position of the stream, all epochs counted."""
        stages, firsts, before = self._in_force
        number = int(np.searchsorted(firsts, position, side="right")) - 1
        more = _counts_until(stages[number], position - firsts[number], len(self.sources))
        turns: list[int] = (before[number] + more).tolist()
        return turns

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        """Groups at `positions` (int64 [P], each in [0, num_groups)) of `epoch`."""
        stream = positions + epoch * self.num_groups
        source_of, turn = self._turns(stream)
        out = np.empty_like(stream)
        offset = 0
        for number, source in enumerate(self.sources):
            here = np.flatnonzero(source_of == number)
            first = row_ids.source_base(number) if source.slices else offset
            out[here] = first + self._groups(source, turn[here])
            offset += source.num_groups
        return out

    def needed(self, epoch: int, position: int) -> list[tuple[int, int]]:
        """(source, slice) of every windowed source: those first that the stream needs first from this position of the epoch on.

        To within some positions: what a stage gives a source is taken as spread evenly.
        """
        position += epoch * self.num_groups
        stages, firsts, before = self._in_force
        far = int(_LARGEST_PERIOD) // stages[-1].period + 1
        stream = np.array([*firsts, firsts[-1] + far * stages[-1].period], float)
        needs, found = [], []
        for number, source in enumerate(self.sources):
            if source.order is None:
                continue
            counts = stages[-1].counts
            last = before[-1][number] + far * (counts[number] if number < len(counts) else 0)
            turns = np.array([*(one[number] for one in before), last], float)
            passed, place = divmod(self.turns_before(position)[number], source.num_groups)
            slices, places = source.order.needs_from(passed, place)
            needs.append(np.interp(passed * source.num_groups + places, turns, stream))
            found.append(np.stack([np.full(len(slices), number), slices]))
        order = np.argsort(np.concatenate(needs), kind="stable")
        return [(int(one[0]), int(one[1])) for one in np.concatenate(found, axis=1)[:, order].T]

    def identity(self) -> dict[str, Any]:
        """Returns what decides the stream, as JSON."""
        return {
            "sources": [source.identity() for source in self.sources],
            "stages": [[stage.first, list(stage.counts)] for stage in self.stages],
            "order": [self.seed, self.block],
        }

    def _groups(self, source: MixtureSource, turns: Int64s) -> Int64s:
        """The groups of `source` at its own turns, pass after pass."""
        order = source.order or Order(source.num_groups, self.seed, self.block, salt=source.key)
        passes, places = np.divmod(turns, source.num_groups)
        out = np.empty_like(turns)
        for number in np.unique(passes).tolist():
            here = passes == number
            out[here] = order.at(number, places[here])
        return out

    @cached_property
    def _in_force(self) -> tuple[list[Stage], list[int], list[Int64s]]:
        """All stages in order, where each begins, and how often each source came before it (int64 [K])."""
        by_first = {stage.first: stage for stage in (*self.stages, *self.decided)}
        firsts = sorted(by_first)
        stages = [by_first[first] for first in firsts]
        before = [np.zeros(len(self.sources), np.int64)]
        for stage, following in pairwise(stages):
            came = _counts_until(stage, following.first - stage.first, len(self.sources))
            before.append(before[-1] + came)
        return stages, firsts, before

    def _turns(self, stream: Int64s) -> tuple[Int64s, Int64s]:
        """Returns which source each stream position is of, and its index within that source."""
        stages, firsts, before = self._in_force
        stage_of = np.searchsorted(firsts, stream, side="right") - 1
        source_of, turn = np.empty_like(stream), np.empty_like(stream)
        for number in np.unique(stage_of).tolist():
            here = np.flatnonzero(stage_of == number)
            source_of[here], within = _pattern(stages[number], stream[here] - firsts[number])
            turn[here] = within + before[number][source_of[here]]
        return source_of, turn


def groups_of_epoch(counts: Sequence[int], num_groups: Sequence[int]) -> int:
    """Positions of an epoch of a mixture: the period of its first stage; `ENDLESS` where all sources in it are.

    Args:
        counts: of each source that is in the stage.
        num_groups: of each source.
    """
    there = [size for count, size in zip(counts, num_groups, strict=False) if count]
    return ENDLESS if all(size >= ENDLESS for size in there) else sum(counts)


def apportion(weights: Sequence[Fraction | float | int], total: int) -> tuple[int, ...]:
    """Whole numbers like `weights` that sum to `total`, by largest remainder (ties: the earlier one).

    Raises:
        PlanError: a weight is negative, or none is above 0.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact, Fraction(0))
    if whole <= 0 or min(exact) < 0:
        raise PlanError("plan.mixture", f"weights {list(map(float, weights))}", "give weights above 0")
    shares = [weight * total / whole for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


def counts_by_epochs(epochs: Sequence[float], num_groups: Sequence[int]) -> tuple[int, ...]:
    """Counts of a stage in which source k is passed `epochs[k]` times."""
    return tuple(round(Fraction(times) * size) for times, size in zip(epochs, num_groups, strict=True))


def counts_by_weight(
    weights: Sequence[float], num_groups: Sequence[int], tokens: Sequence[Fraction | int] | None = None
) -> tuple[int, ...]:
    """Counts of a stage in which the sources come by `weights`, and the scarcest is passed once; where no source has an end, of
    `ENDLESS_PERIOD` groups.

    Args:
        weights: shares of groups; with `tokens`, shares of tokens.
        num_groups: [K], groups of each source.
        tokens: [K], of each source.
    """
    shares = [Fraction(weight) for weight in weights]
    if tokens is not None:
        shares = [w * g / t for w, g, t in zip(shares, num_groups, tokens, strict=True)]
    whole = sum(shares, Fraction(0))
    if whole <= 0:
        return apportion(shares, 1)
    total = min(int(size * whole / share) for share, size in zip(shares, num_groups, strict=True) if share)
    return apportion(shares, ENDLESS_PERIOD if total >= ENDLESS else max(total, 1))


def _pattern(stage: Stage, positions: Int64s) -> tuple[Int64s, Int64s]:
    """Source of each position since the stage began, and how many of that source came before it."""
    rounds, rest = np.divmod(positions, stage.period)
    source_of = np.full(len(rest), -1, np.int64)
    turn = np.zeros_like(rest)
    left = stage.period
    for number, count in enumerate(stage.counts):
        open_ = np.flatnonzero(source_of < 0)
        if not count or not len(open_):
            continue
        before, after = _shared(rest[open_], count, left), _shared(rest[open_] + 1, count, left)
        mine = after > before
        source_of[open_[mine]] = number
        turn[open_[mine]] = before[mine]
        rest[open_] -= before
        left -= count
    counts = np.array(stage.counts, np.int64)
    return source_of, turn + rounds * counts[source_of]


def _counts_until(stage: Stage, positions: int, num_sources: int) -> Int64s:
    """int64 [K], how often each source comes in the first `positions` of the stage."""
    rounds, rest = divmod(positions, stage.period)
    out = np.zeros(num_sources, np.int64)
    left = stage.period
    for number, count in enumerate(stage.counts):
        if count:
            here = (rest * count + left // 2) // left
            out[number] = rounds * count + here
            rest -= here
            left -= count
    return out


def _shared(positions: Int64s, count: int, whole: int) -> Int64s:
    """Counts how many of the first `positions` slots fall to who gets `count` of every `whole`, spread evenly."""
    return (positions * count + whole // 2) // whole
