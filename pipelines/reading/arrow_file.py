"""Rows of a range of an Arrow file or stream.

A file is a stream behind eight bytes, with a footer that nothing here needs: both are read as streams, from any batch on.

Always true:
- what is held is one batch and the rows that were asked for;
- no value is handed out whose offsets lead out of its batch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

MAGIC = b"ARROW1\0\0"


def skip_magic(stream: Any) -> int:
    """Go to where the stream begins; the place."""
    begin = len(MAGIC) if stream.peek(len(MAGIC))[: len(MAGIC)] == MAGIC else 0
    stream.read(begin)
    return begin


def batches_from_start(stream: Any) -> Iterator[pa.RecordBatch]:
    """The batches of a file or stream, one at a time."""
    buffered = io.BufferedReader(stream, 1 << 16)
    skip_magic(buffered)
    with pa.ipc.open_stream(pa.PythonFile(buffered, mode="r")) as reader:
        yield from reader
    buffered.detach()


def batches_behind(stream: Any, head: bytes) -> Iterator[pa.RecordBatch]:
    """The batches from where the stream stands, which is where a batch begins.

    Args:
        head: the schema.
    """
    source = pa.PythonFile(stream, mode="r")
    schema = pa.ipc.read_schema(pa.py_buffer(head))
    while True:
        yield pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def rows_of_range(batches: Iterator[pa.RecordBatch], skip: int, num_rows: int) -> pa.Table:
    """So many rows, after some that are passed by."""
    kept: list[pa.RecordBatch] = []
    left = num_rows
    for batch in batches:
        part = batch.slice(skip, left)
        part.validate(full=True)  # a damaged file must not lead out of its memory
        skip = max(0, skip - batch.num_rows)
        if part.num_rows:
            kept.append(part)
            left -= part.num_rows
        if left == 0:
            break
    return pa.Table.from_batches(kept)
