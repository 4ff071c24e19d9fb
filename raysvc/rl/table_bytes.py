"""A table as the buffers of an Arrow file, without a copy of its columns.

Always true:
- the buffers one after another are the bytes that `pyarrow.ipc.new_file` would write;
- what is large is a view of the table's own memory (of the object store, where the table came from there).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def file_buffers(table: pa.Table) -> list[memoryview]:
    """Returns what to write, in this order."""
    sink = _Sink()
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return sink.buffers


class _Sink:
    """Takes the place of a file that Arrow writes to: it hands over large buffers as they are."""

    closed = False

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._size = 0

    def write(self, data: Any) -> int:
        """Keep bytes or an Arrow buffer."""
        self.buffers.append(memoryview(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The buffers stay."""
