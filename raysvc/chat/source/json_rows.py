"""Rows of a source as a reader finds them, and those of JSON lines.

JSON is read as it is written: integers of any size stay integers, and `NaN` and `Infinity`, which Python writes, are
numbers that only a row fails on that uses them.

A null in an object is a value, or was filled in: `Dataset.to_json` gives every object the keys of all rows, with null where a row
has none. Nothing in a row tells one from the other, so such nulls are counted, and left out where a job says so.

Always true:
- a row that cannot be read comes with its error: it stops nothing;
- blank lines are no rows but keep their number;
- a byte order mark before a line is no part of it.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Any, NamedTuple

import numpy as np

from raysvc.chat.row_errors import RowFault

BLOCK_BYTES = 1 << 25
LINES_AT_ONCE = 64
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 19  # from 2^64 on, orjson makes integers floats
_LINE = re.compile(r":? line 1 column (\d+) \(char \d+\)")
_STEP = 6
_MEANT = "default"  # of a schema, where null says something


@dataclass(frozen=True)
class UnreadableValue:
    """A value of a row that JSON has no type for.

    Attributes:
        why: what it is, as a sentence.
    """

    why: str


class SourceRow(NamedTuple):
    """One row as the reader found it.

    Attributes:
        source_row: its number in the source.
        data: the row in JSON types, None when it could not be read.
        error: why not, beginning with a short reason and a colon.
        line: its text, where it came from JSON lines.
        odd: it may hold a value that JSON does not have.
    """

    source_row: int
    data: dict[str, Any] | None
    error: str | None = None
    line: bytes | None = None
    odd: bool = False


def load_json(text: bytes | memoryview, allow_nan: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: UTF-8, with a byte order mark or without.
        allow_nan: take `NaN`, `Infinity`, and numbers that are too large, like `1e400`.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    import orjson

    try:
        if not has_long_numbers(text):
            return orjson.loads(text)
    except orjson.JSONDecodeError:
        if not allow_nan and not bytes(text[:3]) == codecs.BOM_UTF8:
            raise
    plain = bytes(text).removeprefix(codecs.BOM_UTF8).decode()
    if allow_nan:
        return json.loads(plain)
    return json.loads(plain, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is larger than any number of 64 bits")
    return number


def has_long_numbers(text: bytes | memoryview) -> bool:
    """Returns whether digits stand together that may be an integer beyond 64 bits."""
    data = np.frombuffer(text, np.uint8)
    digit = data[::_STEP] - np.uint8(48) < 10
    at = _STEP * np.flatnonzero(
        digit[:-2] & digit[1:-1] & digit[2:]
    )  # three stand in any number of this length
    for step in set(range(2 * _STEP)) - {0, _STEP}:
        at = at[data[at + step] - np.uint8(48) < 10]  # so do all that are between them
    return bool(len(at)) and _LONG_NUMBER in bytes(text).translate(_DIGITS)


def json_rows(data: bytes, first_row: int) -> Iterator[SourceRow]:
    """Rows of complete JSON lines; one that is broken comes with its error."""
    import orjson

    lines, number = io.BytesIO(data), first_row
    load = load_json if has_long_numbers(data) else orjson.loads
    while some := [*islice(lines, LINES_AT_ONCE)]:
        try:
            values = [*map(load, some)]
        except (ValueError, RecursionError):
            values = []
        if {*map(type, values)} == {dict}:
            fields = zip(count(number), values, repeat(None), some, repeat(False))
            yield from map(SourceRow._make, fields)
        else:
            for place, line in enumerate(some):
                yield from _json_row(line.removesuffix(b"\n"), number + place)
        number += len(some)


def _without_line(broken: Exception) -> str:
    """Returns what is wrong with a line; each is parsed alone, so a parser calls it line 1 wherever it stands."""
    return _LINE.sub(r" at character \1", str(broken))


def _json_row(line: bytes, number: int) -> Iterator[SourceRow]:
    """The row of one line, none where it is blank."""
    try:
        value, odd = load_json(line), False
    except (ValueError, RecursionError):
        if not line.strip():
            return
        try:
            value, odd = load_json(line, allow_nan=True), True
        except (ValueError, RecursionError) as broken:
            yield SourceRow(number, None, f"broken JSON: {_without_line(broken)}", line)
            return
    if isinstance(value, dict):
        yield SourceRow(number, value, None, line, odd)
    else:
        yield SourceRow(number, None, f"not a JSON object: it is a {type(value).__name__}", line)


def json_blocks(data: bytes, first_row: int) -> Iterator[tuple[bytes, int]]:
    """(lines, number of the first) of at most `BLOCK_BYTES`, or one line."""
    at = 0
    while at < len(data):
        end = len(data)
        if end - at > BLOCK_BYTES:
            end = data.rfind(b"\n", at, at + BLOCK_BYTES) + 1 or data.find(b"\n", at) + 1 or len(data)
        block = data if (at, end) == (0, len(data)) else data[at:end]
        yield block, first_row
        at = end
        first_row += block.count(b"\n") if at < len(data) else 0


def holds_null(value: Any) -> bool:
    """Returns whether an object in a value has a null that is no default of a schema."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if any(item is None and key != _MEANT for key, item in one.items()):
                return True
            left += one.values()
        elif isinstance(one, list):
            left += one
    return False


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the keys of its objects whose value is null.

    Raises:
        RowFault: it is nested deeper than Python can follow.
    """
    try:
        return {key: _without(value) for key, value in row.items() if value is not None}
    except RecursionError:
        raise RowFault("the row is nested too deep", "source.drop_nulls looks at all of it") from None


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if item is not None}
    return [_without(item) for item in value] if isinstance(value, list) else value
