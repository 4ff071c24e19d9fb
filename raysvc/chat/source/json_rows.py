"""Rows of a source as a reader finds them, and those of JSON lines.

Always true:
- a row that cannot be read comes with its error: it stops nothing;
- blank lines are no rows but keep their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class SourceRow:
    """One row as the reader found it.

    Attributes:
        source_row: its number in the source.
        data: the row, None when it could not be read; what JSON does not have becomes text as in `transformers`.
        error: why not, beginning with a short reason and a colon.
    """

    source_row: int
    data: dict[str, Any] | None
    error: str | None = None


def json_rows(data: bytes, first_row: int) -> Iterator[SourceRow]:
    """Rows of complete JSON lines; one that is broken comes with its error."""
    import orjson

    whole, at, number = memoryview(data), 0, first_row - 1
    while at < len(data):
        end = data.find(b"\n", at)
        line = whole[at : end if end >= 0 else len(data)]
        at, number = at + len(line) + 1, number + 1
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as broken:
            if bytes(line).strip():
                yield SourceRow(number, None, f"broken JSON: {broken}")
            continue
        if isinstance(value, dict):
            yield SourceRow(number, value)
        else:
            yield SourceRow(number, None, f"not a JSON object: it is a {type(value).__name__}")


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
