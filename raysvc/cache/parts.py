"""A part: one Arrow IPC stream file with exactly one record batch, made from a table and read as flat arrays.

Axes: N rows of the part, T tokens of all N rows.

Always true:
- equal rows give equal bytes, however the table was chunked, sliced, annotated or its columns ordered;
- every list column is per token: their offsets are equal; lists of a fixed size are the shape of a value;
- bfloat16 lies as its bits, uint16; the manifest says which columns these are;
- there are no nulls, except in per-row text;
- a view copies nothing, and its columns are those that the manifest names, by name and type;
- `check_rows` compared the tokens of a row with what was written; all else was compared when the part was mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.cache.local.blocks import Blocks, Places
from raysvc.cache.local.checksum import BLOCK, block_checksums, checksum_of
from raysvc.cache.manifest import REQUIRED, is_column_type
from raysvc.cache.part_info import PartInfo
from raysvc.errors import EntryError
from raysvc.job.carried import MARK
from raysvc.job.column_dtypes import BF16
from raysvc.row_batch import Array

WHOLE_BELOW = 4 * BLOCK  # a part this small is compared when it is mapped


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
        tokens: name -> [T, *shape].
        rows: name -> [N, *shape], numbers.
        texts: name -> [N], text, decoded only for the rows that are asked for.
        blocks: what has been compared with its checksum; None: all of it.
        places: name of per-token values -> first byte in the file, and bytes of a value.
    """

    table: pa.Table
    offsets: npt.NDArray[np.int32]
    tokens: Mapping[str, Array]
    rows: Mapping[str, Array] = field(default_factory=dict)
    texts: Mapping[str, pa.StringArray] = field(default_factory=dict)
    blocks: Blocks | None = None
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def check_rows(self, begins: Places, ends: Places) -> None:
        """Compare the tokens of rows with their checksums.

        Args:
            begins, ends: first token of each row, and the one after its last; [N].

        Raises:
            EntryError: bytes are not those that were written.
        """
        if self.blocks is None or self.blocks.is_done or not len(begins):
            return
        low, high = int(begins.min()), int(ends.max())
        spans = [(first + low * size, first + high * size) for first, size in self.places.values()]
        if all(self.blocks.check_neighbours(start, stop) for start, stop in spans):
            return  # as in a scan
        some = ends > begins
        begins, ends = begins[some], ends[some]
        for first, size in self.places.values():
            self.blocks.check(first + begins * size, first + ends * size)

    def select(self, names: Sequence[str]) -> pa.Table:
        """Some columns of the part, after their bytes were compared.

        Raises:
            EntryError: bytes are not those that were written.
        """
        spans = [self.places[name] for name in names if name in self.places]
        if self.blocks is not None and spans:
            firsts, sizes = np.array(spans, np.int64).T
            self.blocks.check(firsts, firsts + sizes * self.offsets[-1])
        return self.table.select(list(names))

    def check_all(self) -> None:
        """Compare every byte."""
        if self.blocks is not None:
            self.blocks.check_all()


def encode_part(name: str, table: pa.Table, required: Mapping[str, str] = REQUIRED) -> PartBytes:
    """The file of a table.

    Args:
        name: of the file.
        table: columns of rows; the first one per token, by name behind `input_ids`, says how long they are.
        required: columns that must be there, with their types; at least one column is per token.

    Raises:
        EntryError: a column that a part cannot hold, named.
    """
    batch, columns = _one_batch(table, required)
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
        blocks=block_checksums(data),
    )
    return PartBytes(data, info, columns)


