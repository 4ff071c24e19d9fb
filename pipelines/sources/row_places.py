"""Finds where the rows of CSV and Arrow files and of tars lie, so that a slice is read without what stands before it.

Always true:
- cuts are byte ranges in the order of the rows; the first begins at 0, the last ends with the file, and they touch;
- a range that begins later is read behind the file's head: the line of names, or the schema; a tar has none;
- a range is whole rows of a CSV file, whole samples of a tar, or whole batches of an Arrow file; a batch larger than a slice is the range of several
  cuts, each with its share of the rows;
- an Arrow file with dictionaries is one range: a batch may need what stands before it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raysvc.pipelines.reading.arrow_file import MAGIC, opened
from raysvc.pipelines.reading.csv_rows import ByteCounter, csv_rows
from raysvc.pipelines.reading.tar_rows import sample_ends
from raysvc.pipelines.sources.cuts import MAX_LINE_BYTES, Cut, even_cuts

Range = tuple[int, int]  # end, rows


@dataclass(frozen=True)
class Places:
    """Cuts of a file, and the bytes that a range which begins later is read behind."""

    cuts: list[Cut]
    head: bytes = b""


def csv_places(path: str, stream: io.RawIOBase, kind: str, slice_bytes: int) -> Places:
    """Look through a CSV or TSV file to its end.

    Raises:
        SourceError: it cannot be read as that.
    """
    counted = ByteCounter()
    ends = [0]  # of the header, and of each row that ends a cut
    rows = [0]
    for _ in csv_rows(path, stream, kind, counted):
        here = counted.row_end
        if len(ends) == 1:
            ends, rows = [counted.header_end, counted.header_end], [0, 0]
        long = here - counted.row_start > MAX_LINE_BYTES
        if long and rows[-1]:
            ends.append(counted.row_start)
            rows.append(0)
        ends[-1], rows[-1] = here, rows[-1] + 1
        if long or here - ends[-2] >= slice_bytes:
            ends.append(here)
            rows.append(0)
    pairs = [(end, count) for end, count in zip(ends, rows, strict=True) if count]
    return Places(_cuts(pairs, counted.num_bytes), counted.header)


def tar_places(stream: io.RawIOBase, slice_bytes: int) -> Places:
    """Look through a tar of samples to its end.

    Raises:
        TarError: it is cut off or damaged.
    """
    ranges = _ranges([(end, 1) for end in sample_ends(stream.read)], slice_bytes)
    return Places(_cuts(ranges, stream.tell()))


def arrow_places(stream: io.RawIOBase, slice_bytes: int) -> Places:
    """Look through an Arrow file or stream to its end.

    Raises:
        ArrowInvalid: it is damaged, or a file that lacks its end.
    """
    buffered = io.BufferedReader(stream, 1 << 16)
    with opened(buffered) as (reader, is_file):
        schema = reader.schema
        batches = list(_batches(reader, buffered))
    tail = b""
    while block := buffered.read(1 << 20):  # what stands behind the batches belongs to the content too
        tail = (tail + block)[-len(MAGIC) :]
    size = buffered.tell()
    if is_file and not tail.endswith(MAGIC.rstrip(b"\0")):
        raise pa.ArrowInvalid("the file ends before its footer")
    buffered.detach()
    if any(_has_dictionary(field.type) for field in schema):
        batches = [(size, sum(rows for _, rows in batches))]
    head = schema.serialize().to_pybytes()
    return Places(_cuts(_ranges(batches, slice_bytes), size, slice_bytes), head)


def _batches(reader: Any, buffered: Any) -> Iterator[Range]:
    for batch in reader:
        yield buffered.tell(), int(batch.num_rows)


def _ranges(batches: list[Range], slice_bytes: int) -> list[Range]:
    """Batches joined until a slice is full; a batch that is larger stands alone."""
    joined: list[Range] = []
    start, end, rows = 0, 0, 0  # of the open range
    for batch_end, batch_rows in batches:
        if rows and batch_end - end > slice_bytes:
            joined.append((end, rows))
            start, rows = end, 0
        end, rows = batch_end, rows + batch_rows
        if rows and end - start >= slice_bytes:
            joined.append((end, rows))
            start, rows = end, 0
    return [*joined, (end, rows)] if rows else joined


def _cuts(ranges: list[Range], size: int, slice_bytes: int | None = None) -> list[Cut]:
    """Ranges that touch and reach to the end; with `slice_bytes` larger ones are shared by several cuts."""
    cuts: list[Cut] = []
    start = 0
    for place, (end, rows) in enumerate(ranges):
        end = size if place == len(ranges) - 1 else end
        parts = 1 if slice_bytes is None else min(rows, -(-(end - start) // (2 * slice_bytes)))
        cuts += [(start, end, count) for _, _, count in even_cuts(rows, parts)]
        start = end
    return cuts


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return any(_has_dictionary(kind.field(place).type) for place in range(kind.num_fields))
