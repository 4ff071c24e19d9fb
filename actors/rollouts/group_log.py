"""Rollouts on disk: groups, which of them are in which step, and what was forgotten.

    groups/000000000042.<uid>.arrow     rows of one put, or of several that came together
    columns/000000000043.<uid>.arrow    columns that came after their rows
    events/000000000044.<uid>.json      what else happened: versions, timelines, reservations, drops, quarantine
    steps/000000000007.<uid>.json       the groups of a step; the highest revision counts
    forgotten/000000000005.json         steps below 5 are never asked for again; what they had
Always true:
- a file is complete when it can be seen, and durable when the call that made it returns; one that something else
  left torn was never acknowledged, and is passed over;
- groups, columns and events are numbered through and found again by listing, in the order in which they came;
  nothing is renamed over;
- what is removed was named before in a record of `forgotten`: a death in between loses no group and doubles none.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from raysvc.actors.rollouts.table_bytes import file_buffers
from raysvc.cache.store.open import open_store

log = logging.getLogger(__name__)
Key = tuple[str, int]
Folder = Literal["groups", "columns", "events"]
Event = dict[str, Any]  # one field, whose name says what happened
NUMBERED: tuple[Folder, ...] = ("groups", "columns", "events")


@dataclass(frozen=True)
class Forgotten:
    """What is not there any more.

    Attributes:
        kept_from: no step below is asked for again.
        groups: group -> its weight version; trained, evicted or dropped.
        tables: name of each removed put -> its number of rows, which still count.
    """

    kept_from: int
    groups: Mapping[Key, int]
    tables: Mapping[str, int]


class Spool:
    """A folder at any fsspec URL; one writer at a time."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._store = open_store(url, storage_options)
        self._next: int | None = None  # number of the next put; None: not listed yet

    def names(self) -> list[str]:
        """All puts that are there, in order."""
        return sorted(name for name in self._store.list("groups") if name.endswith(".arrow"))

    def history(self) -> list[tuple[Folder, str]]:
        """(folder, name) of all groups, columns and events that are there, in the order in which they came."""
        found = [(folder, name) for folder in NUMBERED for name in self._store.list(folder)]
        return sorted(((folder, name) for folder, name in found if _is_whole(name)), key=lambda each: each[1])

    def put(self, table: pa.Table, folder: Folder = "groups") -> str:
        """Write a table; returns its name. When this returns it is on disk."""
        name = f"{self._number():012d}.{uuid.uuid4().hex[:8]}.arrow"
        self._store.write(f"{folder}/{name}", file_buffers(table))
        return name

    def read(self, name: str, folder: Folder = "groups") -> pa.Table:
        """One table.

        Raises:
            pyarrow.ArrowInvalid: it is torn.
        """
        return pa.ipc.open_file(pa.BufferReader(self._store.read(f"{folder}/{name}"))).read_all()

    def write_events(self, events: list[Event]) -> str:
        """Keep what happened; returns the name of the record."""
        name = f"{self._number():012d}.{uuid.uuid4().hex[:8]}.json"
        self._store.write(f"events/{name}", json.dumps(events).encode())
        return name

    def read_events(self, name: str) -> list[Event]:
        """One record; nothing for a torn one."""
        try:
            events: list[Event] = json.loads(self._store.read(f"events/{name}"))
        except (FileNotFoundError, ValueError):
            log.warning("skipped a torn file: events/%s", name)
            return []
        return events

    def remove_events(self, names: Iterable[str]) -> None:
        """Remove records that a snapshot replaced."""
        for name in names:
            self._store.delete(f"events/{name}")

    def write_step(self, step: int, groups: list[Key], **facts: Any) -> None:
        """Keep which groups a step has."""
        self._write("steps", step, {"step": step, "groups": groups, **facts})

    def steps(self) -> dict[int, list[Key]]:
        """step -> its groups, of all steps that are there."""
        records = sorted(self._records("steps"), key=lambda record: record.get("revision", 0))
        return {record["step"]: [_key(key) for key in record["groups"]] for record in records}

    def forgotten(self) -> Forgotten:
        """All that was ever forgotten."""
        kept_from, groups, tables = 0, dict[Key, int](), dict[str, int]()
        for record in self._records("forgotten"):
            kept_from = max(kept_from, record["kept_from"])
            groups |= {(uid, attempt): version for uid, attempt, version in record["groups"]}
            tables |= record["tables"]
        return Forgotten(kept_from, groups, tables)

    def forget(self, what: Forgotten) -> None:
        """Keep what goes, on top of what went before. Nothing is removed yet."""
        groups = [[*key, version] for key, version in what.groups.items()]
        record = {"kept_from": what.kept_from, "groups": groups, "tables": dict(what.tables)}
        self._write("forgotten", what.kept_from, record)

    def remove_forgotten(self) -> int:
        """Remove what was forgotten, and what an earlier call did not come to; returns how many files went."""
        what = self.forgotten()
        gone = [f"{folder}/{name}" for folder, name in self.history() if name in what.tables]
        steps = [name for name in self._store.list("steps") if _number(name) < what.kept_from]
        gone += [f"steps/{name}" for name in steps]
        for name in gone:
            self._store.delete(name)
        return len(gone)

    def _number(self) -> int:
        if self._next is None:
            known = [*(name for _, name in self.history()), *self.forgotten().tables]
            self._next = max((_number(name) + 1 for name in known if _is_whole(name)), default=0)
        self._next += 1
        return self._next - 1

    def _write(self, folder: str, number: int, record: Mapping[str, Any]) -> None:
        # of several files of one number all say the same, or the first one was torn
        name = f"{folder}/{number:012d}.{uuid.uuid4().hex[:8]}.json"
        self._store.write(name, json.dumps(record).encode())

    def _records(self, folder: str) -> Iterable[dict[str, Any]]:
        for name in sorted(self._store.list(folder)):
            if not name.endswith(".json"):
                continue
            try:
                yield json.loads(self._store.read(f"{folder}/{name}"))
            except (FileNotFoundError, ValueError):
                log.warning("passed over a torn file: %s/%s", folder, name)


def _is_whole(name: str) -> bool:
    """Whether a name is one of ours, and not of a file that is still being written."""
    return name.endswith((".arrow", ".json")) and name.split(".")[0].isdigit()


def _key(pair: list[Any]) -> Key:
    return str(pair[0]), int(pair[1])


def _number(name: str) -> int:
    """Of a step's file; beyond all steps for what is none."""
    stem = name.split(".")[0]
    return int(stem) if stem.isdigit() else 1 << 62
