"""The ledger on disk: small numbered files, newest wins, nothing is renamed over.

Works on a local disk, NFS and object stores alike: a record gets a new name, is complete before the
next one is written, and is found by listing. A half-written record (the writer was killed) is skipped.

Always true:
- `load` gives the newest complete record;
- `save` returns after the record can be listed; older records are then removed.
"""

from __future__ import annotations

import json
from typing import Any

import fsspec


class Journal:
    """A folder of records, at any fsspec URL; one writer at a time (the named actor)."""

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url, **(storage_options or {}))
        self._last = max(self._numbers(), default=0)

    def load(self) -> dict[str, Any] | None:
        """The newest complete record, None when there is none."""
        for number in sorted(self._numbers(), reverse=True):
            try:
                record = json.loads(self._fs.cat_file(self._path(number)))
            except (FileNotFoundError, json.JSONDecodeError):
                continue
            if isinstance(record, dict):
                return record
        return None

    def save(self, record: dict[str, Any]) -> None:
        """Write the next record and remove the ones before it."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._last += 1
        self._fs.pipe_file(self._path(self._last), json.dumps(record).encode())
        for number in self._numbers():
            if number < self._last:
                self._fs.rm_file(self._path(number))

    def _path(self, number: int) -> str:
        return f"{self._root}/{number:012d}.json"

    def _numbers(self) -> list[int]:
        try:
            names = self._fs.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        stems = [str(name).rsplit("/", 1)[-1].removesuffix(".json") for name in names]
        return [int(stem) for stem in stems if stem.isdigit()]
