"""The leases of a server: one lock around them, and a journal below.

Always true:
- a change is seen by every call after it; it is durable when `flush` returns, and within a second by itself;
- the lock is held for microseconds: nothing is written and nothing collated under it;
- once the journal's folder belongs to another server, every call says so;
- time is the monotonic clock of this process: a jump of the wall clock moves no lease, and a while in which this process
  slept is no silence of a holder, whose heartbeats wait for it to wake;
- a restart of the process is the same incarnation of the actor, and its holders keep their leases. Another actor of
  the same name keeps fences and frontiers only, and with other rows the fences only.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from raysvc.actors.mesh import Mesh
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.leases import Leases
from raysvc.actors.server.reader_lease import Peers, ReaderLease
from raysvc.errors import FencedError, FolderLost
from raysvc.metrics import record

log = logging.getLogger(__name__)
FLUSH_WITHIN_S = 1.0
SLEPT_S = 3.0  # a server looks at its leases every second; after a longer time this process was stopped


class LeaseStore:
    """See the module.

    Args:
        empty: leases of a server that nobody attached to yet.
        ttl_s: a lease ends when nothing is heard of its holder for this long.
        incarnation_id: differs between two actors of one name, and is the same after a restart of one.
        journal: None: kept in memory only.
    """

    def __init__(self, empty: Leases, ttl_s: float, incarnation_id: str, journal: Journal | None) -> None:
        self._ttl_s, self._incarnation_id, self._journal = ttl_s, incarnation_id, journal
        self._lock = threading.Lock()
        self._leases = empty  # guarded by _lock
        self._plan_hash: str | None = None  # guarded by _lock; of the rows that the frontiers belong to
        self._loaded = False  # guarded by _lock; whether the journal was read
        self._awake_s = time.monotonic()  # guarded by _lock; when it was last looked at
        self._changes = 0  # guarded by _lock; counted
        self._durable = 0  # guarded by _lock; of the changes, those in the journal
        self._flush_is_due = False  # guarded by _lock; a timer will flush
        self._lost: FolderLost | None = (
            None  # guarded by _lock; the journal's folder belongs to another process
        )

    def attach(
        self,
        reader: str,
        plan_hash: str,
        group: str,
        holder: str,
        rank: int,
        mesh: Mesh,
        takeover: bool,
        window: int,
    ) -> ReaderLease:
        """Let a process of a group in, or a driver as the only one of its group. Durable when it returns.

        Args:
            rank: number of its seat in `mesh`.

        Raises:
            LeaseHeld: another trainer, or another process on that seat, holds a living lease.
        """
        self.serving(plan_hash)
        with self._lock:
            known, now_s = self._current(), self._awake_s
            lease = known.of_reader(reader).attach_rank(
                group, holder, rank, mesh, now_s, self._ttl_s,
                fence=known.next_fence, takeover=takeover, window=window,
            )  # fmt: skip
            self._keep(lease)
        self.flush()
        return lease

    def beat(self, fence: int, rank: int) -> Peers:
        """Note a sign of life; what a rank should know of the others.

        Raises:
            FencedError: the holder was replaced.
        """
        with self._lock:
            known, now_s = self._current(), self._awake_s
            lease = known.of_fence(fence).beat(fence, rank, now_s)
            self._keep(lease, dirty=False)
        return lease.peers(rank, now_s, self._ttl_s)

    def commit(self, fence: int, step: int, rank: int, *, moves: int, skipped: bool) -> ReaderLease:
        """Note that all steps up to `step` are trained.

        Raises:
            FencedError: the holder was replaced.
        """
        with self._lock:
            lease = self._current().of_fence(fence)
            return self._keep(lease.commit(fence, step, rank, time.monotonic(), moves=moves, skipped=skipped))

    def move(self, fence: int, frontier: int, rank: int, *, moves: int | None) -> ReaderLease:
        """Take the frontier of the trainer's checkpoint. Durable when it returns.

        Raises:
            FencedError: the holder was replaced.
        """
        with self._lock:
            lease = self._current().of_fence(fence)
            lease = self._keep(lease.move(fence, frontier, rank, time.monotonic(), moves=moves))
        self.flush()
        return lease

    def detach(self, fence: int, rank: int) -> None:
        """Let a driver or a rank go; the frontier stays. Durable when it returns.

        Raises:
            FencedError: the holder was replaced.
        """
        with self._lock:
            self._keep(self._current().of_fence(fence).detach(fence, rank))
        self.flush()

    def check(self, fence: int) -> ReaderLease:
        """The lease of a holder; refuses a caller from the past.

        Raises:
            FencedError: the holder was replaced.
        """
        try:
            lease = self.leases.of_fence(fence)
            lease.check(fence)
        except FencedError:
            record("fenced_calls", 1, server=self._leases.name)
            raise
        return lease

    def serving(self, plan_hash: str) -> Leases:
        """The leases, for a server of these rows: frontiers of other rows are given up."""
        with self._lock:
            leases = self._current()
            if self._plan_hash not in (None, plan_hash):
                self._leases = leases.without_frontiers()
                self._changes += 1
            self._plan_hash = plan_hash
            return self._leases

    @property
    def leases(self) -> Leases:
        """The leases as they are now."""
        with self._lock:
            return self._current()

    @property
    def is_flushed(self) -> bool:
        """Returns whether the journal holds everything."""
        with self._lock:
            return self._durable == self._changes

    def lives(self) -> bool:
        """Returns whether anybody holds an unexpired lease."""
        with self._lock:
            return self._current().lives(self._awake_s, self._ttl_s)

    def flush(self) -> None:
        """Make all changes so far durable."""
        with self._lock:
            covers = self._changes
        if self._journal:
            try:
                self._journal.save(self._snapshot)
            except FolderLost as error:
                with self._lock:
                    self._lost = error
                raise
        with self._lock:
            self._durable = max(self._durable, covers)

    def _current(self) -> Leases:
        """The leases; the first call reads the journal. Called under `_lock`.

        Raises:
            FolderHeld: another server that lives owns the journal.
            FolderLost: it does since.
        """
        if self._lost is not None:
            raise self._lost
        if not self._loaded:
            found = self._journal.load() if self._journal else None
            if found is not None:
                leases = self._leases.from_json(found["leases"], time.monotonic())
                # a holder of an earlier actor of this name cannot reach this one: only a restart keeps the lease
                same = found["incarnation_id"] == self._incarnation_id
                self._leases = leases if same else leases.without_holders()
                self._plan_hash = found["plan_hash"]
            self._loaded = True
        before, self._awake_s = self._awake_s, time.monotonic()
        if self._awake_s - before > SLEPT_S:
            self._leases = self._leases.later(self._awake_s - before)
        return self._leases

    def _keep(self, lease: ReaderLease, *, dirty: bool = True) -> ReaderLease:
        """Called under `_lock`."""
        self._leases = self._leases.having(lease)
        if dirty:
            self._changes += 1
            self._flush_soon()
        return lease

    def _flush_soon(self) -> None:
        """Called under `_lock`."""
        if self._journal is not None and not self._flush_is_due:
            self._flush_is_due = True
            timer = threading.Timer(FLUSH_WITHIN_S, self._flush_now)
            timer.daemon = True
            timer.start()

    def _flush_now(self) -> None:
        with self._lock:
            self._flush_is_due = False
        try:
            if not self.is_flushed:
                self.flush()
        except FolderLost as error:
            log.error("%s", error)
        except Exception:
            log.exception("journal failed name=%s: trying again", self._leases.name)
            with self._lock:
                self._flush_soon()

    def _snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                "incarnation_id": self._incarnation_id,
                "plan_hash": self._plan_hash,
                "leases": self._current().to_json(time.monotonic()),
            }
