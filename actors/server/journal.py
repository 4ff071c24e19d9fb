"""The ledger on disk: small numbered files, newest wins, nothing is renamed over.

Works on a local disk, NFS and object stores alike: a record gets a new name, is complete before the
next one is written, and is found by listing. A record that something else left torn is skipped.

Always true:
- `load` gives the newest complete record;
- `save` returns after the record is durable and can be listed; older records are then removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raysvc.cache.store.open import open_store


class Journal:
    """A folder of records, at any fsspec URL; one writer at a time (the named actor)."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._store = open_store(url, storage_options)
        self._last: int | None = None  # number of the newest record; None: not listed yet

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

    def save(self, record: Mapping[str, Any]) -> None:
        """Write the next record and remove the ones before it."""
        older = self._numbers()
        self._last = max([*older, self._last or 0]) + 1
        self._store.write(_name(self._last), json.dumps(record).encode())
        for number in older:
            self._store.delete(_name(number))

    def _numbers(self) -> list[int]:
        stems = [name.removesuffix(".json") for name in self._store.list()]
        return [int(stem) for stem in stems if stem.isdigit()]


def _name(number: int) -> str:
    return f"{number:012d}.json"