def decode_part(
    buffer: pa.Buffer,
    info: PartInfo,
    where: str,
    columns: Mapping[str, str] | None = None,
    checked: bool = False,
) -> PartView:
    """Views of a part's file.

    Args:
        buffer: the whole file.
        info: what the manifest says of it.
        where: URI of the entry, for messages.
        columns: column name -> type, by the manifest; None: any that a part can hold.
        checked: the bytes were compared with their checksum already.

    Raises:
        EntryError: the file is not what `info` and `columns` say.
    """
    blocks = None if checked else Blocks(buffer, info, where)
    if blocks is not None:
        first = np.zeros(1, np.int64)  # what follows reads the file's own description of itself
        blocks.check_all() if info.num_bytes <= WHOLE_BELOW else blocks.check(first, first + BLOCK)
    try:
        with pa.ipc.open_stream(buffer) as reader:
            _check_columns(reader.schema, columns)
            table = reader.read_all()
        view = _view(table, info, columns or {})
    except (pa.ArrowException, ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, EntryError):
            raise
        raise EntryError(
            f"{where}/{info.name}", f"it is damaged ({error})", "run raysvc cache verify on the entry"
        ) from error
    return view if blocks is None else _with_blocks(view, blocks, buffer)


def decode_offsets(data: bytes, info: PartInfo, where: str) -> npt.NDArray[np.int32]:
    """Token offsets, int32 [N + 1], from the bytes that `info` points at.

    Raises:
        EntryError: the lengths are damaged.
    """
    if checksum_of(data) != info.offsets_checksum:
        raise EntryError(
            f"{where}/{info.name}", "its lengths are damaged", "run raysvc cache verify on the entry"
        )
    return np.frombuffer(data, np.int32) if info.num_rows else np.zeros(1, np.int32)


def _check_columns(schema: pa.Schema, columns: Mapping[str, str] | None) -> None:
    found = {one.name: _type_text(one.type) for one in schema}
    if len(found) != len(schema):
        raise ValueError("a column is there twice")
    wanted = columns if columns is not None else {**found, **REQUIRED}
    if found != {name: kind.replace("bfloat16", "uint16") for name, kind in wanted.items()}:
        raise ValueError(f"its columns are {found}, they must be {dict(wanted)}")
    for name, kind in found.items():
        if not is_column_type(kind):
            raise ValueError(f"column {name} is {kind}, which no part holds")


def _with_blocks(view: PartView, blocks: Blocks, buffer: pa.Buffer) -> PartView:
    """The view with what is left to be compared: blocks that hold nothing but per-token values."""
    places = {}
    between = [0]  # ends and beginnings of what is compared now, in the order of the file
    for name, values in view.tokens.items():
        first = values.__array_interface__["data"][0] - buffer.address
        if values.nbytes and 0 <= first <= buffer.size - values.nbytes:  # bools are a copy, so compared now
            places[name] = first, values.nbytes // len(values)
    for name, (first, _) in sorted(places.items(), key=lambda item: item[1]):
        between += [first, first + view.tokens[name].nbytes]
    edges = np.array([*between, buffer.size], np.int64).reshape(-1, 2)
    blocks.check(edges[:, 0], edges[:, 1])
    return replace(view, blocks=blocks, places=places)


