"""Rows of a CSV or TSV file: every field is text, as it stands there.

Always true:
- nothing is guessed: `007`, `1e3`, a date and an empty field are these texts;
- a quoted field may hold line ends, and a row may be of any size;
- a row that has more or fewer fields than the header comes with an error, and keeps its number;
- empty lines are no rows and have no number.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from raysvc.chat.source.json_rows import SourceRow
from raysvc.errors import SourceError

DELIMITERS = {"csv": ",", "tsv": "\t"}
MOST_FIELD_BYTES = 1 << 30
READ_BYTES = 1 << 20


def csv_rows(path: str, stream: Any, kind: str) -> Iterator[SourceRow]:
    """All rows of a file, numbered from 0.

    Args:
        path: for errors.
        stream: of bytes, UTF-8 with or without a byte order mark.
        kind: csv or tsv.

    Raises:
        SourceError: no header, a name that stands twice in it, or text that is not UTF-8.
    """
    csv.field_size_limit(MOST_FIELD_BYTES)
    text = io.TextIOWrapper(io.BufferedReader(stream, READ_BYTES), "utf-8-sig", newline="")
    lines = csv.reader(text, delimiter=DELIMITERS[kind])
    try:
        header = next(lines, [])
        _check_header(path, header)
        count = len(header)
        for number, fields in enumerate(fields for fields in lines if fields):
            if len(fields) == count:
                yield SourceRow(number, dict(zip(header, fields, strict=True)))
            else:
                yield SourceRow(number, None, f"fields and header differ: {len(fields)} fields for {count}")
    except (csv.Error, UnicodeDecodeError) as error:
        remedy = "save it as UTF-8 with fields in double quotes"
        raise SourceError(f"source file {path!r}", f"cannot be read as {kind}: {error}", remedy) from error
    finally:
        text.detach().detach()


def _check_header(path: str, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        what = f"has the column {twice[0]!r} twice"
        raise SourceError(f"source file {path!r}", what, "give every column a name of its own")
