"""Keeps what happened to the groups of a server on disk, in its order; and restores it from there.

Always true:
- records lie on disk in the order in which they were appended: one that is there was built on nothing that is not;
- rows, or columns, that come together are one file, so many small puts cost one write;
- events of one call that follow each other are in one file: a kill leaves all of them, or none;
- events are small; after `SNAPSHOT_EVERY` of them, and at the end of a call, one says all, and the records before it go;
- reading an event twice, or one that a snapshot already has, changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raysvc.actors.rollouts.group_commit import GroupCommit
from raysvc.actors.rollouts.group_log import Event, Spool, key_of
from raysvc.actors.rollouts.group_pool import Key, Pool, ReadyGroup, Timeline
from raysvc.actors.rollouts.group_rows import Chunk, ChunkPiece, GroupRows
from raysvc.actors.rollouts.held_tables import HeldTables
from raysvc.actors.rollouts.late_columns import add_late, late_names
from raysvc.actors.rollouts.prompts.prompt_book import PromptAttempt, PromptBook
from raysvc.rl.group import FIXED
from raysvc.rl.schema import Schema, spans_of, with_growth

log = logging.getLogger(__name__)
SNAPSHOT_EVERY = 1000


@dataclass(frozen=True)
class StepRecord:
    """Lists the groups of a step."""

    step: int
    groups: list[Key]
    facts: dict[str, Any]


@dataclass
class RestoredGroups:
    """Holds what the disk says, beside the pool and the schema.

    Attributes:
        groups: rows of each group.
        num_rows: sequences that were ever put.
        dropped: groups that a filter threw away.
        gone: groups in no step that will never be in one.
        closed: groups that were closed by a call of its own.
        events: names of the records of events.
        book: of the prompts that were handed out.
        held: groups in no step that the last snapshot knew.
        published: version of the weights for producers, and where they are.
    """

    groups: dict[Key, GroupRows] = field(default_factory=dict)
    num_rows: int = 0
    dropped: set[Key] = field(default_factory=set)
    gone: set[Key] = field(default_factory=set)
    closed: set[Key] = field(default_factory=set)
    events: list[str] = field(default_factory=list)
    book: PromptBook = field(default_factory=lambda: PromptBook(1))
    published: tuple[int, list[Any]] | None = None
    held: set[Key] = field(default_factory=set)


class History:
    """Appends to the log of a store.

    Args:
        spool: where it lies.
        tables: are told what is on disk.
        events: names of the records that are there.
        snapshot: all that events said, as one event; it shares nothing with what goes on.
    """

    def __init__(
        self, spool: Spool, tables: HeldTables, events: list[str], snapshot: Callable[[], Event]
    ) -> None:
        self._spool, self._tables, self._snapshot = spool, tables, snapshot
        self._events = events
        self._since_snapshot = len(events)
        self._commit: GroupCommit[Chunk | StepRecord | Event] = GroupCommit(self._write)

    @property
    def last(self) -> int:
        """The newest ticket."""
        return self._commit.last

    def append(self, item: Chunk | StepRecord | Event) -> int:
        """Add a record to those of the call; returns its ticket. Call it under the lock that orders what happens."""
        self._since_snapshot += isinstance(item, dict)
        return self._commit.append(item)

    def seal(self) -> None:
        """End a call, under the same lock: its records may be written from now on."""
        if self._since_snapshot >= SNAPSHOT_EVERY:
            self.snapshot()
        self._commit.seal()

    def snapshot(self) -> int:
        """Say all that events said in one record; returns its ticket. Call it when the call has appended the rest."""
        self._since_snapshot = 0
        return self._commit.append(self._snapshot())

    def wait(self, ticket: int) -> None:
        """Return when everything up to `ticket` is on disk."""
        self._commit.wait(ticket)

    def _write(self, items: list[Chunk | StepRecord | Event]) -> None:
        """Runs of one kind become one file each; what is written leaves the list."""
        for run in [list(run) for _, run in groupby(items, _kind)]:
            first = run[0]
            if isinstance(first, Chunk):
                self._write_chunks([item for item in run if isinstance(item, Chunk)])
            elif isinstance(first, StepRecord):
                for record in run:
                    assert isinstance(record, StepRecord)
                    self._spool.write_step(record.step, record.groups, **record.facts)
            else:
                self._write_events([item for item in run if isinstance(item, dict)])
            del items[: len(run)]

    def _write_chunks(self, chunks: list[Chunk]) -> None:
        tables = [chunk.table for chunk in chunks]
        whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        name = self._spool.put(whole, chunks[0].folder)
        self._tables.written(chunks, name)

    def _write_events(self, events: list[Event]) -> None:
        older, name = self._events, self._spool.write_events(events)
        if "snapshot" in events[-1]:
            self._events = [name]
            self._spool.remove_events(older)
        else:
            self._events = [*older, name]


def restore(spool: Spool, pool: Pool, schema: Schema, tables: HeldTables, book: PromptBook) -> RestoredGroups:
    """Read everything back, into an empty pool and an empty schema."""
    spool.begin()
    forgotten = spool.forgotten()
    found = RestoredGroups(book=book)
    snapshot: str | None = None
    names = {name: folder for folder, name in spool.history()}
    for name in sorted({*names, *forgotten.tables}):
        if name in forgotten.tables:
            found.num_rows += forgotten.tables[name]
        elif names[name] == "events":
            found.events.append(name)
            for event in spool.read_events(name):
                apply_event(event, pool, schema, found)
                snapshot = name if "snapshot" in event else snapshot
        else:
            chunk = _read_table(spool, names[name], name, pool, schema, found)
            if chunk is not None:
                tables.hold(chunk)
                tables.written([chunk], name)
    for gap in spool.missing(forgotten, snapshot):
        log.warning(
            "GONE FROM %s: %s; restore it, or the server goes on without what it said", spool.url, gap
        )
    pool.forgotten.add(forgotten.groups)
    pool.trained_before = forgotten.trained
    opened = {key for key, rows in found.groups.items() if not rows.closed}
    pool.owners = {key: owner for key, owner in pool.owners.items() if key in opened}
    steps, trained_from = spool.steps()
    pool.load(steps, forgotten.kept_from, found.gone, trained_from)
    # also groups whose rows are lost came: they are under way no more
    for uid, attempt in pool.step_of:
        if (uid in book.out or uid in book.back) and book.attempts.get(uid, 0) == attempt:
            book.put(uid)
            pool.release([uid])
    for uid, attempt in sorted(key for key in found.held if not pool.is_known(key)):
        log.warning("rows are gone group=%s#%d", uid, attempt)
        is_out = uid in book.out or uid in book.back or uid in book.lost
        if book.stream and not is_out and book.attempts.get(uid, 0) == attempt:
            book.give_back([uid], "its rows are gone")
    return found


def apply_event(event: Event, pool: Pool, schema: Schema, found: RestoredGroups) -> None:
    """One thing that happened."""
    ((kind, value),) = event.items()
    if kind == "told":
        _tell(pool, *value)
    elif kind == "timeline":
        _begin(pool, Timeline(*value))
    elif kind == "reserved":
        pool.reserved.update(dict.fromkeys(value[1], value[0]))
    elif kind == "released":
        pool.release(value)
    elif kind == "opened":
        pool.owners.update({key_of(key): value[0] for key in value[1]})
    elif kind == "closed":
        for key in map(key_of, value):
            _close(key, pool, schema, found)
    elif kind == "evicted":
        pool.evicted += len(value)
        found.gone.update(map(key_of, value))
    elif kind == "dropped":
        found.dropped.update(map(key_of, value))
        found.gone.update(map(key_of, value))
    elif kind == "handed_out":
        owner, ask, prompts, following = value
        handed = [PromptAttempt(*each) for each in prompts]
        found.book.hand_out(owner, ask, handed, following)
        pool.reserved.update({each.uid: owner for each in handed})
        pool.granted.update({each.uid: each.version for each in handed})
    elif kind == "stream":
        found.book.stream = value
    elif kind == "given_back":
        found.book.give_back(*value)
    elif kind == "lost":
        found.book.lose(*value)
    elif kind == "published":
        found.published = value and tuple(value)
    elif kind == "quarantined":
        pool.quarantined.update({(uid, attempt): reason for uid, attempt, reason in value})
        found.gone.update((uid, attempt) for uid, attempt, _ in value)
    else:
        assert kind == "snapshot", f"a record of a newer version: {kind}"
        _apply_snapshot(value, pool, schema, found)


def _close(key: Key, pool: Pool, schema: Schema, found: RestoredGroups) -> None:
    found.closed.add(key)
    if key in found.groups:
        found.groups[key].closed = True
        _complete(key, pool, schema, found)


def _tell(pool: Pool, step: int, version: int) -> None:
    if version > pool.version:
        pool.told.append((step, version))
    pool.newest, pool.reached = max(pool.newest, version), max(pool.reached, step)


def _begin(pool: Pool, timeline: Timeline) -> None:
    if timeline.number > pool.timeline:
        pool.timelines.append(timeline)
        pool.cut(timeline.begin)


def _apply_snapshot(value: dict[str, Any], pool: Pool, schema: Schema, found: RestoredGroups) -> None:
    pool.told = [(step, version) for step, version in value["told"]]
    pool.newest, pool.reached = value["newest"], value["reached"]
    pool.timelines = [Timeline(*each) for each in value["timelines"]]
    pool.evicted = value["evicted"]
    pool.reserved = dict(value["reserved"])
    pool.owners = {(uid, attempt): owner for uid, attempt, owner in value["owners"]}
    found.published = value["published"] and tuple(value["published"])
    found.book.load(value["prompts"])
    pool.granted = {each.uid: each.version for each in found.book.out.values()}
    pool.quarantined = {(uid, attempt): reason for uid, attempt, reason in value["quarantined"]}
    found.gone, found.dropped = set(map(key_of, value["gone"])), set(map(key_of, value["dropped"]))
    for key in map(key_of, value["closed"]):
        _close(key, pool, schema, found)
    found.held = {key_of(key) for name in ("ready", "waiting") for key in value.get(name, ())}
    place = {key: number for number, key in enumerate(map(key_of, value.get("ready", ())))}
    pool.ready.sort(
        key=lambda group: place.get(group.key, -1)
    )  # those that are not there are in a step, or gone


def _read_table(
    spool: Spool, folder: Any, name: str, pool: Pool, schema: Schema, found: RestoredGroups
) -> Chunk | None:
    try:
        table = spool.read(name, folder)
    except pa.ArrowInvalid:
        log.warning("skipped a torn file: %s/%s", folder, name)
        return None
    chunk = Chunk(folder, table.num_rows, table, name)
    if folder == "columns":
        schema.late_types.update({name: table.column(name).type for name in late_names(table)})
        for key in add_late(found.groups, chunk, table):
            _complete(key, pool, schema, found)
        return chunk
    chunk.table = table = with_growth(table)
    schema.types = {each.name: each.type for each in table.schema if each.name not in FIXED}
    lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
    for span in spans_of(table, by_newest=pool.withholds):
        group = found.groups.setdefault(span.key, GroupRows())
        chunk.num_groups += span.start < span.stop
        row_id = found.num_rows + span.start
        group.pieces.append(
            ChunkPiece(chunk, span.start, span.stop, span.first, row_id, lengths[span.start : span.stop])
        )
        group.closed = span.closed
        pool.grow(span.key, span.version)
        pool.put(ReadyGroup(span.key, span.version), complete=False)
        found.book.put(span.key[0])
        _complete(span.key, pool, schema, found)
    found.num_rows += table.num_rows
    return chunk


def _complete(key: Key, pool: Pool, schema: Schema, found: RestoredGroups) -> None:
    """A group that has all it needs gets ready, at the place in the history where it got the last of it."""
    if key in pool.waiting and found.groups[key].is_complete(tuple(schema.late)):
        pool.complete(key)


def _kind(item: Chunk | StepRecord | Event) -> str:
    if isinstance(item, Chunk):
        names = item.table.schema.names if item.table is not None else []
        return f"{item.folder} {names}"
    return "snapshot" if isinstance(item, dict) and "snapshot" in item else type(item).__name__
