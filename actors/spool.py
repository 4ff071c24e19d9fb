"""Rollout groups on disk: one Arrow file per put, complete before the put is acknowledged.

    <folder>/000000000042.<uid>.arrow      the table of `raysvc.groups.table_of`
Always true:
- what was acknowledged is found again by listing, in the order in which it was put;
- a file that its writer left torn was never acknowledged, and is passed over;
- nothing is renamed over, no name comes twice.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

import fsspec
import pyarrow as pa

log = logging.getLogger(__name__)


class Spool:
    """A folder of tables at any fsspec URL; one writer at a time."""

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url, **(storage_options or {}))
        self._next = 0

    def load(self) -> list[tuple[str, pa.Table]]:
        """(name, table) of everything that was acknowledged, in order."""
        names = self._names()
        self._next = max((int(name.split(".")[0]) + 1 for name in names), default=0)
        tables = [(name, self._whole(name)) for name in names]
        return [(name, table) for name, table in tables if table is not None]

    def put(self, table: pa.Table) -> str:
        """Write a table; returns its name. When this returns it is on disk."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        name = f"{self._next:012d}.{uuid.uuid4().hex[:8]}.arrow"
        self._next += 1
        self._fs.makedirs(self._root, exist_ok=True)
        with self._fs.open(f"{self._root}/{name}", "wb") as file:
            file.write(sink.getvalue())
            if hasattr(file, "fileno") and self._fs.protocol in ("file", ("file", "local")):
                file.flush()
                os.fsync(file.fileno())
        return name

    def read(self, name: str) -> pa.Table:
        """One table."""
        return pa.ipc.open_file(pa.BufferReader(self._fs.cat_file(f"{self._root}/{name}"))).read_all()

    def _whole(self, name: str) -> pa.Table | None:
        try:
            return self.read(name)
        except pa.ArrowInvalid:
            log.warning("passed over a torn file: %s/%s", self._root, name)
            return None

    def _names(self) -> list[str]:
        try:
            found = self._fs.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(name for path in found if (name := str(path).rsplit("/", 1)[-1]).endswith(".arrow"))
