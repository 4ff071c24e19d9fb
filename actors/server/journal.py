"""Small numbered records in a folder: the newest one counts, nothing is renamed over.

Works on a local disk, NFS and object stores alike: a record gets a new name, is complete before the
next one is written, and is found by listing. A record that something else left torn is skipped.

Always true:
- `load` gives the newest complete record;
- `save` returns after its record is durable and can be listed; older records are then removed;
- calls of `save` that come while a record is being written share the next one (group commit).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from raysvc.cache.store.open import open_store

Snapshot = Callable[[], Mapping[str, Any]]


class Journal:
    """A folder of records, at any fsspec URL; one writing process at a time (the named actor)."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._store = open_store(url, storage_options)
        self._turn = threading.Condition()  # guards what follows but `_kept`
        self._asked = 0  # calls of `save`
        self._durable = 0  # of those, all up to this one are in a record
        self._writing = False  # somebody writes, and alone touches `_kept`
        self._kept: list[int] | None = None  # numbers of the records that are there; None: not listed yet

    def load(self) -> dict[str, Any] | None:
        """The newest complete record, None when there is none."""
        for number in sorted(self._numbers(), reverse=True):
            try:
                record = json.loads(self._store.read(_name(number)))
            except (FileNotFoundError, ValueError):
                continue
            if isinstance(record, dict):
                return record
        return None

    def save(self, snapshot: Snapshot) -> None:
        """Make what `snapshot` gives durable; it is called when it is this call's turn to write, or not at all."""
        with self._turn:
            self._asked += 1
            mine = self._asked
            while self._writing and self._durable < mine:
                self._turn.wait()
            if self._durable >= mine:
                return
            self._writing, covers = True, self._asked
        try:
            older = self._write(snapshot())
            with self._turn:
                self._durable = covers
                self._turn.notify_all()  # nobody has to wait until the older ones are removed
            for number in older:
                self._store.delete(_name(number))
        finally:
            with self._turn:
                self._writing = False
                self._turn.notify_all()

    def _write(self, record: Mapping[str, Any]) -> list[int]:
        """Write the next record; returns the numbers before it."""
        older = self._numbers() if self._kept is None else self._kept
        number = max(older, default=0) + 1
        self._kept = [*older, number]
        self._store.write(_name(number), json.dumps(record).encode())
        self._kept = [number]
        return older

    def _numbers(self) -> list[int]:
        stems = [name.removesuffix(".json") for name in self._store.list()]
        return [int(stem) for stem in stems if stem.isdigit()]


def _name(number: int) -> str:
    return f"{number:012d}.json"
