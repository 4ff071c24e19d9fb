"""Rows of an Arrow table in JSON types: as a JSON file of the same rows would bring them.

| in the table | in the row |
|---|---|
| null in a struct, or as a whole column | absent: a columnar format gives every row the fields of all rows |
| date, time, timestamp | ISO 8601 text |
| decimal | its digits as text |
| map | object |
| text, integer, boolean, list | the same |
| extension type | what its name says (`arrow_extensions`) |
| NaN, infinite, bytes, duration | the same; a row that uses it is quarantined (`odd`) |
| what Python has no value for: a year beyond 9999, an unknown time zone, text that is not UTF-8 | `UnreadableValue`, which is odd |

Always true:
- a null inside a list stays, and so does one inside a JSON text;
- columns whose type needs no change are not looked through;
- nothing that is pickled is read;
- no column has the name of another: one of them would be gone without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from raysvc.chat.source.json_rows import SourceRow, UnreadableValue
from raysvc.errors import SourceError
from raysvc.pipelines.reading.arrow_extensions import Convert, extension_name, holds_pickles, reader_of

LISTS = (
    types.is_list,
    types.is_large_list,
    types.is_fixed_size_list,
    types.is_list_view,
    types.is_large_list_view,
)


NO_VALUE = UnreadableValue("Python has no value for it")


def rows_of_table(table: pa.Table, first_row: int) -> Iterator[SourceRow]:
    """The rows of a table, numbered.

    Raises:
        SourceError: two columns of one name.
    """
    odd = any(_may_be_odd(field) for field in table.schema)
    number = first_row
    for batch in table.to_batches():
        rows, is_odd = _decoded(batch)
        for row in rows:
            data = {name: value for name, value in row.items() if value is not None}
            yield SourceRow(number, data, None, None, odd or is_odd)
            number += 1


def first_of_table(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """The first row, with nulls for the columns that it has no value in; none where there is no row."""
    yield from _decoded(batch.slice(0, 1))[0]


def _decoded(batch: pa.RecordBatch | pa.Table) -> tuple[list[dict[str, Any]], bool]:
    """(rows in JSON types, whether Python has no value for some of theirs): the only place where values leave Arrow."""
    names = batch.schema.names
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError("source", f"has the column {twice!r} twice", "give every column a name of its own")
    for field in batch.schema:
        if holds_pickles(field):
            what = f"column {field.name!r} holds Python objects, or values of several types, that Ray Data has pickled"
            raise SourceError("source", what, "make it text, numbers, lists or dicts of one type, or drop it")
    rows, is_odd = _python_rows(batch)
    converts = {field.name: convert for field in batch.schema if (convert := _convert(field))}
    for row in rows if converts else ():
        for name, convert in converts.items():
            if row[name] is not None and row[name] is not NO_VALUE:
                row[name] = convert(row[name])
    return rows, is_odd


def _python_rows(batch: pa.RecordBatch | pa.Table) -> tuple[list[dict[str, Any]], bool]:
    """Rows of Python values, and whether Python has no value for some of them."""
    try:
        return batch.to_pylist(), False
    except (ValueError, OverflowError, ImportError, pa.ArrowException):
        columns = [[_value(item) for item in column] for column in batch.columns]
        return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)], True


def _value(item: pa.Scalar) -> Any:
    try:
        return item.as_py()
    except (ValueError, OverflowError, ImportError, pa.ArrowException):
        return NO_VALUE


def _convert(field: pa.Field) -> Convert | None:
    """Returns what makes JSON of a value that is not null; None when it is JSON."""
    kind, name = field.type, extension_name(field)
    if name is not None:
        return reader_of(name, kind)
    if types.is_struct(kind):
        return _struct({field.name: _convert(field) for field in kind})
    if types.is_map(kind):
        return _map(_convert(kind.item_field))
    if any(is_list(kind) for is_list in LISTS):
        item = _convert(kind.value_field)
        return None if item is None else _list(item)
    if types.is_decimal(kind):
        return _decimal
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return _iso
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _convert(pa.field("", kind.value_type))
    return None


def _struct(fields: dict[str, Convert | None]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        read = {
            name: item if item is None or (change := fields[name]) is None else change(item)
            for name, item in value.items()
        }
        return {name: item for name, item in read.items() if item is not None}

    return convert


def _map(item: Convert | None) -> Convert:
    def convert(pairs: Any) -> dict[str, Any]:
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        same = item is None
        return {str(key): value if same or value is None else item(value) for key, value in pairs}  # type: ignore[misc]

    return convert


def _list(item: Convert) -> Convert:
    return lambda values: [None if value is None else item(value) for value in values]


def _iso(value: Any) -> str:
    return str(value.isoformat())


def _decimal(value: Decimal) -> str:
    return format(value, "f")


def _may_be_odd(field: pa.Field) -> bool:
    """Returns whether values of a field can be none that JSON has."""
    kind = field.type
    if extension_name(field) is not None:
        return True
    if types.is_nested(kind):
        return any(_may_be_odd(kind.field(place)) for place in range(kind.num_fields))
    if types.is_dictionary(kind):
        return _may_be_odd(pa.field("", kind.value_type))
    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    number = types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)
    text = types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind)
    return not (plain or number or text)
