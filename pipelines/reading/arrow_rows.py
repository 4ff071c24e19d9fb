"""Rows of an Arrow table in JSON types: as a JSON file of the same rows would bring them.

| in the table | in the row |
|---|---|
| null in a struct, or as a whole column | absent: a columnar format gives every row the fields of all rows |
| date, time, timestamp | ISO 8601 text |
| decimal | its digits as text |
| map | object |
| text, integer, boolean, list | the same |
| NaN, infinite, bytes, duration | the same; a row that uses it is quarantined (`odd`) |

Always true:
- a null inside a list stays;
- columns whose type needs no change are not looked through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from raysvc.chat.source.json_rows import SourceRow

Convert = Callable[[Any], Any]
LISTS = (
    types.is_list,
    types.is_large_list,
    types.is_fixed_size_list,
    types.is_list_view,
    types.is_large_list_view,
)


def rows_of_table(table: pa.Table, first_row: int) -> Iterator[SourceRow]:
    """The rows of a table, numbered."""
    converts = {field.name: convert for field in table.schema if (convert := _convert(field.type))}
    odd = any(_may_be_odd(field.type) for field in table.schema)
    number = first_row
    for batch in table.to_batches():
        for row in batch.to_pylist():
            data = {name: value for name, value in row.items() if value is not None}
            for name in converts.keys() & data.keys():
                data[name] = converts[name](data[name])
            yield SourceRow(number, data, None, None, odd)
            number += 1


def _convert(kind: pa.DataType) -> Convert | None:
    """What makes JSON of a value that is not null; None when it is JSON."""
    if types.is_struct(kind):
        return _struct({field.name: _convert(field.type) for field in kind})
    if types.is_map(kind):
        return _map(_convert(kind.item_type))
    if any(is_list(kind) for is_list in LISTS):
        item = _convert(kind.value_type)
        return None if item is None else _list(item)
    if types.is_decimal(kind):
        return _decimal
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return _iso
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _convert(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _convert(kind.storage_type)
    return None


def _struct(fields: dict[str, Convert | None]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: item if (change := fields[name]) is None else change(item)
            for name, item in value.items()
            if item is not None
        }

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


def _may_be_odd(kind: pa.DataType) -> bool:
    """Whether values of a type can be none that JSON has."""
    if types.is_nested(kind):
        return any(_may_be_odd(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_dictionary(kind):
        return _may_be_odd(kind.value_type)
    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)
    text = types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind)
    return not (plain or text or types.is_boolean(kind) or types.is_null(kind))
