"""A finished entry, read at random.

Axes: N rows.

Always true:
- opening reads the manifest and a listing, never a part: it costs the same for any number of rows, and of parts where they
  have a table;
- from the first row that is read until the entry is let go of, it is held: gc does not delete it;
- no row is served whose bytes were not compared with their checksum, in this process or on arrival;
- a part whose size or structure is not what the manifest says raises EntryError and is never served;
- an entry that adds columns to a base has the rows of the base, with those columns, and none of its bytes twice;
- every method may be called from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.cache import names
from raysvc.cache.local.part_cache import PartCopies
from raysvc.cache.local.part_reader import PartReader
from raysvc.cache.manifest import Manifest
from raysvc.cache.part_info import REBUILD
from raysvc.cache.part_table import PartTable
from raysvc.cache.store.store import Found, Store
from raysvc.cache.use_marker import Hold, this_process
from raysvc.cache.verify import Problem, verify_folder
from raysvc.errors import EntryError
from raysvc.row_batch import RowBatch
from raysvc.row_ids import RowPlaces, slice_base

if TYPE_CHECKING:
    import pyarrow as pa
    from pydantic import BaseModel

    from raysvc.cache.growing.listings import Listings


class Entry:
    """One generation of one key.

    Slices are there, or to come: of this class all are there, of `raysvc.cache.growing` some are waited for.

    Attributes:
        coming: what is known of it while slices are to come; None: all are there.
    """

    coming: BaseModel | None = None

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        copies: PartCopies | None = None,
        base: Entry | None = None,
    ) -> None:
        """Use `Entry.open`, `open_finished` or `find_entry`.

        Args:
            copies: where copies of remote parts lie; None: what `node_copies` says.
            base: what the manifest names.
        """
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self.base = base
        self.parts = self._part_reader(copies)
        self._lock = threading.Lock()  # guards _held
        self._held: Future[Hold] | None = None  # begins with the first part that is read

    def _part_reader(self, copies: PartCopies | None) -> PartReader:
        return PartReader(self.store, self.folder, self.manifest.parts, self.manifest.columns, copies)

    @classmethod
    def open(cls, store: Store, key: str, listing: Sequence[Found] | None = None) -> Entry:
        """The entry in folder `key`.

        Args:
            store: where.
            key: of the recipe; `<key>.<n>` names a rebuild.
            listing: of the folder, when it is there already; with few of its parts, where they are many.

        Raises:
            EntryError: there is none, or it is damaged, or newer than this raysvc.
        """
        if names.split_folder(key) is None:
            names.folder_of(key)
        found = store.scan(key, names.MANY) if listing is None else listing
        return cls._opened(store, key, found, {names.DAMAGED, names.DELETING})

    @classmethod
    def _opened(cls, store: Store, key: str, listing: Sequence[Found], refused: set[str]) -> Entry:
        found = {item.name: item for item in listing}
        where = f"{store.url}/{key}"
        if names.MANIFEST not in found:
            what = "its build has not finished" if found else "there is no such entry"
            raise EntryError(
                where, what, "build it with raysvc tokenize; raysvc cache ls shows what is there"
            )
        for marker in sorted(refused & found.keys()):
            what = "it is marked as damaged" if marker == names.DAMAGED else "it is being removed by gc"
            raise EntryError(where, what, "build it again with raysvc tokenize")
        try:
            manifest = Manifest.read(store, key)
        except FileNotFoundError:  # removed since it was listed, or a folder
            raise EntryError(
                where, "its manifest cannot be read", "build it again with raysvc tokenize"
            ) from None
        if key.partition(".")[0] != manifest.key:
            raise EntryError(
                where, f"its manifest belongs to {manifest.key}", "build it again with raysvc tokenize"
            )
        _check_parts(store, key, manifest, found)
        if not manifest.base:
            return cls(store, key, manifest)
        # it is not removed while this entry shares it, whatever an interrupted gc may have marked
        base = cls._opened(store, manifest.base, store.scan(manifest.base, names.MANY), {names.DAMAGED})
        _check_base(where, manifest, base)
        return cls(store, key, manifest, base=base)

    @property
    def uri(self) -> str:
        """Path or URL, good for `open_finished` and `datasets.load_from_disk`."""
        return f"{self.store.url}/{self.folder}"

    @property
    def key(self) -> str:
        """Hash of the recipe."""
        return self.manifest.key

    @property
    def columns(self) -> dict[str, str]:
        """Column name -> type, those of the base first."""
        return {**(self.base.columns if self.base else {}), **self.manifest.columns}

    @property
    def folders(self) -> tuple[str, ...]:
        """The entry's folder, and those of the entries that it adds columns to."""
        return (self.folder, *(self.base.folders if self.base else ()))

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return self.manifest.num_rows

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return self.manifest.num_tokens

    @property
    def report(self) -> Mapping[str, Any]:
        """Returns what the builder told."""
        return self.manifest.report

    @property
    def recipe(self) -> dict[str, Any]:
        """Returns what decided the bytes."""
        return dict(self.manifest.recipe)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        if self.coming is not None:  # its tokens would be waited for
            return f"{type(self).__name__}({self.uri!r})"
        return f"Entry({self.uri!r}, rows={self.num_rows}, tokens={self.num_tokens})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry, (self.store, self.folder, self.manifest, None, self.base)

    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every row, int32 [N]; reads the offsets alone."""
        return self._readers[0].lengths()

    def read(self, row_ids: npt.NDArray[np.integer[Any]]) -> RowBatch:
        """Rows in the given order.

        Args:
            row_ids: int [N], as in `raysvc.row_ids`; may repeat.

        Raises:
            IndexError: a row that is not there.
            EntryError: a damaged part.
            StoreError: a store that cannot be reached.
        """
        ids = np.asarray(row_ids, np.int64)
        self._begin_hold()
        positions = self._places.positions_of(ids)
        batch, *more = (reader.read(positions) for reader in self._readers)
        for added in more:
            batch = _with_columns(batch, added, self.uri)
        self._wait_for_hold()
        return replace(batch, row_ids=ids)

    def row_values(self, name: str) -> npt.NDArray[Any]:
        """A per-row column of all rows, [N]; of a mapped part no page of another column is read.

        Raises:
            EntryError: a damaged part, or one without the column.
        """
        reader = next((one for one in self._readers if name in one.columns), None)
        if reader is None or reader.columns[name].startswith(("list<", "string")):
            raise EntryError(self.uri, f"it has no per-row column {name}", "run raysvc tokenize again")
        self._begin_hold()
        values = list(reader.row_values(name))
        self._wait_for_hold()
        return np.concatenate(values) if values else np.zeros(0, np.int64)

    @property
    def slice_starts(self) -> npt.NDArray[np.int64]:
        """int64 [S + 1], the first row of each slice of the source, and the number of rows."""
        return self._readers[0].starts

    @cached_property
    def _places(self) -> RowPlaces:
        return RowPlaces([self.slice_starts])

    def row_ids(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """int64 [n], ids of the rows from the `first` to before the `stop`-th, in their order; None: to the last."""
        return self._places.ids_of(np.arange(first, self.num_rows if stop is None else stop))

    def first_row(self) -> int:
        """The id of a row that is there."""
        return slice_base(int(np.argmax(np.diff(self.slice_starts) > 0))) if self.num_rows else 0

    def lacks(self, slices: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [N], whether there is no such row in a slice."""
        counts = np.append(np.diff(self.slice_starts), 0)
        return np.asarray(rows >= counts[np.minimum(slices, len(counts) - 1)])

    def has(self, slices: Sequence[int]) -> bool:
        """Returns whether all of these slices are there."""
        return True

    def wait_for(self, slices: Sequence[int]) -> float:
        """Wait until these slices are there; seconds.

        Raises:
            EntryError: the build has failed.
        """
        return 0.0

    @property
    def listings(self) -> Listings | None:
        """The listings of a source that is followed, and so has no last slice; None for any other."""
        return None

    @property
    def num_known(self) -> int:
        """Rows of the source that have a slice by now."""
        return int(self.source_rows.sum())

    def knows(self, num_groups: int) -> bool:
        """Returns whether it is known in which slices the first rows of the source are."""
        return True

    def wait_until_known(self, num_groups: int) -> float:
        """Wait until that is known; seconds.

        Raises:
            EntryError: nobody looks for more rows.
        """
        return 0.0

    def is_finished(self) -> bool:
        """Tells whether there is a manifest by now."""
        return True

    def fail(self, why: str) -> None:
        """Nobody builds any more: whoever waits for a slice is told why. "": somebody builds again."""

    @cached_property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """int64 [S], rows of the source in each slice, whatever became of them.

        Raises:
            EntryError: an early version built it, and did not note them.
        """
        if self.base is not None:
            return self.base.source_rows
        rows = self.manifest.source_rows
        if rows is None or len(rows) != len(self.parts.parts):
            raise EntryError(self.uri, "it does not tell how many rows of the source each slice has", REBUILD)
        return np.asarray(rows, np.int64)

    def slice_lengths(self, index: int) -> npt.NDArray[np.int32]:
        """Tokens of every row of a slice; reads its offsets alone."""
        return self._readers[0].part_lengths(index)

    def lengths_by_slice(self) -> Iterator[npt.NDArray[np.int32]]:
        """Tokens of every row, slice after slice."""
        return self._readers[0].lengths_by_part()

    def slice_values(self, name: str, index: int) -> npt.NDArray[Any]:
        """A per-row column of a slice, as `row_values` gives it of all.

        Raises:
            EntryError: a damaged part.
        """
        self._begin_hold()
        values = self._readers[0].part_values(name, index)
        self._wait_for_hold()
        return values

    def prefetch(self, row_ids: npt.NDArray[np.integer[Any]]) -> None:
        """Announce rows that will be read soon, in that order; never blocks.

        Args:
            row_ids: int [N].
        """
        positions = self._places.positions_of(np.asarray(row_ids, np.int64))
        for reader in self._readers:
            reader.prefetch(positions)

    def row(self, row_id: int) -> dict[str, Any]:
        """One row as plain Python values."""
        batch = self.read(np.array([row_id]))
        tokens = {name: values.tolist() for name, values in batch.tokens.items()}
        tokens |= {name: values.pieces[0].tolist() for name, values in batch.wide.items()}
        return tokens | {name: values.tolist()[0] for name, values in batch.rows.items()}

    def part_tables(self) -> Iterator[pa.Table]:
        """The parts as tables in row order, each compared with its checksums; those of the base with what was added."""
        self._begin_hold()
        first, *more = self._readers
        added, start = [_table_of(reader) for reader in more], 0
        for view in first.views():
            self._wait_for_hold()
            table = view.table
            for each in added:
                for name in each.column_names:
                    table = table.append_column(name, each.column(name).slice(start, table.num_rows))
            start += table.num_rows
            yield table

    def table(self) -> pa.Table:
        """All rows as one table, memory-mapped."""
        self._begin_hold()
        first, *more = (_table_of(reader) for reader in self._readers)
        for each in more:
            for name in each.column_names:
                first = first.append_column(name, each.column(name))
        self._wait_for_hold()
        return first

    def verify(self) -> list[Problem]:
        """Read every byte of the rows and compare checksums, not of their media; empty when all is well."""
        return verify_folder(self.store, self.folder)

    def hold(self, owner: str) -> Hold:
        """Keep `collect_garbage` away from the entry before a row of it is read.

        Args:
            owner: who uses it, for display.

        Raises:
            EntryError: a removal has begun.
        """
        return Hold(self.store, self.folder, owner)

    @cached_property
    def _readers(self) -> tuple[PartReader, ...]:
        """Returns what reads the rows of the first base, then what reads columns that were added, oldest first."""
        return (*(self.base._readers if self.base else ()), self.parts)

    def _begin_hold(self) -> None:
        """Hold while the first parts arrive, so that a remote store is not waited for twice."""
        with self._lock:
            if self._held is not None:
                return
            self._held = Future()
        threading.Thread(target=_hold_into, args=(self._held, self.store, self.folder), daemon=True).start()

    def _wait_for_hold(self) -> None:
        assert self._held is not None
        self._held.result()


