"""Rollouts on disk: groups, which of them are in which step, and what was forgotten.

    groups/000000000042.g1.<counts>.<uid>-<digest>.arrow    rows of one put, or of several that came together
    columns/000000000043.g1.<counts>.<uid>-<digest>.arrow   columns that came after their rows
    events/000000000044.g1.<counts>.<uid>-<digest>.json     what else happened: versions, timelines, reservations, drops, quarantine
    steps/000000000007.000000000045.g1.<counts>.<uid>-<digest>.json  the groups of step 7; the last record of a step counts
    forgotten/000000000005.000000000046.g1.<counts>.<uid>-<digest>.json  steps below 5 are never asked for again; what they had
    begins/000000000002.json                       from which number on each owner until the second (g2) writes; the last counts

All records are numbered through, and say which owner of the folder wrote them (`raysvc.cache.store.claim`), and how many
came before it (`raysvc.actors.rollouts.group_gaps`).
Always true:
- a record of an earlier owner from a `begins` number on was never acknowledged and does not count: it came out of the network, or from a
  process that slept, after its successor had read the folder;
- a file is complete when it can be seen, and durable when the call that made it returns;
- a file that is not what was written is refused by name. Of an earlier version, whose names have no digest, one that is torn is passed over;
- groups, columns and events are numbered through and found again by listing, in the order in which they came;
  nothing is renamed over;
- what is removed was named before in a record of `forgotten`: a death in between loses no group and doubles none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import pyarrow as pa

from raysvc.actors.rollouts.forgotten_keys import Key
from raysvc.actors.rollouts.group_gaps import Counts, gaps
from raysvc.cache.local.named_digest import named, read_named
from raysvc.cache.local.sealed import opened_if_sealed, sealed
from raysvc.cache.store.claim import Claim, open_owned
from raysvc.cache.store.store import Data
from raysvc.errors import StoreError
from raysvc.rl.table_bytes import file_buffers

log = logging.getLogger(__name__)
Folder = Literal["groups", "columns", "events"]
Event = dict[str, Any]  # one field, whose name says what happened
NUMBERED: tuple[Folder, ...] = ("groups", "columns", "events")
BY_STEP = ("steps", "forgotten")  # names begin with a step there
MOST_FORGOTTEN = 64  # records of what was forgotten, beside those that are full
FULL = 1 << 20  # bytes of such a record
REMEDY = "restore it; or remove it, and the server goes on without what it says"
MOST_BEGINS = 64  # a request that is on its way for longer than so many restarts would be believed


@dataclass(frozen=True)
class ForgottenGroups:
    """Names what is not there any more.

    Attributes:
        kept_from: no step below is asked for again.
        groups: group -> its weight version; trained, evicted or dropped.
        tables: name of each removed put -> its number of rows, which still count.
        trained: groups of the steps below `kept_from` that were trained.
    """

    kept_from: int
    groups: Mapping[Key, int]
    tables: Mapping[str, int]
    trained: int = 0


class Spool:
    """A folder at any fsspec URL; only the owner of the server's folder writes."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, claim: Claim | None = None
    ) -> None:
        self._store, self._claim = open_owned(url, storage_options, claim), claim
        self.url = self._store.url
        self._next: int | None = None  # number of the next record; None: not listed yet
        self._counts = Counts()  # of what is there
        self._is_clean = False  # whether all that was forgotten is removed
        self._full: set[str] = set()  # records of what was forgotten, as far as they were read
        self._begins: dict[int, int] | None = None  # of each owner until now; None: not read yet

    def begin(self) -> None:
        """Say from which number on this owner writes, before it reads; who has no claim only reads."""
        if self._claim is None:
            return
        self._claim.take()
        older, self._begins = self._store.list("begins"), self._read_begins()
        # where `owners` was removed, numbers begin again
        owner = self._claim.rise_above(max(self._begins, default=0))
        number, mine = self._next_number(), f"{owner:012d}.json"
        self._begins = {**_telling(self._begins, number), owner: number}
        self._store.create(
            f"begins/{mine}", sealed({str(owner): first for owner, first in self._begins.items()})
        )
        for name in older:
            if name < mine:
                self._store.delete(f"begins/{name}")

    def names(self) -> list[str]:
        """All puts that are there, in order."""
        return [name for folder, name in self.history() if folder == "groups"]

    def history(self) -> list[tuple[Folder, str]]:
        """(folder, name) of all groups, columns and events that are there, in the order in which they came."""
        found = [(folder, name) for folder in NUMBERED for name in self._listed(folder)]
        return sorted(found, key=lambda each: each[1])

    def put(self, table: pa.Table, folder: Folder = "groups") -> str:
        """Write a table; returns its name. When this returns it is on disk."""
        return self._keep(folder, "", "arrow", file_buffers(table))

    def read(self, name: str, folder: Folder = "groups") -> pa.Table:
        """One table.

        Raises:
            StoreError: it is damaged.
            pyarrow.ArrowInvalid: it is torn, and of an earlier version.
        """
        return pa.ipc.open_file(pa.BufferReader(self._read(f"{folder}/{name}"))).read_all()

    def write_events(self, events: list[Event]) -> str:
        """Keep what happened; returns the name of the record."""
        return self._keep("events", "", "json", json.dumps(events).encode())

    def read_events(self, name: str) -> list[Event]:
        """One record; nothing for a torn one of an earlier version.

        Raises:
            StoreError: it is damaged.
        """
        return [event for events in self._said(f"events/{name}") for event in events]

    def missing(self, forgotten: ForgottenGroups, snapshot: str | None) -> list[str]:
        """What is gone and was not forgotten, a line each; nothing where another process may be writing.

        Args:
            snapshot: the newest record that says all that the events before it said.
        """
        if self._claim is None:
            return []
        return gaps(self._known(forgotten), forgotten.kept_from, snapshot)

    def remove_events(self, names: Iterable[str]) -> None:
        """Remove records that a snapshot replaced."""
        for name in names:
            self._store.delete(f"events/{name}")

    def write_step(self, step: int, groups: list[Key], **facts: Any) -> None:
        """Keep which groups a step has."""
        self._write("steps", step, {"step": step, "groups": groups, **facts})

    def steps(self) -> tuple[dict[int, list[Key]], dict[Key, int]]:
        """step -> its groups, of all steps that are there; and group -> `trained_from` of those of which sequences may be withheld."""
        groups, trained_from = dict[int, list[Key]](), dict[Key, int]()
        for record in self._records("steps"):
            keys = groups[record["step"]] = [key_of(key) for key in record["groups"]]
            said = zip(keys, record.get("trained_from", ()), strict=False)
            trained_from |= {key: version for key, version in said if version is not None}
        return groups, trained_from

    def forgotten(self) -> ForgottenGroups:
        """All that was ever forgotten."""
        kept_from, trained, groups, tables = 0, 0, dict[Key, int](), dict[str, int]()
        for record in self._records("forgotten"):
            kept_from = max(kept_from, record["kept_from"])
            groups |= {(uid, attempt): version for uid, attempt, version in record["groups"]}
            tables |= record["tables"]
            trained = max(trained, record.get("trained", 0))
        return ForgottenGroups(kept_from, groups, tables, trained)

    def forget(self, what: ForgottenGroups) -> None:
        """Keep what goes, on top of what went before. None of it is removed yet; the lines of many records become one."""
        groups = [[*key, version] for key, version in what.groups.items()]
        record = {**vars(what), "groups": groups, "tables": dict(what.tables)}
        self._write("forgotten", what.kept_from, record)
        names = sorted({*self._listed("forgotten")} - self._full, key=_written)
        if len(names) > MOST_FORGOTTEN:
            self._merge(names)

    def _merge(self, names: list[str]) -> None:
        """Make one record of many; one that is full stays as it is, so that what a merge reads does not grow with the run."""
        lines, merged = dict[bytes, None](), list[str]()
        for name in names:  # lines as they are: what all groups say would take much memory
            data = self._read(f"forgotten/{name}")
            if len(data) < FULL:
                lines |= dict.fromkeys(data.splitlines())
                merged.append(name)
            else:
                self._full.add(name)
        if not merged:
            return
        kept_from = max(map(_number, merged))
        # raises where another server owns the folder by now
        self._keep("forgotten", f"{kept_from:012d}.", "json", b"\n".join(lines))
        for name in merged:
            self._store.delete(f"forgotten/{name}")

    def remove_forgotten(self, what: ForgottenGroups) -> int:
        """Remove what was forgotten just now; the first call all that ever was, for an earlier process may not have come to it.

        Returns:
            how many files went.
        """
        if not self._is_clean:
            what = self.forgotten()
        self._is_clean = False  # until all of it went
        gone = [f"{folder}/{name}" for folder, name in self.history() if name in what.tables]
        steps = [name for name in self._listed("steps") if _number(name) < what.kept_from]
        gone += [f"steps/{name}" for name in steps]
        for name in gone:
            self._store.delete(name)
        self._is_clean = True
        return len(gone)

    def _stamp(self) -> str:
        """Number and owner of the next record, and what makes its name its own."""
        if self._next is None:
            self._next = self._next_number()
        self._next += 1
        owner = 0 if self._claim is None else self._claim.take()
        return f"{self._next - 1:012d}.g{owner}.{self._counts}.{uuid.uuid4().hex[:8]}"

    def _next_number(self) -> int:
        """Behind all that ever was there: what removes a record has a higher number, and stays."""
        known = self._known(self.forgotten())
        self._next = max((_written(path.partition("/")[2])[0] + 1 for path in known), default=0)
        self._counts = reduce(Counts.after, known, Counts())
        return self._next

    def _known(self, forgotten: ForgottenGroups) -> list[str]:
        """Folder and name of all that is there, and of the tables that were forgotten."""
        there = [f"{folder}/{name}" for folder in (*NUMBERED, *BY_STEP) for name in self._listed(folder)]
        return [*there, *(f"groups/{name}" for name in forgotten.tables)]

    def _listed(self, folder: str) -> list[str]:
        """Names of the records of a folder that count."""
        if self._begins is None:
            self._begins = self._read_begins()
        names = [name for name in self._store.list(folder) if _is_whole(name)]
        return [name for name in names if not _is_void(name, self._begins)]

    def _read_begins(self) -> dict[int, int]:
        """owner -> the first number that it could write, as the last owner that began says."""
        for name in sorted(self._store.list("begins"), reverse=True):
            with contextlib.suppress(FileNotFoundError):
                return self._begins_in(f"begins/{name}")
        return {}

    def _begins_in(self, path: str) -> dict[int, int]:
        data = self._store.read(path)
        try:
            return {int(owner): first for owner, first in opened_if_sealed(data).items()}
        except ValueError as error:
            raise StoreError(f"{self._store.url}/{path}", str(error), REMEDY) from None

    def _write(self, folder: str, number: int, record: Mapping[str, Any]) -> None:
        self._keep(folder, f"{number:012d}.", "json", json.dumps(record).encode())

    def _keep(self, folder: str, prefix: str, ending: str, data: Data) -> str:
        name = named(f"{prefix}{self._stamp()}", ending, data)
        self._store.write(f"{folder}/{name}", data)
        if folder != "forgotten":  # which another thread writes, and nobody counts
            self._counts = self._counts.after(f"{folder}/{name}")
        return name

    def _read(self, path: str) -> bytes:
        return read_named(self._store, path, REMEDY)

    def _said(self, path: str) -> Iterator[Any]:
        """Yields what the lines of a record say; nothing for one that is torn, or gone."""
        with contextlib.suppress(FileNotFoundError):
            for line in self._read(path).splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    log.warning("passed over a torn file: %s", path)

    def _records(self, folder: str) -> Iterable[dict[str, Any]]:
        """Yields records of steps, or of what was forgotten, in the order in which they were written."""
        for name in sorted(self._listed(folder), key=_written):
            yield from self._said(f"{folder}/{name}")


