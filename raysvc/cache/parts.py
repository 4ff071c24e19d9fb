"""A part: one Arrow IPC stream file with exactly one record batch, made from a table and read as flat arrays.

Axes: N rows of the part, T tokens of all N rows.

Always true:
- equal rows give equal bytes, however the table was chunked, sliced, annotated or its columns ordered;
- every list column is per token: its offsets equal those of `input_ids`;
- there are no nulls, except in per-row text;
- a view copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.manifest import COLUMN_TYPES, PartInfo
from raysvc.errors import EntryError
from raysvc.row_batch import Array

REQUIRED = {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}


@dataclass(frozen=True)
class PartBytes:
    """A part that is ready to be written.

    Attributes:
        data: the whole file.
        info: what the manifest will say of it.
        columns: column name -> type.
    """

    data: memoryview
    info: PartInfo
    columns: Mapping[str, str]


@dataclass(frozen=True)
class PartView:
    """A part as arrays that share its memory.

    Attributes:
        table: the whole part.
        offsets: int32 [N + 1], from 0 to T.
        tokens: name -> [T].
        rows: name -> [N], numbers.
        texts: name -> [N], text, decoded only for the rows that are asked for.
    """

    table: pa.Table
    offsets: npt.NDArray[np.int32]
    tokens: Mapping[str, Array]
    rows: Mapping[str, Array] = field(default_factory=dict)
    texts: Mapping[str, pa.StringArray] = field(default_factory=dict)


def encode_part(name: str, table: pa.Table) -> PartBytes:
    """The file of a table.

    Raises:
        EntryError: a column that a part cannot hold, named.
    """
    batch, columns = _one_batch(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    buffer = sink.getvalue()
    data = memoryview(buffer)
    offsets_start, num_tokens = _locate_offsets(buffer)
    offsets = data[offsets_start : offsets_start + 4 * (batch.num_rows + 1)] if batch.num_rows else b""
    info = PartInfo(
        name=name,
        num_rows=batch.num_rows,
        num_tokens=num_tokens,
        num_bytes=len(data),
        checksum=checksum_of(data),
        offsets_start=offsets_start,
        offsets_checksum=checksum_of(offsets),
    )
    return PartBytes(data, info, columns)


def decode_part(buffer: pa.Buffer, info: PartInfo, where: str) -> PartView:
    """Views of a part's file.

    Raises:
        EntryError: the file is not what `info` says.
    """
    try:
        with pa.ipc.open_stream(buffer) as reader:
            table = reader.read_all()
        return _view(table, info)
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        raise EntryError(
            f"{where}/{info.name}", f"it is damaged ({error})", "run raysvc cache verify on the entry"
        ) from error


def decode_offsets(data: bytes, info: PartInfo, where: str) -> npt.NDArray[np.int32]:
    """Token offsets, int32 [N + 1], from the bytes that `info` points at."""
    if checksum_of(data) != info.offsets_checksum:
        raise EntryError(
            f"{where}/{info.name}", "its lengths are damaged", "run raysvc cache verify on the entry"
        )
    return np.frombuffer(data, np.int32) if info.num_rows else np.zeros(1, np.int32)


def _one_batch(table: pa.Table) -> tuple[pa.RecordBatch, dict[str, str]]:
    order = sorted(table.column_names, key=lambda name: (name not in REQUIRED, name))
    arrays = {name: _plain(name, table.column(name)) for name in order}
    columns = {name: _type_name(name, array.type) for name, array in arrays.items()}
    for name, kind in REQUIRED.items():
        if columns.get(name) != kind:
            raise EntryError(f"column {name}", f"it is {columns.get(name, 'missing')}", f"it must be {kind}")
    lengths = _lengths(arrays["input_ids"])
    for name, array in arrays.items():
        if pa.types.is_list(array.type) and not np.array_equal(_lengths(array), lengths):
            raise EntryError(
                f"column {name}", "its lists are not as long as input_ids", "give one value per token"
            )
    fields = [pa.field(name, _canonical(array.type)) for name, array in arrays.items()]
    batch = pa.RecordBatch.from_arrays(
        [arrays[f.name].cast(f.type) for f in fields], schema=pa.schema(fields)
    )
    return batch, columns


def _plain(name: str, column: pa.ChunkedArray) -> pa.Array:
    """One array without nulls; large lists and text become the plain kinds."""
    kind = column.type
    if pa.types.is_large_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    elif pa.types.is_large_string(kind):
        column = column.cast(pa.string())
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    inner = array.flatten().null_count if pa.types.is_list(array.type) else 0
    if inner or (array.null_count and not pa.types.is_string(array.type)):
        raise EntryError(
            f"column {name}", f"it holds {inner + array.null_count} nulls", "fill or drop these rows"
        )
    return array


def _type_name(name: str, kind: pa.DataType) -> str:
    text = f"list<{_scalar_name(kind.value_type)}>" if pa.types.is_list(kind) else _scalar_name(kind)
    if text not in COLUMN_TYPES:
        raise EntryError(
            f"column {name}", f"its type {kind} cannot be cached", "use numbers, text, or lists of numbers"
        )
    return text


def _scalar_name(kind: pa.DataType) -> str:
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _canonical(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind.value_type)) if pa.types.is_list(kind) else kind


def _lengths(lists: pa.ListArray) -> npt.NDArray[np.int32]:
    return np.diff(_numpy(lists.offsets))


def _locate_offsets(buffer: pa.Buffer) -> tuple[int, int]:
    """Where the offsets of `input_ids` lie in the file, and how many tokens there are."""
    with pa.ipc.open_stream(buffer) as reader:
        column = reader.read_next_batch().column("input_ids")
    if len(column) == 0:
        return 0, 0
    return column.buffers()[1].address - buffer.address, len(column.values)


def _view(table: pa.Table, info: PartInfo) -> PartView:
    if table.num_rows != info.num_rows:
        raise ValueError(f"{table.num_rows} rows instead of {info.num_rows}")
    arrays = {name: _single(table.column(name)) for name in table.column_names}
    lists = {name: array for name, array in arrays.items() if pa.types.is_list(array.type)}
    offsets = np.zeros(1, np.int32)
    if info.num_rows:
        offsets = _numpy(lists["input_ids"].offsets).view(np.int32)
    if offsets[0] != 0 or offsets[-1] != info.num_tokens or (np.diff(offsets) < 0).any():
        raise ValueError("its token offsets are impossible")
    tokens = {name: _numpy(array.values)[: info.num_tokens] for name, array in lists.items()}
    if any(len(values) != info.num_tokens for values in tokens.values()):
        raise ValueError("a per-token column is too short")
    texts = {name: array for name, array in arrays.items() if pa.types.is_string(array.type)}
    rows = {n: _numpy(a) for n, a in arrays.items() if n not in lists and n not in texts}
    return PartView(table, offsets, tokens, rows, texts)


def _single(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks != 1:
        raise ValueError(f"{column.num_chunks} record batches instead of 1")
    array = column.chunk(0)
    array.validate()  # lengths against sizes of buffers, in no time: a view of a hostile file must not leave it
    if pa.types.is_string(array.type):
        array.validate(full=True)  # text is decoded by its own offsets, which nothing else looks at
    return array


def _numpy(array: pa.Array) -> Array:
    """Numbers as a view of the array's buffer; `to_numpy` would import pandas, which takes half a second."""
    name, buffer = _scalar_name(array.type), array.buffers()[1]
    if len(array) == 0 or buffer is None:
        return np.zeros(0, np.dtype(name))
    if name == "bool":
        bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + len(array)].astype(np.bool_)
    dtype = np.dtype(name)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)
