"""A JSON file that is one value: a list of rows, or an object that holds one under `data`.

Always true:
- whether a file is such a value or JSON lines is said by its beginning alone.
"""

from __future__ import annotations

import re
from typing import Any

from raysvc.chat.source.json_rows import load_json
from raysvc.errors import SourceError
from raysvc.pipelines.sources.files import Kind

ROWS = "data"
_ROWS_BEGIN = re.compile(rb'"data"\s*:\s*\[\s*\{')
_NEAR_BYTES = 4096


def kind_of_json(begin: bytes) -> Kind:
    """`json` for one value, `lines` for one object per line, from the first bytes of a file."""
    text = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "json"
    first, newline, rest = text.partition(b"\n")
    if newline:
        try:
            value = load_json(first, allow_nan=True)
        except (ValueError, RecursionError):
            return (
                "json" if first.strip() in (b"{", b'{"data":', b'{"data": [') or _rows_near(text) else "lines"
            )
        return "json" if not rest.strip() and _holds_rows(value) else "lines"
    return "json" if _rows_near(text) else "lines"


def json_file_rows(path: str, text: bytes) -> list[Any]:
    """The rows of a file that is one value.

    Raises:
        SourceError: it is not JSON, or holds no rows.
    """
    try:
        value = load_json(text, allow_nan=True)
    except (ValueError, RecursionError) as error:
        remedy = "fix it, or use one object per line"
        raise SourceError(f"source file {path!r}", f"is not valid JSON: {error}", remedy) from error
    rows = value[ROWS] if _holds_rows(value) else value
    if not isinstance(rows, list):
        remedy = 'use a list of objects, {"data": [...]}, or one object per line'
        raise SourceError(f"source file {path!r}", "holds no list of rows", remedy)
    return rows


def _holds_rows(value: Any) -> bool:
    rows = value.get(ROWS) if isinstance(value, dict) else None
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def _rows_near(text: bytes) -> bool:
    """Returns whether a list of rows opens soon, outside of any row."""
    found = _ROWS_BEGIN.search(text[:_NEAR_BYTES])
    return found is not None and text[: found.start()].count(b"{") == 1