def _is_whole(name: str) -> bool:
    """Tells whether a name is one of ours, and not of a file that is still being written."""
    return name.endswith((".arrow", ".json")) and name.split(".")[0].isdigit()


def key_of(pair: list[Any]) -> Key:
    """A group, as JSON has it."""
    return str(pair[0]), int(pair[1])


def _written(name: str) -> tuple[int, int]:
    """Number and owner of a record; owner 0 where a name does not say it."""
    parts = name.split(".")
    for place, part in enumerate(parts[1:], start=1):
        if part.startswith("g") and part[1:].isdigit():
            return int(parts[place - 1]), int(part[1:])
    return int(parts[0]), 0


def _telling(begins: Mapping[int, int], number: int) -> dict[int, int]:
    """Those that say more than one who begins at `number`: the others are said by their successors."""
    kept: dict[int, int] = {}
    for owner in sorted(begins, reverse=True):
        if begins[owner] < min(kept.values(), default=number):
            kept[owner] = begins[owner]
    return dict(list(kept.items())[:MOST_BEGINS])


def _is_void(name: str, begins: Mapping[int, int]) -> bool:
    """Tells whether a record came when its owner had a successor."""
    number, owner = _written(name)
    return any(successor > owner and number >= first for successor, first in begins.items())


def _number(name: str) -> int:
    """Returns the number of a step's file; one beyond all steps for what is none."""
    stem = name.split(".")[0]
    return int(stem) if stem.isdigit() else 1 << 62
