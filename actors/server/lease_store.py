"""The ledgers of a server in memory and in its journal.

Always true:
- a change is seen by every call after it; in the journal it is when `flush` returns;
- the lock is held for microseconds: nothing is written and nothing collated under it;
- after a restart of the process leases go on; another actor of the same name keeps fences and frontiers alone,
  and with other rows the fences alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysvc.actors.server.journal import Journal
from raysvc.actors.server.leases import Ledger
from raysvc.actors.server.ledgers import Ledgers
from raysvc.errors import FencedError
from raysvc.metrics import record


@dataclass(frozen=True)
class Owner:
    """Whose ledgers they are.

    Attributes:
        name: of the server.
        shared: whether it has several readers.
        lease_ttl_s: of its leases.
        incarnation_id: differs between two actors of one name, and is the same after a restart of one.
        plan_hash: of what it serves.
        more: what else goes into a record.
        restore_more: gets a record when there is one.
    """

    name: str
    shared: bool
    lease_ttl_s: float
    incarnation_id: str
    plan_hash: Callable[[], str]
    more: Callable[[], dict[str, Any]]
    restore_more: Callable[[dict[str, Any]], None]


class LedgerBook:
    """See the module.

    Args:
        owner: whose.
        journal: None: kept in memory alone.
    """

    def __init__(self, owner: Owner, journal: Journal | None) -> None:
        self._owner, self._journal = owner, journal
        self._lock = threading.Lock()
        self._journal_lock = threading.Lock()  # taken before _lock; held while writing
        self._ledgers: Ledgers | None = None  # guarded by _lock; None until it was read from the journal
        self._dirty = False  # guarded by _lock; changes that are not in the journal yet

    def attach(self, reader: str, change: Callable[[Ledger, int], Ledger]) -> Ledger:
        """Let a holder in; `change` gets the reader's ledger and the next fence. Durable when it returns."""
        with self._lock:
            self._ledgers, ledger = self._known().attached(reader, change)
        self.flush()
        return ledger

    def change(self, fence: int, change: Callable[[Ledger], Ledger], *, beat: bool = True) -> Ledger:
        """Apply a holder's call, which is a sign of life; durable after the next `flush`.

        Raises:
            FencedError: the holder was replaced.
        """

        def changed(ledger: Ledger) -> Ledger:
            after = change(ledger)
            return after.beat(fence, time.time()) if beat else after

        with self._lock:
            self._ledgers, ledger = self._known().changed(fence, changed)
            self._dirty = True
        return ledger

    def check(self, fence: int) -> None:
        """Refuse a caller from the past.

        Raises:
            FencedError: the holder was replaced.
        """
        try:
            self.ledgers.check(fence)
        except FencedError:
            record("fenced_calls", 1, server=self._owner.name)
            raise

    def flush(self, *, if_dirty: bool = False) -> None:
        """Write what changed."""
        with self._journal_lock:
            with self._lock:
                if if_dirty and not self._dirty:
                    return
                ledgers, self._dirty = self._known(), False
            if self._journal:
                owner = self._owner
                record = {
                    "incarnation_id": owner.incarnation_id,
                    "plan_hash": owner.plan_hash(),
                    "ledgers": ledgers.to_json(),
                }
                self._journal.save({**record, **owner.more()})

    @property
    def ledgers(self) -> Ledgers:
        """As they are now."""
        with self._lock:
            return self._known()

    @property
    def is_flushed(self) -> bool:
        """Whether the journal holds everything."""
        with self._lock:
            return not self._dirty

    def lives(self) -> bool:
        """Whether anybody holds an unexpired lease."""
        return self.ledgers.lives(time.time(), self._owner.lease_ttl_s)

    def _known(self) -> Ledgers:
        """The ledgers; the first call reads the journal. Called under `_lock`."""
        if self._ledgers is None:
            fresh = Ledgers(self._owner.name, shared=self._owner.shared)
            record = self._journal.load() if self._journal else None
            self._ledgers = fresh if record is None else self._restored(fresh, record)
        return self._ledgers

    def _restored(self, fresh: Ledgers, record: dict[str, Any]) -> Ledgers:
        self._owner.restore_more(record)
        ledgers = fresh.restored(record["ledgers"])
        if record["plan_hash"] != self._owner.plan_hash():
            return ledgers.without_frontiers()
        # a holder of an earlier actor of this name cannot reach this one: only a restart keeps the lease
        return (
            ledgers if record["incarnation_id"] == self._owner.incarnation_id else ledgers.without_holders()
        )
