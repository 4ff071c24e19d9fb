"""Rows of a plan that goes slice by slice: lengths, groups and media of the slices that are open, and of no other.

Axes: K sources, S slices of a source, P groups or rows asked for.
Always true:
- a slice is looked at when a row of it is asked for; at most `keep` of a source are remembered, the newest ones;
- a group is what was made of one row of the source: a row, a pair, the rows of `train_on: each_assistant_turn`, or nothing,
  where the row was dropped or quarantined;
- which groups a step has follows from how the source was cut, so it is known before any row is tokenized;
- rows have the numbers of `raysvc.row_ids`, those of a source in full shuffle too.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc import row_ids
from raysvc.cache.growing.listings import Listing
from raysvc.cache.part_info import REBUILD
from raysvc.errors import EntryError, PlanError
from raysvc.job.config import PAIRED, PlanConfig
from raysvc.media.medium import COLUMN, PATCHES
from raysvc.plan.plan_rows import NO_ROW, HeldRows, Int32s
from raysvc.plan.schedule import ENDLESS
from raysvc.plan.sliced.followed_order import FollowedOrder
from raysvc.plan.sliced.window_order import WindowOrder
from raysvc.ragged import Int64s, cells_of_runs

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry

THREADS = 16
OPEN_BEYOND = 8  # slices that stay open behind a window, for steps that are made at the same time
WINDOW_BYTES = 2 << 30  # of source text: its parts are about as large, and what stays in the page cache
FEWEST, MOST = 8, 64  # slices of a window
NO_LENGTHS = np.zeros(0, np.int64)


class _Slice(NamedTuple):
    """Lengths int32 [n] of the rows; the first row of each group, and n, or None where every group has as many rows; and
    the work of a media encoder [n], or None where the entry's rows have no media."""

    lengths: Int32s
    bounds: Int32s | None
    patches: npt.NDArray[Any] | None


