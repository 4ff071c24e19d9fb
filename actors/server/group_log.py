"""Rollouts on disk: groups, which of them are in which step, and what was forgotten.

    groups/000000000042.<uid>.arrow     one put: the table of `raysvc.rl.group.table_of`
    steps/000000000007.json             the groups of a step
    forgotten/000000000005.json         steps below 5 are never asked for again; what they had
Always true:
- a file is complete when it can be seen, and durable when the call that made it returns; one that something else
  left torn was never acknowledged, and is passed over;
- groups are found again by listing, in the order in which they were put, and nothing is renamed over;
- what is removed was named before in a record of `forgotten`: a death in between loses no group and doubles none.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raysvc.cache.store.open import open_store

log = logging.getLogger(__name__)
Key = tuple[str, int]


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

    def put(self, table: pa.Table) -> str:
        """Write a table; returns its name. When this returns it is on disk."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        if self._next is None:
            known = [*self.names(), *self.forgotten().tables]
            self._next = max((int(name.split(".")[0]) + 1 for name in known), default=0)
        name = f"{self._next:012d}.{uuid.uuid4().hex[:8]}.arrow"
        self._next += 1
        self._store.write(f"groups/{name}", memoryview(sink.getvalue()))
        return name

    def read(self, name: str) -> pa.Table:
        """One table.

        Raises:
            pyarrow.ArrowInvalid: it is torn.
        """
        return pa.ipc.open_file(pa.BufferReader(self._store.read(f"groups/{name}"))).read_all()

    def write_step(self, step: int, groups: list[Key], **facts: Any) -> None:
        """Keep which groups a step has."""
        self._write("steps", step, {"step": step, "groups": groups, **facts})

    def steps(self) -> dict[int, list[Key]]:
        """step -> its groups, of all steps that are there."""
        records = self._records("steps")
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
        gone = [f"groups/{name}" for name in self.names() if name in what.tables]
        steps = [name for name in self._store.list("steps") if _number(name) < what.kept_from]
        gone += [f"steps/{name}" for name in steps]
        for name in gone:
            self._store.delete(name)
        return len(gone)

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


def _key(pair: list[Any]) -> Key:
    return str(pair[0]), int(pair[1])


def _number(name: str) -> int:
    """Of a step's file; beyond all steps for what is none."""
    stem = name.split(".")[0]
    return int(stem) if stem.isdigit() else 1 << 62
