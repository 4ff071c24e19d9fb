"""Chats of plain roles and contents as columns: from JSON lines or an Arrow table, without an object per row.

Axes: N rows, M messages of all rows one after the other.
Always true:
- columns are made only of rows whose messages hold a role and a content, both texts, and nothing else, and whose
  roles stay as they are;
- anything else in the source, or anything that the two JSON parsers could see differently, gives no columns at all.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.chat.source.formats import Format
from raysvc.chat.source.messages import Message

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
MAX_BYTES = 1 << 30
_NEWLINE, _BRACE = b"\n{"


@dataclass(frozen=True)
class ChatColumns:
    """N conversations.

    Attributes:
        roles: int32 [M], number of each role.
        role_names: text of each number.
        contents: string [M].
        starts: int64 [N + 1], messages of each row.
        source_rows: int64 [N].
    """

    roles: Ints32
    role_names: tuple[str, ...]
    contents: pa.Array
    starts: Ints64
    source_rows: Ints64

    def __len__(self) -> int:
        return len(self.source_rows)

    def take(self, rows: Ints64) -> ChatColumns:
        """Some rows, in the order given."""
        sizes = np.diff(self.starts)[rows]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        places = np.arange(int(starts[-1])) + np.repeat(self.starts[rows] - starts[:-1], sizes)
        contents = self.contents.take(pa.array(places))
        return ChatColumns(self.roles[places], self.role_names, contents, starts, self.source_rows[rows])

    def messages(self, row: int) -> list[Message]:
        """One conversation as `read_messages` gives it."""
        places = range(int(self.starts[row]), int(self.starts[row + 1]))
        return [{"role": self.role_names[self.roles[n]], "content": self.contents[n].as_py()} for n in places]


def columns_of_json_lines(data: bytes | memoryview, first_row: int, form: Format) -> ChatColumns | None:
    """Columns of complete JSON lines, or None when they hold anything but plain chats.

    Args:
        data: UTF-8; every line a row, none blank.
        first_row: number of the first line.
        form: a chat format.
    """
    import pyarrow.json as pj

    lines = _objects(data)
    if not lines:
        return None
    column = form.column("messages")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    options = pj.ParseOptions(explicit_schema=pa.schema([(column, pa.list_(message))]))
    reading = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    try:
        table = pj.read_json(io.BytesIO(data), read_options=reading, parse_options=options)
        if table.num_rows != lines:
            return None
        table.validate()
        return columns_of_table(table, np.arange(first_row, first_row + lines, dtype=np.int64), form)
    except pa.ArrowException:
        return None


def columns_of_table(table: pa.Table, source_rows: Ints64, form: Format) -> ChatColumns | None:
    """Columns of an Arrow table, or None when it holds anything but plain chats."""
    others = {form.column(name) for name in ("tools", "system", "history")} | {*form.refused}
    if not others.isdisjoint(table.column_names) or "role" in form.columns or "content" in form.columns:
        return None
    column = form.column("messages")
    if column not in table.column_names or not len(source_rows):
        return None
    messages = table[column].combine_chunks()
    messages = messages.chunk(0) if isinstance(messages, pa.ChunkedArray) else messages
    if not _is_plain(messages.type) or messages.null_count:
        return None
    starts = messages.offsets.to_numpy().astype(np.int64)
    flat = messages.values.slice(starts[0], starts[-1] - starts[0])
    if flat.null_count or not np.all(np.diff(starts)):
        return None
    columns = _columns(flat, starts - starts[0], source_rows)
    return None if columns is None or form.maps_any(columns.role_names) else columns


def _columns(flat: pa.StructArray, starts: Ints64, source_rows: Ints64) -> ChatColumns | None:
    roles, contents = flat.field("role"), flat.field("content")
    if roles.null_count or contents.null_count or contents.nbytes > MAX_BYTES:
        return None
    try:
        contents.validate(full=True)
        coded = roles.dictionary_encode()
    except pa.ArrowInvalid:
        return None
    names = tuple(coded.dictionary.to_pylist())
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    return ChatColumns(codes, names, contents.cast(pa.string()), starts, source_rows)


def _is_plain(kind: Any) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    texts = all(_is_text(fields.pop(name, pa.null())) for name in ("role", "content"))
    return texts and all(pa.types.is_null(other) for other in fields.values())


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _objects(data: bytes | memoryview) -> int:
    """How many lines there are, 0 unless each of them opens an object: Arrow's reader crashes the process on others."""
    chars = np.frombuffer(data, np.uint8)
    begins = np.flatnonzero(chars == _NEWLINE) + 1
    if len(begins) and begins[-1] == len(chars):
        begins = begins[:-1]
    opened = len(chars) and chars[0] == _BRACE and np.all(chars[begins] == _BRACE)
    return len(begins) + 1 if opened else 0
