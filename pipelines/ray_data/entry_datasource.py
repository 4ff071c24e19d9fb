"""Finished entries as a Ray Data source: one read task a part.

1. A task knows the part, which rows of it are wanted, and where columns that were added to those rows lie; it opens no entry.
2. It maps the part (of a remote store, a checked copy on its node's disk) and hands on the wanted columns and rows.

Always true:
- a row has its id beside its columns, `row_id`, by which a job takes it or leaves it out;
- the bytes of the columns that are read were compared with their checksums; of others none is read from a local file;
- schema, row counts and sizes come from the manifests, so that nothing is read to plan;
- gc keeps away from the entries as long as the process that planned the reading lives and has the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from raysvc.cache.export.arrow_schema import arrow_type, bytes_in_memory
from raysvc.cache.local.part_reader import PartReader
from raysvc.cache.manifest import REQUIRED
from raysvc.cache.part_info import PartInfo
from raysvc.cache.store.store import Store
from raysvc.errors import ConfigError, EntryError
from raysvc.row_ids import slice_base, source_base

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry
    from raysvc.cache.use_marker import Hold

ROW_ID = "row_id"


@dataclass(frozen=True)
class PartColumns:
    """Columns of the rows of a part, as they lie in one folder.

    Attributes:
        store, folder: where.
        parts: that hold the rows.
        columns: column name -> type, of these parts.
        skipped: rows of `parts` before the first one.
    """

    store: Store
    folder: str
    parts: tuple[PartInfo, ...]
    columns: Mapping[str, str]
    skipped: int

    def table(self, names: Sequence[str], first: int, num_rows: int) -> pa.Table:
        """Some columns of `num_rows` rows from the `first` on.

        Raises:
            EntryError: a damaged part.
        """
        reader = PartReader(self.store, self.folder, self.parts, self.columns)
        tables = [view.select(names) for view in reader.open_views()]
        return pa.concat_tables(tables).slice(self.skipped + first, num_rows)


@dataclass(frozen=True)
class PartRows:
    """Holds what one task reads.

    Attributes:
        first_id: id of its first row.
        first, num_rows: which rows of the part.
        layers: the part, then the columns that were added to it.
    """

    first_id: int
    first: int
    num_rows: int
    layers: tuple[PartColumns, ...]

    def read(self, names: Sequence[str]) -> Iterable[pa.Table]:
        """One block with these columns."""
        made = {ROW_ID: pa.chunked_array([self.first_id + np.arange(self.num_rows, dtype=np.int64)])}
        for layer in self.layers:
            wanted = [name for name in names if name in layer.columns]
            if wanted:
                table = layer.table(wanted, self.first, self.num_rows)
                made |= dict(zip(wanted, table.columns, strict=True))
        yield pa.table({name: made[name] for name in names}, schema=_schema(self.layers, names))

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of these columns in memory."""
        whole = 8 * self.layers[0].parts[0].num_rows * (ROW_ID in names)
        for layer in self.layers:
            wanted = [name for name in names if name in layer.columns]
            whole += sum(bytes_in_memory(part, layer.columns, wanted) for part in layer.parts)
        return whole * self.num_rows // max(1, sum(part.num_rows for part in self.layers[0].parts))


