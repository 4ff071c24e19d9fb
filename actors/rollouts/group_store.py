"""All groups of a rollout server: decided in memory under a lock, written in order outside of it.

1. A call is checked, and applied to the pool and to the rows, under `changed`.
2. What it did is appended to the log while the lock is still held, so the log has the order of the pool; the records of a call are
   sealed together when the lock is let go (`_call`), and snapshots are taken between calls.
3. The lock is let go; the call returns once its record is on disk, together with those of others.
Always true:
- what a call acknowledged is on disk, and so is everything it was built on;
- no write happens under `changed`: nobody who only asks waits for a store;
- after a restart the log gives the same pool: same groups, steps, versions, timelines, reservations;
- a put that breaks a rule is refused whole, to the one who put it;
- row ids count sequences in the order in which they were put, and never change.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.actors.rollouts.group_fate import state_of, under_way, verdict
from raysvc.actors.rollouts.group_history import History, RestoredGroups, StepRecord, restore
from raysvc.actors.rollouts.group_log import Event, ForgottenGroups, Spool
from raysvc.actors.rollouts.group_pool import Key, Pool, ReadyGroup, Timeline
from raysvc.actors.rollouts.group_rows import Chunk, ChunkPiece, GroupRows, is_constant, refuse_without
from raysvc.actors.rollouts.held_tables import HeldTables
from raysvc.actors.rollouts.late_columns import add_late, fresh_lines, lines_of, refuse_lines
from raysvc.actors.rollouts.prompts.prompt_book import PromptAttempt
from raysvc.actors.rollouts.prompts.prompt_desk import PromptDesk, PromptRules
from raysvc.actors.rollouts.put_rules import is_full, refuse, unknown_part
from raysvc.rl.prompt_state import AwaitedPrompt, PromptState
from raysvc.rl.schema import GroupSpan, Schema, spans_of

REFUSED = ("stale", "superseded")  # verdicts of what is not kept


class PutResult(NamedTuple):
    """Tells what became of a put: how many groups are new, how many were there before, and what each producer is told."""

    new: int
    known: int
    verdicts: dict[str, str]


class GroupStore:
    """See the module.

    Args:
        pool: empty.
        schema: of all puts.
        spool: where groups, steps and events lie.
        producer_ttl_s: how long reservations and open groups hold without a sign of life of their producer.
        now_s: a clock that never goes back.
        prompts: what is handed out, and by which rules; None: producers bring prompts of their own.
        drop_constant: a per-row column: groups whose trajectories all have one value of it are dropped when they are complete.
        short_tail: whether the last step of a stream of prompts may have fewer groups than the others.
    """

    def __init__(
        self,
        pool: Pool,
        schema: Schema,
        spool: Spool,
        producer_ttl_s: float = 60.0,
        now_s: Callable[[], float] = time.monotonic,
        prompts: PromptRules | None = None,
        drop_constant: str | None = None,
        short_tail: bool = True,
    ) -> None:
        self.pool, self.schema = pool, schema
        self._drop_constant, self._short_tail = drop_constant, short_tail
        self.desk = PromptDesk(prompts, pool, self._event)
        self._spool, self._ttl_s, self._now_s = spool, producer_ttl_s, now_s
        self.changed = threading.Condition()  # guards what follows, and the pool; notified when groups come
        self.rounds = 0  # how often it was notified
        self._tables = HeldTables(spool, self.changed)
        restored: RestoredGroups = restore(spool, pool, schema, self._tables, self.desk.book)
        self._groups: dict[Key, GroupRows] = restored.groups
        self.num_rows = restored.num_rows
        self.dropped: set[Key] = restored.dropped
        self._gone: set[Key] = restored.gone  # in no step, and never will be
        self._closed: set[Key] = restored.closed  # closed by a call of its own, not by their last rows
        self.published = restored.published
        self._trained_below = 0  # of the steps from here on, tables are in memory
        self._step_tickets: dict[int, int] = {}  # of steps whose record may not be on disk yet
        self._history = History(spool, self._tables, restored.events, self._snapshot)
        self._forgetting = threading.Lock()  # one thread at a time forgets
        self._through(self._gone)
        self._filter([group.key for group in pool.ready])  # a kill may have come before they were dropped
        self.pool.leases = dict.fromkeys(self._producers(), now_s() + producer_ttl_s)
        self.pool.since = dict.fromkeys((*pool.reserved, *(uid for uid, _ in pool.waiting)), now_s())

    # -- producers

    def put(self, table: pa.Table, owner: str = "", *, gate: int | None = None) -> PutResult | None:
        """Keep what is new of a table and not too old to be trained; None: there is no room for it now.

        Args:
            owner: the producer, which open groups belong to.
            gate: the frontier; without capacity nothing new is taken that was not reserved. None: take it.

        Raises:
            SourceError: it breaks a rule of the schema; then nothing of it is kept.
        """
        admitted = self.schema.admit(table)
        table, late = admitted
        if (name := self._drop_constant) is not None and name not in self.schema.late:
            refuse_without(table, name)
        spans = spans_of(table, by_newest=self.pool.withholds)
        with self._call():
            self._expire()
            verdicts = {span.key: self._verdict(span, gate or 0) for span in spans}
            asked = list(verdicts)
            refused = [span for span in spans if verdicts[span.key] in REFUSED]
            spans = [span for span in spans if verdicts[span.key] not in REFUSED]
            stale = [span.key for span in refused if verdicts[span.key] == "stale"]
            if gate is not None and is_full(self.pool, spans, gate):
                return None
            refuse(self.pool, self._groups, spans)
            versions = table.column("weight_version").to_numpy()
            parts = (unknown_part(self.pool, self._groups, span, versions) for span in spans)
            kept = [span for span in parts if span is not None]
            if late is not None:
                coming = {
                    span.key: range(span.first, span.first + span.stop - span.start)
                    for span in (*kept, *refused)
                }
                refuse_lines(self._groups, self.pool.is_known, late, coming)
            if spans:
                self.schema.fix(admitted)
            self.pool.stale += len(stale)
            new = sum(not self.pool.is_known(span.key) for span in kept)
            if kept:
                self._keep(table, kept, owner)
            if late is not None and (fresh := fresh_lines(self._groups, late)):
                self._keep_late(late.take(pa.array(fresh)))
            self._filter({span.key for span in kept})
            self.desk.too_old(stale)
            if done := [uid for uid, attempt in asked if self._is_done(uid, attempt)]:
                self.pool.release(done)
                self._event({"released": done})
            ticket = self._notify()
        self._history.wait(ticket)
        told = {uid: said for (uid, _), said in verdicts.items()}
        return PutResult(new, len(spans) - new, told)

    def add_columns(self, table: pa.Table) -> int:
        """Late columns: `uid`, `attempt`, `row` and the columns; returns how many rows got something new.

        Raises:
            SourceError: a group or row that is not there, a column that is not declared late, or of another type.
        """
        table = self.schema.admit_late(table)
        with self._call():
            refuse_lines(self._groups, self.pool.is_known, table, coming={})
            self.schema.fix_late(table)
            fresh = fresh_lines(self._groups, table)
            if fresh:
                self._keep_late(table.take(pa.array(fresh)))
                self._filter({(uid, attempt) for uid, attempt, _ in lines_of(table)})
            ticket = self._notify()
        self._history.wait(ticket)
        return len(fresh)

    def reserve(self, uids: list[str], frontier: int, owner: str, attempt: int = 0) -> dict[str, str]:
        """A verdict of each uid, as `Pool.reserve`; of one that was put and is lost, how it was lost."""
        with self._call():
            self._expire()
            now_s = self._now_s()
            verdicts = self.pool.reserve(uids, frontier, owner, self._until_s(), attempt=attempt, now_s=now_s)
            for uid in [uid for uid, said in verdicts.items() if said == "known"]:
                verdicts[uid] = verdict(self._state((uid, attempt), frontier))
            granted = [uid for uid, said in verdicts.items() if said == "granted"]
            ticket = self._event({"reserved": [owner, granted]}) if granted else self._history.last
        self._history.wait(ticket)
        return verdicts

    def begin_prompts(self) -> None:
        """Know from now on which prompts are handed out.

        Raises:
            ConfigError: as `PromptDesk.begin`.
        """
        with self._call():
            self.desk.begin()
            ticket = self._history.last
        self._history.wait(ticket)

    def hand_out(
        self, owner: str, ask: str, count: int, frontier: int, is_first: bool = False
    ) -> list[PromptAttempt]:
        """Up to `count` prompts for a producer; [] while there is no capacity, or nothing left.

        Args:
            ask: names the question; the same one again gets the same answer.
            is_first: the producer has just started: it gets what its name holds already, if it holds something.
        """
        with self._call():
            self._expire()
            self.pool.renew(owner, self._until_s())
            found = self.desk.hand_out(owner, ask, count, frontier, is_first, self._until_s(), self._now_s())
            ticket = self._history.last
        self._history.wait(ticket)
        return found

    def status(self, uids: Iterable[str], frontier: int, attempt: int = 0) -> dict[str, PromptState]:
        """Say where each of these prompts stands."""
        with self._call():
            self._expire()
            return {uid: self._state((uid, attempt), frontier) for uid in uids}

    def under_way(self) -> tuple[AwaitedPrompt, ...]:
        """Returns what a step that cannot be formed may be waiting for, the oldest first."""
        with self.changed:
            return under_way(self.pool, self._now_s())

    def release(self, uids: Iterable[str]) -> None:
        """A producer gave up on these prompts."""
        gone = list(uids)
        with self._call():
            self.pool.release(gone)
            self._event({"released": gone})
            self.desk.give_back([uid for uid in gone if uid in self.desk.book.out], "released")
            ticket = self._notify()
        self._history.wait(ticket)

    def renew(self, owner: str) -> None:
        """A sign of life of a producer."""
        with self._call():
            self._expire()
            self.pool.renew(owner, self._until_s())

    def close(self, keys: Iterable[Key]) -> int:
        """No rows of these groups will follow; returns how many were open."""
        with self._call():
            known = [key for key in keys if key in self._groups and not self._groups[key].closed]
            self._closed.update(known)
            for key in known:
                self._groups[key].closed = True
                self.pool.close(key)
                if self._groups[key].is_complete(tuple(self.schema.late)):
                    self.pool.complete(key)
            if known:
                self._event({"closed": known})
            self._filter(known)
            ticket = self._notify()
        self._history.wait(ticket)
        return len(known)

    def drop(self, uids: Iterable[str]) -> int:
        """A filter does not want these prompts: their groups that are in no step go; returns how many went."""
        with self._call():
            gone = self.pool.drop(uids)
            if gone:
                self._drop(gone)
            self.desk.lose([uid for uid, _ in gone], "dropped")
            ticket = self._notify()
        self._history.wait(ticket)
        return len(gone)

    # -- the trainer

    def form(self, step: int, frontier: int) -> bool:
        """Plan a step when enough groups are there; whether it is planned. Which groups it has is on disk then."""
        with self._call():
            self._expire()
            before = self.pool.steps.get(step)
            keys = self.pool.form(step, frontier, no_more_come=self._has_ended, short_tail=self._short_tail)
            self._tell_evicted()
            if keys is None:
                return False
            if keys is not before:
                facts: dict[str, Any] = {
                    "trained_by": self.pool.trained_by(step),
                    "timeline": self.pool.timeline,
                }
                if self.pool.withholds:
                    facts["trained_from"] = [self.pool.trained_from.get(key) for key in keys]
                record = StepRecord(step, list(keys), facts)
                self._step_tickets[step] = self._history.append(record)
                self._notify()
            ticket = self._step_tickets.get(step)
        if ticket is not None:
            self._history.wait(ticket)
            with self._call():
                self._step_tickets.pop(step, None)
        return True

    def set_version(self, version: int, frontier: int) -> None:
        """The weights that train from `frontier` on.

        Raises:
            ValueError: as `Pool.set_version`.
        """
        with self._call():
            before = self.pool.told[-1]
            self.pool.set_version(version, frontier)
            if self.pool.told[-1] != before:
                self._event({"told": list(self.pool.told[-1])})
            self._tell_evicted()
            ticket = self._history.last
        self._history.wait(ticket)

    def publish(self, version: int, where: list[Any]) -> None:
        """Know where producers find weights: folder and name of a file, which a restart knows too, or a reference, which it does not."""
        with self._call():
            self.published = version, where
            ticket = self._event({"published": self._published_on_disk()})
        self._history.wait(ticket)

    def rewind(self, step: int, frontier: int) -> Timeline | None:
        """Go to `step`; the new timeline when that is back."""
        with self._call():
            timeline = self.pool.rewind(step, frontier)
            if timeline is not None:
                self._event({"timeline": list(timeline)})
            self._notify()
            ticket = self._history.last
        self._history.wait(ticket)
        return timeline

    def quarantine(self, bad: Mapping[Key, str]) -> None:
        """These groups cannot be trained."""
        with self._call():
            self.pool.quarantine(bad)
            self._set_gone(bad)
            self._event({"quarantined": [[*key, reason] for key, reason in bad.items()]})
            self.desk.lose([uid for uid, _ in bad], "quarantined")
            ticket = self._notify()
        self._history.wait(ticket)

    def rows_of(self, key: Key) -> pa.Table:
        """All rows of a group that is complete.

        Raises:
            KeyError: they are gone, or late columns of them are.
            StoreError: the file is damaged.
        """
        with self.changed:
            group = self._groups[key]
            if not group.is_complete(tuple(self.schema.late)):
                raise KeyError(key)
        return group.table(self._tables.read)

    def group(self, key: Key) -> GroupRows:
        """Returns what is known of a group; KeyError when its rows are gone."""
        with self.changed:
            return self._groups[key]

    # -- memory and disk

    def free(self) -> bool:
        """Let go of tables in memory; they are read again when a step needs them."""
        with self.changed:
            return self._tables.let_go() > 0

    def let_go_below(self, frontier: int) -> None:
        """Tables of which all groups are trained leave memory."""
        with self.changed:
            for step in range(max(self._trained_below, self.pool.kept_from), frontier):
                self._through(self.pool.steps.get(step, ()))
            self._trained_below = frontier

    def delete_before(self, step: int) -> int:
        """Give up the steps below `step` for good; returns how many files went."""
        self._history.wait(self._history.last)
        with self._forgetting:
            with self._call():
                is_new = step > self.pool.kept_from
                files = self._files_through(step)
                gone = {*self.pool.groups_below(step)}
                gone |= {key for key, rows in self._groups.items() if _in(rows, files)}
                gone = {key for key in gone if key not in self.pool.forgotten}
                versions = {key: self.pool.versions[key] for key in sorted(gone)}
                # what is said of the groups that go is not read from their files any more
                ticket = self._history.snapshot() if is_new else self._history.last
            self._history.wait(ticket)
            what = ForgottenGroups(0, {}, {})
            if is_new:
                what = ForgottenGroups(step, versions, files, self.pool.trained_below(step))
                self._spool.forget(what)  # nothing is forgotten before it is on disk
                with self.changed:
                    self.pool.delete_before(step, gone)
                    self._forget(gone, files)
            return self._spool.remove_forgotten(what)

    @property
    def holds_tables(self) -> bool:
        """Tells whether tables are in memory."""
        return bool(self._tables)

    def wait(self, rounds: int, timeout_s: float) -> None:
        """Return when something changed since `rounds`, or after a while."""
        with self.changed:
            self.changed.wait_for(lambda: self.rounds != rounds, timeout_s)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Hold the lock for a call; its records go into the log together when it ends, whatever ends it."""
        with self.changed:
            try:
                yield
            finally:
                self._history.seal()

    def _has_ended(self) -> bool:
        """Tells whether no group will ever come. What is too old may be handed out again."""
        self._tell_evicted()
        return self.desk.is_ended and not (self.pool.reserved or self.pool.waiting)

    def _state(self, key: Key, frontier: int) -> PromptState:
        return state_of(
            self.pool,
            key,
            frontier,
            self._now_s(),
            gone=self._gone,
            dropped=self.dropped,
        )

    def _verdict(self, span: GroupSpan, frontier: int) -> str:
        if self.pool.is_known(span.key):
            return verdict(self._state(span.key, frontier))
        if self.desk.refuses(span.key):
            return "superseded"
        may_get_newer = self.pool.withholds and not span.closed
        return "stale" if self.pool.is_stale(span.version, frontier) and not may_get_newer else "new"

    def _keep(self, table: pa.Table, spans: list[GroupSpan], owner: str) -> int:
        whole = sum(span.stop - span.start for span in spans) == table.num_rows
        if not whole:
            rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            table = table.take(pa.array(rows))
        lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
        chunk = Chunk("groups", table.num_rows, table)
        begin = 0
        for span in spans:
            stop = begin + span.stop - span.start
            piece = ChunkPiece(chunk, begin, stop, span.first, self.num_rows + begin, lengths[begin:stop])
            self._grow(span, piece, owner)
            begin = stop
        self.num_rows += table.num_rows
        opened = [span.key for span in spans if not span.closed]
        closed = [span.key for span in spans if span.closed and span.start == span.stop]
        self._closed.update(closed)
        if opened:
            self.pool.renew(owner, self._until_s())
            self._event({"opened": [owner, opened]})
        if table.num_rows:
            self._tables.hold(chunk)
            self._history.append(chunk)
        return self._event({"closed": closed}) if closed else self._history.last

    def _grow(self, span: GroupSpan, piece: ChunkPiece, owner: str) -> None:
        group = self._groups.setdefault(span.key, GroupRows())
        if piece.num_rows:
            group.pieces.append(piece)
            piece.chunk.num_groups += 1
        group.closed = span.closed
        complete = group.is_complete(tuple(self.schema.late))
        ready = ReadyGroup(span.key, span.version)
        self.pool.since.setdefault(span.key[0], self._now_s())
        self.desk.book.put(span.key[0])
        if not self.pool.put(ready, complete=complete, owner=None if span.closed else owner):
            if piece.num_rows:
                self.pool.grow(span.key, span.version)
            if span.closed:
                self.pool.close(span.key)
            if complete:
                self.pool.complete(span.key)

    def _keep_late(self, table: pa.Table) -> int:
        chunk = Chunk("columns", table.num_rows, table.combine_chunks())
        for key in add_late(self._groups, chunk, chunk.table):
            if self._groups[key].is_complete(tuple(self.schema.late)):
                self.pool.complete(key)
        self._tables.hold(chunk)
        return self._history.append(chunk)

    def _expire(self) -> None:
        """Take back what dead producers hold. Called under `changed`."""
        living = set(self.pool.leases)
        self._take_back(*self.pool.expire(self._now_s()), "its producer died")
        for owner in living.difference(self.pool.leases):
            self.desk.book.forget_producer(owner)
        if (limit_s := self.desk.max_prompt_s) is not None:
            self._take_back(*self.pool.overdue(self._now_s() - limit_s), "took too long")

    def _take_back(self, uids: list[str], keys: list[Key], reason: str) -> None:
        """Reservations and open groups that nobody will finish. Called under `changed`."""
        if uids:
            self._event({"released": uids})
        if keys:
            self._drop(keys)
        self.desk.give_back([*uids, *(uid for uid, _ in keys)], reason)

    def _drop(self, keys: list[Key]) -> int:
        self.dropped.update(keys)
        self._set_gone(keys)
        return self._event({"dropped": keys})

    def _tell_evicted(self) -> None:
        if gone := self.pool.take_evicted():
            self._set_gone(gone)
            self._event({"evicted": gone})
            self.desk.too_old(gone)

    def _set_gone(self, keys: Iterable[Key]) -> None:
        self._gone.update(keys)
        self._through(keys)

    def _through(self, keys: Iterable[Key]) -> None:
        self._tables.through(self._groups[key] for key in keys if key in self._groups)

    def _event(self, event: Event) -> int:
        return self._history.append(event)

    def _filter(self, keys: Iterable[Key]) -> None:
        """Drop those of these groups that are ready and say the same of all trajectories. Called under `changed`."""
        if (name := self._drop_constant) is not None:
            ready = {group.key for group in self.pool.ready}
            bad = [
                key
                for key in keys
                if key in ready and is_constant(self._groups[key].table(self._tables.read), name)
            ]
            if bad:
                self.pool.drop_keys(bad)
                self._drop(bad)
                self.desk.lose([uid for uid, _ in bad], f"all have one {name!r}")

    def _is_done(self, uid: str, attempt: int) -> bool:
        """Tells whether a reservation ends with a put of this attempt, though it kept nothing; that of a later attempt goes on."""
        handed = self.desk.book.out.get(uid)
        return uid in self.pool.reserved and (handed is None or handed.attempt == attempt)

    def _notify(self) -> int:
        """Tell who waits; returns the newest ticket of the log."""
        self.rounds += 1
        self.changed.notify_all()
        return self._history.last

    def _until_s(self) -> float:
        return self._now_s() + self._ttl_s

    def _producers(self) -> set[str]:
        return {*self.pool.reserved.values(), *self.pool.owners.values()}

    def _needed(self, steps: Iterable[int]) -> set[Chunk]:
        keys = [key for step in steps for key in self.pool.steps[step]]
        keys += [group.key for group in self.pool.ready]
        keys += self.pool.waiting
        rows = (self._groups.get(key) for key in keys)
        return {chunk for group in rows if group is not None for chunk in group.chunks}

    def _files_through(self, kept_from: int) -> dict[str, int]:
        """Files of which no group is needed from this step on: name -> rows that count."""
        needed = {chunk.name for chunk in self._needed(step for step in self.pool.steps if step >= kept_from)}
        rows: dict[str, int] = {}
        for chunk in {chunk for group in self._groups.values() for chunk in group.chunks}:
            if chunk.name is not None and chunk.name not in needed:
                own = chunk.num_rows if chunk.folder == "groups" else 0
                rows[chunk.name] = rows.get(chunk.name, 0) + own
        return rows

    def _forget(self, gone: set[Key], files: Mapping[str, int]) -> None:
        self.dropped -= gone
        self._gone -= gone
        self._closed -= gone
        removed = [rows for rows in self._groups.values() if _in(rows, files)]
        self._tables.let_go(chunk for rows in removed for chunk in rows.chunks)
        self._groups = {key: rows for key, rows in self._groups.items() if not _in(rows, files)}

    def _published_on_disk(self) -> tuple[int, list[Any]] | None:
        return self.published if self.published and isinstance(self.published[1][0], str) else None

    def _snapshot(self) -> Event:
        """All that events said, as one event; copied, for it is written while other calls go on."""
        pool = self.pool
        said = {
            "snapshot": {
                "told": pool.told, "newest": pool.newest, "timelines": pool.timelines, "reached": pool.reached,
                "evicted": pool.evicted, "gone": sorted(self._gone), "dropped": sorted(self.dropped),
                "closed": sorted(self._closed), "ready": [group.key for group in pool.ready],
                "waiting": list(pool.waiting),
                "quarantined": [[*key, reason] for key, reason in pool.quarantined.items()],
                "reserved": pool.reserved, "owners": [[*key, owner] for key, owner in pool.owners.items()],
                "published": self._published_on_disk(),
                "prompts": self.desk.book.to_json(),
            }
        }  # fmt: skip
        return copy.deepcopy(said)


def _in(rows: GroupRows, files: Mapping[str, int]) -> bool:
    return all(chunk.name in files for chunk in rows.chunks)