class WindowedSource:
    """An entry whose slices are opened when they are reached.

    Args:
        entry: finished, or being built.
        keep: slices that stay open.

    Raises:
        PlanError: there are too many slices to number.
        EntryError: the entry does not tell the rows of its slices.
    """

    def __init__(self, entry: Entry, keep: int) -> None:
        self.entry = entry
        self._keep = keep
        pairs = entry.recipe.get("format") in PAIRED
        self._turns = not pairs and entry.recipe.get("train_on") == "each_assistant_turn"
        self._each = 2 if pairs else 1  # rows of a group, where they are all alike
        self._lock = threading.Lock()  # guards _open
        self._open: OrderedDict[int, _Slice] = OrderedDict()
        if len(self.groups) > row_ids.MOST_SLICES:
            what = f"{len(self.groups)} slices are more than {row_ids.MOST_SLICES}"
            raise PlanError("plan.shuffle", what, "raise workers.slice_mb")

    @property
    def groups(self) -> Int64s:
        """int64 [S], of each slice."""
        return self.entry.source_rows

    @property
    def num_groups(self) -> int:
        """Groups of all slices."""
        return ENDLESS if self.entry.listings else int(self.groups.sum())

    def spans(self, groups: Int64s) -> tuple[Int64s, Int64s]:
        """First row of each group, and how many rows it has; 0 where its row of the source was left out."""
        place = row_ids.split(groups)
        first, size = self._each * place.row, np.full(len(groups), self._each, np.int64)
        opened = self._opened(np.unique(place.slice))
        if any(one.bounds is not None for one in opened.values()):
            for number, here in _runs(place.slice):
                bounds = opened[number].bounds
                if bounds is not None:
                    first[here] = bounds[place.row[here]]
                    size[here] = bounds[place.row[here] + 1] - first[here]
        return row_ids.join(place.slice, first), size

    def lengths_of(self, ids: Int64s) -> Int32s:
        """Tokens of rows."""
        return np.asarray(self._values_of(ids, lambda one: one.lengths), np.int32)

    def patches_of(self, ids: Int64s) -> Int64s:
        """Work of a media encoder, of rows."""

        def patches(one: _Slice) -> npt.NDArray[Any]:
            assert one.patches is not None
            return one.patches

        return np.asarray(self._values_of(ids, patches), np.int64)

    def _values_of(self, ids: Int64s, values: Callable[[_Slice], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        place, out = row_ids.split(ids), np.empty(len(ids), np.int32)
        order = np.argsort(place.slice, kind="stable")
        slices, firsts = np.unique(place.slice[order], return_index=True)
        rows, found = place.row[order], np.empty(len(ids), np.int32)
        cuts = [*firsts.tolist(), len(ids)]
        for one, (start, stop) in zip(self._opened(slices).values(), pairwise(cuts), strict=True):
            found[start:stop] = values(one)[rows[start:stop]]
        out[order] = found
        return out

    def _opened(self, slices: Int64s) -> dict[int, _Slice]:
        """The slices by number, in the order asked for; those that are not open are read at the same time."""
        wanted = slices.tolist()
        with self._lock:
            found = {number: self._open[number] for number in wanted if number in self._open}
        missing = [number for number in wanted if number not in found]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(THREADS, len(missing))) as pool:
                found.update(zip(missing, pool.map(self._read, missing), strict=True))
        else:
            found.update((number, self._read(number)) for number in missing)
        with self._lock:
            for number in wanted:
                self._open[number] = found[number]
                self._open.move_to_end(number)
            while len(self._open) > self._keep:
                self._open.popitem(last=False)
        return {number: found[number] for number in wanted}

    def _read(self, number: int) -> _Slice:
        lengths, groups = self.entry.slice_lengths(number), int(self.groups[number])
        patches = self.entry.slice_values(PATCHES, number) if has_media(self.entry) else None
        if not self._turns and len(lengths) == self._each * groups:
            return _Slice(lengths, None, patches)
        found = self.entry.slice_values("source_row", number)
        begin = int(self.groups[:number].sum())
        bounds = np.searchsorted(found, np.arange(begin, begin + groups + 1)).astype(np.int32)
        if bounds[0] != 0 or bounds[-1] != len(lengths):
            what = (
                f"slice {number} has rows of other places of the source than {begin} to {begin + groups - 1}"
            )
            raise EntryError(self.entry.key, what, REBUILD)
        return _Slice(lengths, bounds, patches)


class SlicedRows:
    """The rows of a plan over some sources, of which one at least is windowed.

    Args:
        entries: K of them; the numbers of source k begin at `row_ids.source_base(k)`.
        sources: their rows.

    Raises:
        PlanError: there are too many sources to number.
    """

    are_sliced = True
    places = None

    def __init__(self, entries: Sequence[Entry], sources: Sequence[HeldRows | WindowedSource]) -> None:
        self.sources, self._entries = tuple(sources), tuple(entries)
        formats = [entry.recipe.get("format") for entry in entries]
        self.are_pairs = formats[0] in PAIRED
        self.num_groups = sum(source.num_groups for source in sources)
        if len(sources) > row_ids.MOST_SOURCES:
            what = f"{len(sources)} sources are more than {row_ids.MOST_SOURCES}"
            raise PlanError("mixture.sources", what, "join some")

    @property
    def num_rows(self) -> int:
        """Rows of the sources: what is made of each is known when it is tokenized."""
        return self.num_groups

    @property
    def digest(self) -> str:
        """The digest of the cuts of the first source."""
        return digest_of(self._entries[0])

    def order(self, config: PlanConfig, num_groups: int) -> WindowOrder | FollowedOrder:
        """The order of a single source."""
        [entry] = self._entries
        return order_of(entry, config.shuffle, config.seed)

    def rows_of(self, groups: Int64s) -> tuple[Int64s, Int32s]:
        """Rows of groups, group after group, and the number of each row's group, among those that have rows."""
        if len(self.sources) == 1:
            first, size = self.sources[0].spans(groups)
        else:
            first, size = self._spans(groups)
        index = np.repeat(np.cumsum(size > 0, dtype=np.int32) - np.int32(1), size)
        return cells_of_runs(first, size), index

    def _spans(self, groups: Int64s) -> tuple[Int64s, Int64s]:
        first, size = np.empty_like(groups), np.empty_like(groups)
        for number, here in _runs(row_ids.split(groups).source):
            base = row_ids.source_base(number)
            starts, size[here] = self.sources[number].spans(groups[here] - base)
            first[here] = starts + base
        return first, size

    def lengths_of(self, ids: Int64s) -> Int32s:
        """Tokens of rows."""
        if len(self.sources) == 1:
            return self.sources[0].lengths_of(ids)
        out = np.empty(len(ids), np.int32)
        for number, here in _runs(row_ids.split(ids).source):
            out[here] = self.sources[number].lengths_of(ids[here] - row_ids.source_base(number))
        return out

    @property
    def have_media(self) -> bool:
        """Returns whether rows of one source may have media."""
        return any(has_media(entry) for entry in self._entries)

    def patches_of(self, ids: Int64s) -> Int64s | None:
        """Work of a media encoder, of rows; None: no source has media."""
        if not self.have_media:
            return None
        out = np.zeros(len(ids), np.int64)
        for number, here in _runs(row_ids.split(ids).source):
            if has_media(self._entries[number]):
                found = self.sources[number].patches_of(ids[here] - row_ids.source_base(number))
                assert found is not None, "its rows have media"
                out[here] = found
        return out

    def check(self, ids: Int64s) -> None:
        """Refuse rows that are not there; see `check_rows`."""
        check_rows(self._entries, ids)

    def longest(self) -> npt.NDArray[np.integer[Any]]:
        """A row of `max_length` tokens, twice; none where a source has no such limit."""
        limits = [entry.recipe.get("max_length") for entry in self._entries]
        known = [int(limit) for limit in limits if limit]
        return np.full(2, max(known), np.int64) if len(known) == len(limits) else NO_LENGTHS


def has_media(entry: Entry) -> bool:
    """Returns whether rows of an entry may have media; also of one that nobody has begun to build."""
    return COLUMN in entry.recipe


def order_of(entry: Entry, shuffle: str, seed: int, salt: str = "") -> WindowOrder | FollowedOrder:
    """The order of the groups of an entry by slices.

    Args:
        shuffle: `window` or `window(W)`.
        salt: tells entries of one plan apart.
    """
    if listings := entry.listings:

        def window(listing: Listing) -> int:
            return _window(shuffle, listing.num_bytes, len(listing.slices))

        return FollowedOrder(listings, window, seed)
    return WindowOrder(entry.source_rows, window_of(shuffle, entry), seed, salt=salt)


def window_of(shuffle: str, entry: Entry) -> int:
    """W of `window` or `window(W)`.

    Without a number: as many slices as have `WINDOW_BYTES` of source text, within `FEWEST` and `MOST`. It follows from the
    source alone, so that a run goes on with its order on a machine of another size.
    """
    return _window(shuffle, int(entry.report.get("source_bytes", 0)), len(entry.source_rows))


def _window(shuffle: str, num_bytes: int, num_slices: int) -> int:
    if shuffle != "window":
        return int(shuffle[len("window(") : -1])
    return max(FEWEST, min(MOST, WINDOW_BYTES * num_slices // max(num_bytes, 1)))


def check_rows(entries: Sequence[Entry], ids: Int64s) -> None:
    """Refuse rows that are not in the entries of a mixture, or in the only one.

    Raises:
        PlanError: names the first of them.
    """
    place = row_ids.split(ids)
    for number, here in _runs(place.source):
        gone = np.ones(len(here), np.bool_)
        if 0 <= number < len(entries):
            slices, rows = place.slice[here], place.row[here]
            gone = (slices >= len(entries[number].slice_starts) - 1) | entries[number].lacks(slices, rows)
        if gone.any():
            what = f"there is no row {row_ids.written(ids[here][int(np.argmax(gone))])}"
            raise PlanError("row", what, NO_ROW)


def digest_of(entry: Entry) -> str:
    """sha256 of the rows of each slice of the source: another cut of it is another order. The key of one that is followed tells its cuts."""
    if entry.listings:
        return entry.key
    return hashlib.sha256(entry.source_rows.astype("<i8").tobytes()).hexdigest()


def _runs(numbers: Int64s) -> Iterator[tuple[int, Int64s]]:
    """Each number that occurs, and where it does."""
    if not len(numbers):
        return
    order = np.argsort(numbers, kind="stable")
    known = numbers[order]
    cuts = np.flatnonzero(np.diff(known)) + 1
    for here in np.split(order, cuts):
        yield int(numbers[here[0]]), here