class EntryDatasource(Datasource):  # type: ignore[misc]  # ray is not followed
    """Rows of finished entries of one tokenizer, entry after entry.

    Args:
        entries: entry k is source k.
        columns: to read, of `row_id` and those that all entries have; None: all of these.
        rows: positions of rows, of all rows in their order; None: all.

    Raises:
        ConfigError: a column that is not there, or rows that are not.
        EntryError: an entry that somebody builds still.
    """

    def __init__(
        self, entries: Sequence[Entry], columns: Sequence[str] | None = None, rows: range | None = None
    ) -> None:
        super().__init__()
        self._entries = tuple(entries)
        for entry in self._entries:
            if entry.coming is not None:
                raise EntryError(entry.uri, "its build has not finished", "wait for it, then read it")
        there = (ROW_ID, *_common_columns(self._entries))
        self._names = there if columns is None else tuple(columns)
        for name in self._names:
            if name not in there:
                raise ConfigError(
                    "columns", f"there is no column {name!r}", f"name some of {', '.join(there)}"
                )
        if len(set(self._names)) < len(self._names) or not self._names:
            raise ConfigError("columns", f"{list(self._names)} names none, or one twice", "name each once")
        self._rows = _checked_rows(rows, sum(entry.num_rows for entry in self._entries))
        self._holds: list[Hold] = []  # of the process that plans

    def get_name(self) -> str:
        """The name of the read tasks."""
        return "Entry"

    def supports_projection_pushdown(self) -> bool:
        """Columns that nobody asks for are not read."""
        return True

    def get_projection_map(self) -> dict[str, str]:
        """The columns that are read."""
        return {name: name for name in self._names}

    def apply_projection(self, projection_map: dict[str, str] | None) -> EntryDatasource:
        """The same rows with some of the columns."""
        some = copy(self)
        if projection_map is not None:  # rows without a column still have to be counted
            some._names = tuple(name for name in projection_map if name in self._names) or (ROW_ID,)
        return some

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of the columns of all rows."""
        return sum(piece.nbytes(self._names) for piece in self._pieces())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One task for each part that has some of the rows."""
        if not self._holds:
            self._holds += [entry.hold("Ray Data") for entry in self._entries]
        return [self._task(piece, per_task_row_limit) for piece in self._pieces()]

    def _task(self, piece: PartRows, limit: int | None) -> ReadTask:
        metadata = BlockMetadata(
            num_rows=piece.num_rows,
            size_bytes=piece.nbytes(self._names),
            exec_stats=None,
            input_files=tuple(
                f"{layer.store.url}/{layer.folder}/{part.name}"
                for layer in piece.layers
                for part in layer.parts
            ),
        )
        schema = _schema(piece.layers, self._names)
        return ReadTask(_reading(piece, self._names), metadata, schema=schema, per_task_row_limit=limit)

    def _pieces(self) -> list[PartRows]:
        """Returns what is read, part after part; of no row, of one part nothing."""
        pieces, start = [], 0
        for number, entry in enumerate(self._entries):
            for index, (first, stop) in enumerate(
                zip(entry.slice_starts, entry.slice_starts[1:], strict=False)
            ):
                low = max(self._rows.start, start + int(first)) - start - int(first)
                high = min(self._rows.stop, start + int(stop)) - start - int(first)
                if low < high:
                    pieces.append(_part_rows(entry, number, index, low, high))
            start += entry.num_rows
        return pieces or [_part_rows(self._entries[0], 0, 0, 0, 0)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holds": []}


def _reading(piece: PartRows, names: tuple[str, ...]) -> Callable[[], Iterable[pa.Table]]:
    return lambda: piece.read(names)


def _part_rows(entry: Entry, number: int, index: int, low: int, high: int) -> PartRows:
    layers, position = [], int(entry.slice_starts[index])
    stop = int(entry.slice_starts[index + 1])
    one: Entry | None = entry
    while one is not None:
        layers.append(_layer(one, position, stop))
        one = one.base
    first_id = source_base(number) + slice_base(index) + low
    return PartRows(first_id, low, high - low, tuple(reversed(layers)))


def _layer(entry: Entry, first: int, stop: int) -> PartColumns:
    """The parts of an entry, without its base, that hold its rows from the `first` to before the `stop`-th."""
    starts = entry.parts.starts
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = max(low + 1, int(np.searchsorted(starts, stop, side="left")))
    low = min(low, len(starts) - 2)
    parts = tuple(entry.parts.parts[index] for index in range(low, min(high, len(starts) - 1)))
    return PartColumns(entry.store, entry.folder, parts, entry.manifest.columns, first - int(starts[low]))


def _schema(layers: Sequence[PartColumns], names: Sequence[str]) -> pa.Schema:
    types = {ROW_ID: "int64"} | {name: kind for layer in layers for name, kind in layer.columns.items()}
    return pa.schema([(name, arrow_type(types[name])) for name in names])


def _common_columns(entries: Sequence[Entry]) -> list[str]:
    """Columns that all entries have, with one type; those that every row has come first, as in a part."""
    first, *others = (entry.columns for entry in entries)
    common = [name for name, kind in first.items() if all(one.get(name) == kind for one in others)]
    return sorted(common, key=lambda name: (name not in REQUIRED, name))


def _checked_rows(rows: range | None, num_rows: int) -> range:
    if rows is None:
        return range(num_rows)
    if not isinstance(rows, range) or rows.step != 1 or not 0 <= rows.start <= rows.stop <= num_rows:
        what = f"{rows!r} are not neighbours among {num_rows} rows"
        raise ConfigError("rows", what, f"give a range of positions within range({num_rows})")
    return rows