def _one_batch(table: pa.Table, required: Mapping[str, str]) -> tuple[pa.RecordBatch, dict[str, str]]:
    order = sorted(table.column_names, key=lambda name: (name not in REQUIRED, name))
    arrays = {name: _plain(name, table.column(name)) for name in order}
    columns = {name: _type_name(name, array.type) for name, array in arrays.items()}
    for name in order:
        if (table.schema.field(name).metadata or {}).get(MARK) == b"bfloat16":
            columns[name] = columns[name].replace("uint16", "bfloat16")
    for name, kind in required.items():
        if columns.get(name) != kind:
            raise EntryError(f"column {name}", f"it is {columns.get(name, 'missing')}", f"it must be {kind}")
    first = next(name for name, array in arrays.items() if pa.types.is_list(array.type))
    lengths = _lengths(arrays[first])
    for name, array in arrays.items():
        if pa.types.is_list(array.type) and not np.array_equal(_lengths(array), lengths):
            raise EntryError(
                f"column {name}", f"its lists are not as long as {first}", "give one value per token"
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
    inner = _inner_nulls(array)
    if inner or (array.null_count and not pa.types.is_string(array.type)):
        raise EntryError(
            f"column {name}", f"it holds {inner + array.null_count} nulls", "fill or drop these rows"
        )
    return array


def _inner_nulls(array: pa.Array) -> int:
    """Nulls inside of lists."""
    count = 0
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
        count += array.null_count
    return count


def _type_text(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list<{_shaped_name(kind.value_type)}>"
    return _shaped_name(kind)


def _shaped_name(kind: pa.DataType) -> str:
    """The type of one value: `uint8[94,8]`."""
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(str(kind.list_size))
        kind = kind.value_type
    return _scalar_name(kind) + (f"[{','.join(shape)}]" if shape else "")


def _type_name(name: str, kind: pa.DataType) -> str:
    text = _type_text(kind)
    if not is_column_type(text):
        raise EntryError(
            f"column {name}", f"its type {kind} cannot be cached", "use numbers, text, or lists of numbers"
        )
    return text


def _scalar_name(kind: pa.DataType) -> str:
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _canonical(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(pa.field("item", _canonical(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(pa.field("item", _canonical(kind.value_type)), kind.list_size)
    return kind


def _lengths(lists: pa.ListArray) -> npt.NDArray[np.int32]:
    return np.diff(_numpy(lists.offsets))


def _locate_offsets(buffer: pa.Buffer) -> tuple[int, int]:
    """Returns where the offsets of the first column per token lie in the file, and how many tokens there are."""
    with pa.ipc.open_stream(buffer) as reader:
        batch = reader.read_next_batch()
    column = next(each for each in batch.columns if pa.types.is_list(each.type))
    if len(column) == 0:
        return 0, 0
    return column.buffers()[1].address - buffer.address, len(column.values)


def _view(table: pa.Table, info: PartInfo, columns: Mapping[str, str]) -> PartView:
    if table.num_rows != info.num_rows:
        raise ValueError(f"{table.num_rows} rows instead of {info.num_rows}")
    arrays = {name: _single(table.column(name)) for name in table.column_names}
    lists = {name: array for name, array in arrays.items() if pa.types.is_list(array.type)}
    if any(a.null_count for a in arrays.values() if not pa.types.is_string(a.type)):
        raise ValueError("a value is null")
    if any(_inner_nulls(array) for array in arrays.values()):
        raise ValueError("a value inside a list is null")
    offsets = np.zeros(1, np.int32)
    if info.num_rows:
        offsets = _numpy(next(iter(lists.values())).offsets).view(np.int32)
    if offsets[0] != 0 or offsets[-1] != info.num_tokens or (np.diff(offsets) < 0).any():
        raise ValueError("its token offsets are impossible")
    for name, array in lists.items():
        if info.num_rows and not np.array_equal(_numpy(array.offsets).view(np.int32), offsets):
            raise ValueError(f"column {name} has other lengths than another one")
    half = {name for name, kind in columns.items() if "bfloat16" in kind}
    tokens = {n: _values(array.values, n in half)[: info.num_tokens] for n, array in lists.items()}
    if any(len(values) != info.num_tokens for values in tokens.values()):
        raise ValueError("a per-token column is too short")
    texts = {name: array for name, array in arrays.items() if pa.types.is_string(array.type)}
    rows = {n: _values(a, n in half) for n, a in arrays.items() if n not in lists and n not in texts}
    return PartView(table, offsets, tokens, rows, texts)


def _single(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks != 1:
        raise ValueError(f"{column.num_chunks} record batches instead of 1")
    array = column.chunk(0)
    array.validate()  # lengths against sizes of buffers, in no time: a view of a hostile file must not leave it
    if pa.types.is_string(array.type):
        array.validate(full=True)  # text is decoded by its own offsets, which nothing else looks at
    return array


def _values(array: pa.Array, bfloat16: bool) -> Array:
    """[N, *shape], views."""
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.values[array.offset * array.type.list_size :][: int(np.prod(shape))]
    values = _numpy(array)
    return (values.view(BF16) if bfloat16 else values).reshape(shape)


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
