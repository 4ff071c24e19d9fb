"""Keeps the tables of groups that wait to be trained in memory, up to a bound. The rest is read again.

Always true:
- a table that is not on disk yet stays in memory;
- a table leaves memory when every group that needs it was trained or is gone, or when there are too many bytes;
- what lies in memory decides no step and no byte;
- a step that is committed costs what its own groups cost, however many others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pyarrow as pa

from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.group_rows import Chunk, GroupRows

HELD_BYTES = 256 << 20


class HeldTables:
    """See the module.

    Args:
        spool: where tables are read again.
        lock: guards all that is here; `read` and `written` take it, the others are called under it.
    """

    def __init__(self, spool: Spool, lock: threading.Condition) -> None:
        self._spool, self._lock = spool, lock
        self._held: dict[Chunk, None] = {}  # in the order in which they came
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, chunk: Chunk) -> None:
        """Count a chunk that has its table."""
        if chunk.table is not None and chunk not in self._held:
            self._held[chunk] = None
            self._nbytes += chunk.table.nbytes

    def let_go(self, chunks: Iterable[Chunk] | None = None) -> int:
        """Give the tables of chunks up, None: of all; returns how many went."""
        gone = [chunk for chunk in (self._held if chunks is None else chunks) if chunk.name is not None]
        return sum(self._drop(chunk) for chunk in gone)

    def written(self, chunks: Iterable[Chunk], name: str) -> None:
        """Chunks are on disk, in one file, and all of them are known to be there at the same moment.

        When too many bytes are here they leave memory: the newest are needed last.
        """
        start = 0
        with self._lock:
            for chunk in chunks:
                chunk.name, chunk.start = name, start
                start += chunk.num_rows
                if self._nbytes > HELD_BYTES:
                    self._drop(chunk)

    def through(self, groups: Iterable[GroupRows]) -> None:
        """These groups were trained, or never will be."""
        for group in groups:
            for chunk in group.chunks:
                chunk.num_through += 1
                if chunk.num_through >= chunk.num_groups and chunk.name is not None:
                    self._drop(chunk)

    def read(self, chunk: Chunk) -> pa.Table:
        """The table, from disk when it has left memory."""
        table = chunk.table
        if table is None:
            assert chunk.name is not None, "a table that is not on disk stays in memory"
            table = self._spool.read(chunk.name, chunk.folder).slice(chunk.start, chunk.num_rows)
            with self._lock:
                chunk.table = table
                self.hold(chunk)
        return table

    def _drop(self, chunk: Chunk) -> bool:
        if chunk.table is None or chunk not in self._held:
            return False
        del self._held[chunk]
        self._nbytes -= chunk.table.nbytes
        chunk.table = None
        return True
