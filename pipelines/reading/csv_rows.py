"""Rows of a CSV or TSV file: every field is text, as it stands there.

Always true:
- nothing is guessed: `007`, `1e3`, a date and an empty field are these texts;
- a quoted field may hold line ends; one over `MOST_FIELD_BYTES` is an error;
- a quote that no writer of CSV leaves behind (one that stays open to the end of the file, or a quoted field that goes on behind its
  closing quote) is an error that names its line: a lenient reader swallows the rows behind it, or writes other texts;
- a row that has more or fewer fields than the header comes with an error, and keeps its number;
- empty lines are no rows and have no number.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raysvc.chat.source.json_rows import SourceRow
from raysvc.errors import SourceError

DELIMITERS = {"csv": ",", "tsv": "\t"}
MOST_FIELD_BYTES = 1 << 28
READ_BYTES = 1 << 20
MARK = "\ufeff"


@dataclass
class ByteCounter:
    """Counts the bytes of a file that a reader has taken.

    Attributes:
        header: the line of names, with what stands before it.
        header_end: the byte behind it.
        row_start, row_end: of the row that came last; empty lines before it belong to it.
        num_bytes: read so far.
    """

    header: bytes = b""
    header_end: int = 0
    row_start: int = 0
    row_end: int = 0
    num_bytes: int = 0

    def lines(self, text: Iterable[str]) -> Iterator[str]:
        """The lines, counted; without the byte order mark."""
        for line in text:
            self.num_bytes += len(line) if line.isascii() else len(line.encode())
            if not self.header_end:
                self.header += line.encode()
                line = line.removeprefix(MARK)
            yield line

    def end_header(self) -> None:
        """The names were read."""
        self.header_end = self.row_end = self.num_bytes

    def end_row(self) -> None:
        """A row was read."""
        self.row_start, self.row_end = self.row_end, self.num_bytes


def csv_rows(path: str, stream: Any, kind: str, counted: ByteCounter | None = None) -> Iterator[SourceRow]:
    """All rows of a file, numbered from 0.

    Args:
        path: for errors.
        stream: of bytes, UTF-8 with or without a byte order mark.
        kind: csv or tsv.
        counted: told where each row ends.

    Raises:
        SourceError: no header, a name that stands twice in it, or text that is not UTF-8.
    """
    csv.field_size_limit(MOST_FIELD_BYTES)
    counted = counted or ByteCounter()
    text = io.TextIOWrapper(io.BufferedReader(stream, READ_BYTES), "utf-8", newline="")
    lines = csv.reader(counted.lines(text), delimiter=DELIMITERS[kind], strict=True)
    begin = 1  # the line where the open row begins
    try:
        header = next(lines, [])
        counted.end_header()
        _check_header(path, header)
        count = len(header)
        begin = lines.line_num + 1
        for number, fields in enumerate(fields for fields in lines if fields):
            counted.end_row()
            begin = lines.line_num + 1
            if len(fields) == count:
                yield SourceRow(number, dict(zip(header, fields, strict=True)))
            else:
                yield SourceRow(number, None, f"fields and header differ: {len(fields)} fields for {count}")
    except csv.Error as error:
        what = f"cannot be read as {kind}: {error}, in the row that begins at line {begin}"
        remedy = (
            "put such a field into double quotes, with every quote in it written twice, as csv.writer does"
        )
        raise SourceError(f"source file {path!r}", what, remedy) from error
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8 with fields in double quotes"
        raise SourceError(f"source file {path!r}", f"cannot be read as {kind}: {error}", remedy) from error
    finally:
        text.detach().detach()


def _check_header(path: str, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        what = f"has the column {twice[0]!r} twice"
        raise SourceError(f"source file {path!r}", what, "give every column a name of its own")
