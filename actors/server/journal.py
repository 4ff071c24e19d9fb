"""Small numbered records in a folder: the newest one counts, nothing is renamed over.

Works on a local disk, NFS and object stores alike: a record gets a new name, is complete before the
next one is written, and is found by listing. It carries its checksum.

A record is created only if its number is free. Who finds it taken lists again: an owner goes on behind what a process left that it
replaced, and a process that was replaced meanwhile is told so by its claim.

Always true:
- `load` gives the newest record that is what was written, and refuses by name a journal in which none is: fences that begin again would
  let in whom they shut out;
- no record is ever written over, on any store;
- `save` returns after its record is durable and can be listed; older records are then removed;
- calls of `save` that come while a record is being written share the next one (group commit).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from raysvc.cache.local.sealed import opened_if_sealed, sealed
from raysvc.cache.store.claim import Claim, open_owned
from raysvc.errors import StoreError

log = logging.getLogger(__name__)
REMEDY = "restore it; or end every trainer of this server and remove it, and all begins at the frontier of their checkpoints"
Snapshot = Callable[[], Mapping[str, Any]]


class Journal:
    """A folder of records, at any fsspec URL; only the owner of the folder writes."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, claim: Claim | None = None
    ) -> None:
        self._store = open_owned(url, storage_options, claim)
        self._turn = threading.Condition()  # guards what follows but `_kept`
        self._asked = 0  # calls of `save`
        self._durable = 0  # of those, all up to this one are in a record
        self._writing = False  # somebody writes, and alone touches `_kept`
        self._kept: list[int] | None = None  # numbers of the records that are there; None: not listed yet

    def load(self) -> dict[str, Any] | None:
        """The newest record that is whole, None when there is none at all.

        Raises:
            StoreError: there are records, and none is what was written.
        """
        while True:
            try:
                return self._newest_of(sorted(self._numbers(), reverse=True))
            except FileNotFoundError:  # a newer one was written since they were listed, and this one removed
                continue

    def _newest_of(self, numbers: list[int]) -> dict[str, Any] | None:
        first = None
        for number in numbers:
            path, data = f"{self._store.url}/{_name(number)}", self._store.read(_name(number))
            try:
                record = opened_if_sealed(data)
                if record.pop("number", number) != number:
                    raise ValueError("is another record, under this name")
                return record
            except ValueError as error:
                log.warning("passed over a record of a journal: %s %s", path, error)
                first = first or StoreError(path, str(error), REMEDY)
        if first is not None:
            raise first
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
        while not self._store.create(_name(number), sealed({**record, "number": number})):
            older = self._kept = self._numbers()
            number = max(older, default=0) + 1
        self._kept = [number]
        return older

    def _numbers(self) -> list[int]:
        stems = [name.removesuffix(".json") for name in self._store.list()]
        return [int(stem) for stem in stems if stem.isdigit()]


def _name(number: int) -> str:
    return f"{number:012d}.json"
