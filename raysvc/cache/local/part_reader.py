"""The parts of one folder, read at random.

Axes: N rows.

Always true:
- a part is memory-mapped when the first row of it is asked for; at most `OPEN_PARTS` stay mapped;
- a remote part is a checked copy on this node's disk, fetched ahead when reading is sequential or announced;
- a part whose size or structure is not what the manifest says raises EntryError and is never served;
- every method may be called from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.cache.local.large_array import large_array
from raysvc.cache.local.part_cache import PartCopies, node_copies
from raysvc.cache.local.part_source import LocalParts, RemoteParts
from raysvc.cache.part_info import PartInfo
from raysvc.cache.part_table import PartTable
from raysvc.cache.store.store import Store
from raysvc.row_batch import RowBatch

if TYPE_CHECKING:
    from raysvc.cache.parts import PartView

OPEN_PARTS = 4096  # mappings cost no file handle, and Linux allows 65530 of them
READ_AHEAD = 4  # parts; two kept half of the connections idle
THREADS = 16
PARTS_AT_ONCE = 4 * THREADS


class PartReader:
    """Rows of parts that lie one after the other."""

    def __init__(
        self,
        store: Store,
        folder: str,
        parts: Sequence[PartInfo],
        columns: Mapping[str, str],
        copies: PartCopies | None = None,
        starts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Nothing is read.

        Args:
            store, folder: where the parts lie.
            parts: in row order.
            columns: column name -> type, of every part.
            copies: where copies of remote parts lie; None: what `node_copies` says.
            starts: int64 [parts + 1], where the numbers of the rows of each part begin; None: they follow each other. Given
                them, no part is asked for before a row of it is.
        """
        self.store, self.folder = store, folder
        self.parts, self.columns = parts, columns
        self._reads_ahead = starts is None  # what follows a part may not be there
        self._source = _source_of(store, folder, copies)
        self._lock = threading.Lock()  # guards _views, _mapped_bytes and _last_part
        self._views: OrderedDict[int, PartView] = OrderedDict()  # mapped parts, least recently used first
        self._mapped_bytes = 0  # of _views
        self._last_part = -1  # where the newest read ended
        self._given_starts = starts

    @property
    def uri(self) -> str:
        """The folder."""
        return f"{self.store.url}/{self.folder}"

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return int(self.starts[-1])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64 [parts + 1], the first row of each part, and the number of rows."""
        if self._given_starts is not None:
            return self._given_starts
        parts = self.parts
        rows = parts.num_rows if isinstance(parts, PartTable) else [part.num_rows for part in parts]
        return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])

    def part_lengths(self, index: int) -> npt.NDArray[np.int32]:
        """Tokens of every row of a part; reads its offsets alone."""
        return np.diff(self._offsets(index))

    def part_values(self, name: str, index: int) -> npt.NDArray[Any]:
        """A per-row column of a part; no page of another column is read."""
        return self._view(index).rows[name]

    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every row, int32 [N], of many rows in a mapped file; reads the offsets alone."""
        out = large_array(self.num_rows, np.int32)
        for index, lengths in enumerate(self.lengths_by_part()):
            out[self.starts[index] : self.starts[index + 1]] = lengths
        return out

    def lengths_by_part(self) -> Iterator[npt.NDArray[np.int32]]:
        """Tokens of every row, part after part; some parts are read at the same time."""
        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(0, len(self.parts), PARTS_AT_ONCE):
                yield from pool.map(
                    self.part_lengths, range(first, min(first + PARTS_AT_ONCE, len(self.parts)))
                )

    def read(self, ids: npt.NDArray[np.int64]) -> RowBatch:
        """Rows in the given order.

        Args:
            ids: int64 [N], 0-based positions; may repeat.

        Raises:
            IndexError: a row that is not there.
            EntryError: a damaged part.
            StoreError: a store that cannot be reached.
        """
        from raysvc.cache.gather import gather

        used = self._used(ids)
        goes_on = self._goes_on(used)
        ahead = range(used[-1] + 1, min(used[-1] + 1 + READ_AHEAD, len(self.parts))) if goes_on else ()
        self._fetch_ahead([*used, *ahead])
        batch = gather(ids, self.starts, {index: self._view(index) for index in used or [self._any()]})
        if goes_on:
            self._let_go_before(used[0])
        return batch

    def row_values(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """A per-row column, part after part; no page of another column is read.

        Raises:
            EntryError: a damaged part.
        """
        for index in range(len(self.parts)):
            self._fetch_ahead(list(range(index, min(index + READ_AHEAD, len(self.parts)))))
            yield self._view(index).rows[name]

    def prefetch(self, ids: npt.NDArray[np.int64]) -> None:
        """Announce rows that will be read soon, in that order; never blocks."""
        self._fetch_ahead(self._used(ids))

    def views(self) -> Iterator[PartView]:
        """All parts in row order, each compared with its checksums."""
        for view in self.open_views():
            view.check_all()
            yield view

    def open_views(self) -> Iterator[PartView]:
        """All parts in row order; their tokens are compared when they are read."""
        for index in range(len(self.parts)):
            yield self._view(index)

    def fetch_all(self) -> None:
        """Announce every part."""
        self._fetch_ahead(list(range(len(self.parts))))

    def _used(self, ids: npt.NDArray[np.int64]) -> list[int]:
        """Parts that hold the rows, in the order in which they are first needed."""
        from raysvc.cache.gather import parts_of

        used, firsts = np.unique(parts_of(ids, self.starts), return_index=True)
        ordered: list[int] = used[np.argsort(firsts)].tolist()
        return ordered

    def _any(self) -> int:
        """A part to take the columns of no row from: one that is open, since others may not be there yet."""
        with self._lock:
            return next(iter(self._views), 0)

    def _goes_on(self, used: list[int]) -> bool:
        """Returns whether the reads go from front to back."""
        if not used or not self._reads_ahead:
            return False
        with self._lock:
            last, self._last_part = self._last_part, used[-1]
        return used == sorted(used) and last <= used[0] <= last + 1

    def _let_go_before(self, first: int) -> None:
        """Unmap what a scan has left behind, so that it needs the same memory for any number of rows."""
        with self._lock:
            for index in [index for index in self._views if index < first]:
                del self._views[index]
                self._mapped_bytes -= self.parts[index].num_bytes

    def _fetch_ahead(self, indexes: list[int]) -> None:
        with self._lock:
            new = [index for index in indexes if index not in self._views]
        self._source.prefetch([self.parts[index] for index in new])

    def _view(self, index: int) -> PartView:
        with self._lock:
            if index in self._views:
                self._views.move_to_end(index)
                return self._views[index]
        from raysvc.cache.parts import decode_part

        part = self.parts[index]
        view = decode_part(self._source.buffer(part), part, self.uri, self.columns, self._source.are_checked)
        with self._lock:
            self._keep(index, view)
        return view

    def _keep(self, index: int, view: PartView) -> None:
        if index not in self._views:
            self._mapped_bytes += self.parts[index].num_bytes
        self._views[index] = view
        limit = self._source.max_mapped_bytes
        while len(self._views) > 1 and (len(self._views) > OPEN_PARTS or self._mapped_bytes > limit):
            self._mapped_bytes -= self.parts[self._views.popitem(last=False)[0]].num_bytes

    def _offsets(self, index: int) -> npt.NDArray[np.int32]:
        from raysvc.cache.parts import decode_offsets

        part = self.parts[index]
        end = part.offsets_start + 4 * (part.num_rows + 1)
        path = f"{self.folder}/{part.name}"
        data = self.store.read(path, part.offsets_start, end) if part.num_rows else b""
        return decode_offsets(data, part, self.uri)


def _source_of(store: Store, folder: str, copies: PartCopies | None) -> LocalParts | RemoteParts:
    if store.local_path(folder) is not None:
        return LocalParts(store, folder)
    return RemoteParts(store, folder, copies or node_copies())