def _hold_into(held: Future[Hold], store: Store, folder: str) -> None:
    try:
        held.set_result(Hold(store, folder, this_process()))
    except Exception as error:  # noqa: BLE001  the reader raises it
        held.set_exception(error)


def _check_parts(store: Store, folder: str, manifest: Manifest, found: Mapping[str, Found]) -> None:
    """That parts are there with their sizes; of many it is their table, and each part is looked at when it is read."""
    if isinstance(manifest.parts, PartTable):
        wanted = {manifest.parts.info.name: manifest.parts.info.ends[-1]}
    else:
        wanted = {part.name: part.num_bytes for part in manifest.parts}
    if not wanted.keys() <= found.keys():  # the listing may have left some out
        found = {item.name: item for item in store.scan(folder)}
    for name, size in wanted.items():
        there = found.get(name)
        if there is None or there.size != size:
            what = "is missing" if there is None else f"has {there.size} bytes instead of {size}"
            raise EntryError(
                f"{store.url}/{folder}/{name}",
                f"it {what}",
                "run raysvc cache verify, then raysvc tokenize again",
            )


def _check_base(where: str, manifest: Manifest, base: Entry) -> None:
    counts = (manifest.num_rows, manifest.num_tokens), (base.num_rows, base.num_tokens)
    if counts[0] != counts[1]:
        what = f"has {counts[0][0]} rows of {counts[0][1]} tokens, its base {counts[1][0]} of {counts[1][1]}"
        raise EntryError(where, what, REBUILD)
    if twice := sorted(manifest.columns.keys() & base.columns.keys()):
        raise EntryError(where, f"adds the column {twice[0]}, which its base has", REBUILD)


def _with_columns(rows: RowBatch, added: RowBatch, uri: str) -> RowBatch:
    """The rows with the columns of `added`, which are of the same rows."""
    if not np.array_equal(rows.offsets, added.offsets):
        raise EntryError(uri, "rows have other lengths than in its base", REBUILD)
    return RowBatch(
        rows.row_ids,
        rows.offsets,
        {**rows.tokens, **added.tokens},
        {**rows.rows, **added.rows},
        {**rows.wide, **added.wide},
    )


def _table_of(reader: PartReader) -> pa.Table:
    import pyarrow as pa

    reader.fetch_all()
    return pa.concat_tables([view.table for view in reader.views()])
