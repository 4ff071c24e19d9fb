"""Rows of a range of an Arrow file or stream.

A file is a stream behind eight bytes, with a footer that nothing here needs: both are read as streams, from any batch on.
Polars writes the schema of a file without the length that a stream has before it; it gets one here.

Always true:
- what is held is one batch and the rows that were asked for;
- no value is handed out whose offsets lead out of its batch.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from raysvc.errors import SourceError

MAGIC = b"ARROW1\0\0"
_MARK = b"\xff\xff\xff\xff"  # before the length of each message
_LEAST_SCHEMA_BYTES = 32  # a length is more than this; a schema without one begins with a small offset


@contextlib.contextmanager
def opened(stream: io.BufferedReader[Any]) -> Iterator[tuple[pa.RecordBatchStreamReader, bool]]:
    """A reader of the batches of a file or stream, and whether it is a file.

    Args:
        stream: at its beginning; behind each batch it stands where the batch ends.

    Raises:
        SourceError: a file whose dictionaries stand behind its batches.
    """
    is_file = stream.peek(len(MAGIC))[: len(MAGIC)] == MAGIC
    stream.read(len(MAGIC) if is_file else 0)
    bare = is_file and int.from_bytes(stream.peek(4)[:4], "little") < _LEAST_SCHEMA_BYTES
    source = _PrefixedStream(_with_length(stream), stream) if bare else stream
    try:
        with pa.ipc.open_stream(pa.PythonFile(source, mode="r")) as reader:
            yield reader, is_file
    except pa.ArrowInvalid as error:
        if is_file and "dictionaries at the start" in str(
            error
        ):  # which a file may have, and a stream may not
            what = "has its dictionaries behind its batches, as polars writes categories"
            raise SourceError(
                "source", f"an Arrow file {what}", "use write_parquet, or write_ipc_stream"
            ) from error
        raise


def _with_length(stream: io.BufferedReader[Any]) -> bytes:
    """A schema that lacks its length, with it, and the mark of the message behind it, which ends it."""
    words: list[bytes] = []
    while (word := stream.read(8))[:4] != _MARK:
        if not word:
            raise pa.ArrowInvalid("the file ends before its first batch")
        words.append(word)
    schema = b"".join(words)
    return _MARK + len(schema).to_bytes(4, "little") + schema + word


class _PrefixedStream(io.RawIOBase):
    """Bytes, and then a stream."""

    def __init__(self, head: bytes, stream: io.BufferedReader[Any]) -> None:
        super().__init__()
        self._head, self._stream = io.BytesIO(head), stream

    def readable(self) -> bool:
        return True

    def read(self, num_bytes: int = -1) -> bytes:
        """Reads so many bytes; returns fewer only at the end."""
        begin = self._head.read(num_bytes)
        return (
            begin + self._stream.read(max(num_bytes - len(begin), -1)) if len(begin) != num_bytes else begin
        )


def batches_from_start(stream: Any) -> Iterator[pa.RecordBatch]:
    """The batches of a file or stream, one at a time."""
    buffered = io.BufferedReader(stream, 1 << 16)
    with opened(buffered) as (reader, _):
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
    """Returns `num_rows` rows, after `skip` rows that are passed by."""
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
