"""The parts of an entry that has many, in a file beside its manifest that is read piece by piece.

1. `parts-<uid>.bin` holds pieces, one after the other: rows and source rows of all parts, then pages of equally many parts.
2. A piece is an Arrow IPC stream. The manifest says where each one ends and what its checksum is.
3. A part costs one read of its piece, and the rows of all parts cost one read; nothing is read before it is asked for.

Always true:
- the file is complete and durable before a manifest names it, and it is never changed;
- a piece is compared with its checksum, and its parts are checked as those of a manifest are, before they are used;
- part i is that of slice i, so no part is named twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any

from raysvc.cache import names
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.part_info import LazyParts, PartInfo, are_checksums, count, damaged, part_info
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

PAGE = 64  # parts of a page that is written: of parts of 42 MB their checksums are 90 kB
KEPT_BYTES = 32 << 20  # of pieces; the newest one always stays
_NUMBERS = ("num_rows", "num_tokens", "num_bytes", "offsets_start")
_DIGESTS = ("checksum", "offsets_checksum")


@dataclass(frozen=True)
class TableInfo:
    """Holds what a manifest says of the file.

    Attributes:
        name: of the file, in the entry's folder.
        num_parts: in it.
        num_rows, num_tokens, num_bytes: of all parts.
        page: parts of a page.
        ends: where each piece ends, bytes.
        checksums: XXH3-128 of each piece, 32 hex digits each, one after the other.
    """

    name: str
    num_parts: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    page: int
    ends: tuple[int, ...]
    checksums: str

    def to_json(self) -> dict[str, Any]:
        """Returns the table as the manifest holds it."""
        return {**asdict(self), "ends": list(self.ends)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: str) -> TableInfo:
        """Check the fields.

        Raises:
            EntryError: one is damaged.
        """
        ends = raw.get("ends")
        if not isinstance(ends, list):
            raise damaged(where, "the table of its parts has no pieces")
        sizes = [count({"ends": end}, "ends", where) for end in ends]
        info = cls(
            name=str(raw.get("name")),
            num_parts=count(raw, "num_parts", where),
            num_rows=count(raw, "num_rows", where),
            num_tokens=count(raw, "num_tokens", where),
            num_bytes=count(raw, "num_bytes", where),
            page=count(raw, "page", where),
            ends=tuple(sizes),
            checksums=str(raw.get("checksums")),
        )
        if not names.PARTS.fullmatch(info.name):
            raise damaged(where, f"{info.name[:80]!r} is not the name of a table of parts")
        if not info.page or len(ends) != 1 - (-info.num_parts // info.page) or sorted(ends) != ends:
            raise damaged(where, f"a table of {info.num_parts} parts has not {len(ends)} pieces that end so")
        if not are_checksums(info.checksums, len(ends)):
            raise damaged(where, "a checksum of the table of its parts is not one")
        return info


@dataclass(frozen=True)
class PartTable(LazyParts):
    """The parts of an entry, read as they are asked for; several threads may ask.

    Attributes:
        info: what the manifest says.
        store, folder: of the entry.
    """

    info: TableInfo
    store: Store = field(compare=False)
    folder: str = field(compare=False)

    def __len__(self) -> int:
        return self.info.num_parts

    def part(self, index: int) -> PartInfo:
        """Out of its page.

        Raises:
            EntryError: the file is damaged or gone.
        """
        row = self._kept.page(1 + index // self.info.page).slice(index % self.info.page, 1).to_pylist()[0]
        for name in (*_DIGESTS, "blocks"):
            row[name] = (row[name] or b"").hex()
        part = part_info(row, self.where)
        match = names.PART.fullmatch(part.name)
        if match is None or int(match[1]) != index:
            raise damaged(self.where, f"{part.name!r} is not the part of slice {index}")
        return part

    @property
    def where(self) -> str:
        """Address of the file."""
        return f"{self.store.url}/{self.folder}/{self.info.name}"

    @cached_property
    def num_rows(self) -> npt.NDArray[np.int64]:
        """int64 [parts], rows of each part.

        Raises:
            EntryError: the file is damaged or gone.
        """
        column = self._rows.column("num_rows")
        rows = _int64s(column)
        if column.null_count or (rows < 0).any() or rows.sum() != self.info.num_rows:
            raise damaged(self.where, "the rows of the parts do not add up to the entry's")
        return rows

    @property
    def source_rows(self) -> npt.NDArray[np.int64] | None:
        """int64 [parts], rows of the source in each slice; None where the builder told none."""
        column = self._rows.column("source_rows")
        return None if column.null_count else _int64s(column)

    def piece(self, number: int) -> pa.RecordBatch:
        """A piece, compared with its checksum.

        Raises:
            EntryError: the file is damaged or gone.
        """
        import pyarrow as pa

        start, end = self.info.ends[number - 1] if number else 0, self.info.ends[number]
        try:
            data = self.store.read(f"{self.folder}/{self.info.name}", start, end)
        except FileNotFoundError:
            raise damaged(self.where, "it is missing") from None
        if checksum_of(data) != self.info.checksums[32 * number : 32 * number + 32]:
            raise damaged(self.where, f"piece {number} is not what was written (checksum)")
        try:
            with pa.ipc.open_stream(data) as reader:
                batch = reader.read_next_batch()
            batch.validate(full=True)
            if batch.schema != (_page_schema() if number else _rows_schema()):
                raise ValueError("other columns")
        except (pa.ArrowException, ValueError, KeyError, TypeError, OSError, StopIteration) as error:
            raise damaged(self.where, f"piece {number} cannot be read ({error})") from None
        left = len(self) - self.info.page * (number - 1)
        if batch.num_rows != (min(self.info.page, left) if number else len(self)):
            raise damaged(self.where, f"piece {number} has {batch.num_rows} parts")
        return batch

    @cached_property
    def _rows(self) -> pa.RecordBatch:
        return self.piece(0)

    @cached_property
    def _kept(self) -> _Pages:
        return _Pages(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return PartTable, (self.info, self.store, self.folder)


class _Pages:
    """Pieces that were read last."""

    def __init__(self, table: PartTable) -> None:
        self._table = table
        self._lock = Lock()  # guards the two lines below
        self._pages: OrderedDict[int, pa.RecordBatch] = OrderedDict()  # least recently used first
        self._bytes = 0

    def page(self, number: int) -> pa.RecordBatch:
        with self._lock:
            if number in self._pages:
                self._pages.move_to_end(number)
                return self._pages[number]
        page = self._table.piece(number)
        with self._lock:
            self._bytes += 0 if number in self._pages else page.nbytes
            self._pages[number] = page
            while len(self._pages) > 1 and self._bytes > KEPT_BYTES:
                self._bytes -= self._pages.popitem(last=False)[1].nbytes
        return page


def write_table(
    store: Store, folder: str, parts: Sequence[PartInfo], source_rows: Sequence[int] | None
) -> PartTable:
    """Make the file of an entry's parts durable, under a name of its own.

    Args:
        store, folder: of the entry.
        parts: in slice order.
        source_rows: of the source, in each slice; None: nobody knows.

    Raises:
        StoreError: it cannot be written.
    """
    import pyarrow as pa

    rows = [part.num_rows for part in parts]
    told = source_rows if source_rows is not None else pa.nulls(len(rows), pa.int64())
    batches = [pa.record_batch([pa.array(rows, pa.int64()), pa.array(told, pa.int64())], _rows_schema())]
    batches += [_page(parts[first : first + PAGE]) for first in range(0, len(parts), PAGE)]
    pieces = [_stream(batch) for batch in batches]
    info = TableInfo(
        name=names.new_parts(),
        num_parts=len(parts),
        num_rows=sum(rows),
        num_tokens=sum(part.num_tokens for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        page=PAGE,
        ends=tuple(accumulate(map(len, pieces))),
        checksums="".join(map(checksum_of, pieces)),
    )
    store.write(f"{folder}/{info.name}", pieces)
    return PartTable(info, store, folder)


def table_problems(table: PartTable, found_bytes: int | None) -> Iterator[tuple[str, str]]:
    """Returns what is wrong with the file: kind and detail, as `raysvc.cache.verify.Problem` has them.

    Args:
        found_bytes: size of the file by a listing; None: it is not there.
    """
    if found_bytes is None:
        yield "missing", "it is not in the folder"
    elif found_bytes != table.info.ends[-1]:
        yield "size", f"it has {found_bytes} bytes instead of {table.info.ends[-1]}"
    else:
        try:
            for number in range(len(table.info.ends)):
                table.piece(number)
            assert table.num_rows is not None
        except EntryError as error:
            yield "content", error.what


def _rows_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema({"num_rows": pa.int64(), "source_rows": pa.int64()})


def _page_schema() -> pa.Schema:
    import pyarrow as pa

    fields = {"name": pa.string(), **dict.fromkeys(_NUMBERS, pa.int64())}
    return pa.schema({**fields, **dict.fromkeys(_DIGESTS, pa.binary(16)), "blocks": pa.binary()})


def _page(parts: Sequence[PartInfo]) -> pa.RecordBatch:
    import pyarrow as pa

    schema = _page_schema()
    columns: dict[str, list[Any]] = {
        name: [getattr(part, name) for part in parts] for name in ("name", *_NUMBERS)
    }
    for name in (*_DIGESTS, "blocks"):
        columns[name] = [bytes.fromhex(getattr(part, name)) for part in parts]
    return pa.record_batch([pa.array(columns[one.name], one.type) for one in schema], schema)


def _int64s(column: pa.Array) -> npt.NDArray[np.int64]:
    """A view; `to_numpy` would import pandas."""
    import numpy as np

    return np.frombuffer(column.buffers()[1], np.int64, len(column))


def _stream(batch: pa.RecordBatch) -> memoryview:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())
