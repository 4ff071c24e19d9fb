"""The named actor that plans and collates the steps of one trainer (or, shared, of a sweep of them).

Always true:
- `fetch(step)` is pure in (plan, step, roles): the same call gives the same bytes, before and after a
  restart of this process, so Ray may retry it and rebuild lost shards with it;
- shards are returned by value: the caller owns them, and they outlive this process;
- every call that changes something may come twice: Ray repeats it when the server died before it answered;
- what must outlive the process (leases, frontiers) is in the journal: at once for leases and moves, within
  a second for commits;
- `control` calls never wait for a collation, nor for the journal (a concurrency group of their own; the lock
  below is held for microseconds).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from raysvc.actors.server.entry_stream import streams_of
from raysvc.actors.server.housekeeping import House
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.lease_store import LedgerBook, Owner
from raysvc.actors.server.leases import Ledger
from raysvc.actors.server.spec import TRAIN as TRAIN
from raysvc.actors.server.spec import Lease as Lease
from raysvc.actors.server.spec import Role as Role
from raysvc.actors.server.spec import ServeSpec as ServeSpec
from raysvc.actors.server.spec import StepInfo as StepInfo
from raysvc.actors.server.spec import StepOutline as StepOutline
from raysvc.actors.server.step_maker import StepMaker, Stream
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError, LeaseHeld
from raysvc.metrics import record

log = logging.getLogger(__name__)


class BatchServer:
    """See the module. Constructed from text, so that a restart needs nothing else, and never fails to start: what
    cannot be opened is told to whoever asks for it.

    Args:
        spec_json: a `ServeSpec`.
        incarnation_id: differs between two actors of one name, and is the same after a restart of one.
    """

    def __init__(self, spec_json: str, incarnation_id: str) -> None:
        self.spec = ServeSpec.model_validate_json(spec_json)
        self._incarnation_id = incarnation_id
        self._began_s = time.time()
        self._maker = StepMaker(self.spec, self._make_streams())
        self._book = self._open_book()
        self._house = House(self.spec, self._book, self._maker)
        self._house.start()

    @property
    def num_steps(self) -> int:
        """Steps of all epochs."""
        return self._train.schedule.num_steps

    def spec_json(self) -> tuple[str, str]:
        """The spec this server runs with, and its `incarnation_id`."""
        return self.spec.model_dump_json(), self._incarnation_id

    def describe(self) -> dict[str, Any]:
        """What this server serves; no lease needed.

        Raises:
            EntryError: the entry cannot be opened.
            PlanError: no plan can satisfy rows and config.
        """
        evals = {name: self._maker.stream(name).schedule.to_json() for name in self.spec.evals}
        rows = self._train.num_rows
        return {
            "name": self.spec.name,
            "num_rows": rows,
            "schedule": self._train.schedule.to_json(),
            "evals": evals,
        }

    def eval_schedule(self, name: str) -> dict[str, Any]:
        """JSON of the schedule of an eval.

        Raises:
            ServerError: there is no such eval; the error lists those that are there.
        """
        return self._maker.stream(name).schedule.to_json()

    def attach(self, holder: str, takeover: bool = False, reader: str = "") -> Lease:
        """Give out the next fence.

        Raises:
            LeaseHeld: another trainer holds a living lease and `takeover` is False.
        """

        def change(ledger: Ledger, fence: int) -> Ledger:
            return ledger.attach(holder, time.time(), self.spec.lease_ttl_s, takeover=takeover, fence=fence)

        return self._attach(reader, holder, change)

    def attach_rank(
        self, group: str, holder: str, rank: int, num_ranks: int, takeover: bool = False, reader: str = ""
    ) -> Lease:
        """Give a rank its seat; the ranks of one group share a fence.

        Raises:
            LeaseHeld: another trainer, or another process on that seat, holds a living lease.
        """

        def change(ledger: Ledger, fence: int) -> Ledger:
            return ledger.attach_rank(
                group, holder, rank, num_ranks, time.time(), self.spec.lease_ttl_s,
                takeover=takeover, fence=fence,
            )  # fmt: skip

        return self._attach(reader, holder, change, rank)

    def heartbeat(self, fence: int) -> int:
        """A sign of life; returns the frontier."""
        return self._book.change(fence, lambda ledger: ledger).frontier

    def commit(self, fence: int, step: int, skipped: bool = False, rank: int | None = None) -> int:
        """Move the frontier past `step`; returns it. Committing twice is a no-op."""
        ledger = self._book.change(
            fence, lambda ledger: ledger.commit(fence, step, skipped=skipped, rank=rank)
        )
        self._after_commit(ledger)
        if ledger.frontier == self.num_steps:
            self.flush()
        return ledger.frontier

    def move(
        self, fence: int, frontier: int, state: dict[str, Any] | None = None, rank: int | None = None
    ) -> int:
        """Go to the frontier of the trainer's checkpoint, `state` being a `PlanState`.

        Raises:
            StateMismatch: the checkpoint was made with other rows or another order.
            StepOutOfOrder: there is no such step.
        """
        if state is not None:
            self._train.check(state)
        steps = self.num_steps
        self._book.change(fence, lambda ledger: ledger.move(fence, frontier, steps, rank))
        self.flush()
        return frontier

    def detach(self, fence: int, rank: int | None = None) -> None:
        """Give the lease (or a rank's seat) back; the frontier stays, and is in the journal when this returns."""
        self._book.change(fence, lambda ledger: ledger.detach(fence, rank), beat=False)
        if all(ledger.holder is None for ledger in self._book.ledgers.by_reader.values()):
            self._maker.shared.clear()
        self.flush()

    def flush(self) -> None:
        """Write what changed to the journal."""
        self._book.flush()

    def peek(self, step: int, dp_size: int = 1, stream: str = TRAIN) -> StepOutline:
        """Row ids, lengths and counts of a step, from the plan alone.

        Raises:
            StepOutOfOrder: there is no such step.
        """
        return self._maker.outline(step, dp_size, stream)

    def sizes(self, first: int, stop: int, roles: tuple[Role, ...], stream: str = TRAIN) -> list[int]:
        """Bytes of the shards of the steps `first` to `stop - 1`, all roles together."""
        source = self._maker.stream(stream)
        return [sum(source.outline(step, role).nbytes for role in roles) for step in range(first, stop)]

    def check_columns(self, columns: tuple[str, ...]) -> None:
        """Refuse columns that a role cannot have.

        Raises:
            ConfigError: one that `plan.columns` does not name.
        """
        missing = sorted(set(columns) - set(self.spec.plan.columns))
        if missing:
            what = f"a role asks for {', '.join(missing)}, and plan.columns has {', '.join(self.spec.plan.columns)}"
            raise ConfigError(
                "attach(roles)", what, "name it in plan.columns and serve again, or leave it out"
            )

    def num_micro_batches(self, first: int, stop: int, dp_size: int, stream: str = TRAIN) -> int:
        """Micro-batches of one rank in the steps `first` to `stop - 1`; plans them all."""
        source = self._maker.stream(stream)
        outlines = (source.outline(step, dp_size) for step in range(first, stop))
        return sum(mini.num_micro_batches for outline in outlines for mini in outline.mini_batches)

    def fetch(
        self, fence: int, step: int, roles: tuple[Role, ...], stream: str = TRAIN
    ) -> tuple[StepInfo | Shard, ...]:
        """The step's info, then its shards: mini-batch after mini-batch, role after role, rank after rank.

        Raises:
            FencedError: the caller was replaced.
            StepOutOfOrder: there is no such step.
            StepFailed: the step could not be made; carries the cause.
        """
        self._book.check(fence)
        if self.spec.share == "none":
            info, shards = self._maker.make(step, roles, stream)
        else:
            info, shards = self._maker.make_shared(step, roles, stream, readers=None)
        return (info, *shards)

    def fetch_rank(
        self, fence: int, step: int, rank: int, num_ranks: int, stream: str = TRAIN
    ) -> tuple[StepInfo | Shard, ...]:
        """The step's info, then this rank's shard of each mini-batch; collated once for all ranks.

        Raises:
            FencedError, StepOutOfOrder, StepFailed: as `fetch`.
        """
        self._book.check(fence)
        readers = num_ranks if self.spec.share == "none" else None
        info, shards = self._maker.make_shared(step, (Role(num_ranks),), stream, readers)
        return (info, *shards[rank::num_ranks])

    def stats(self) -> dict[str, Any]:
        """Plain facts about this server."""
        readers = {name: _facts(ledger) for name, ledger in self._book.ledgers.by_reader.items()}
        own = readers.get("") or next(iter(readers.values()), _facts(Ledger(self.spec.name)))
        return {
            "name": self.spec.name,
            "pid": os.getpid(),
            "node": _node_id(),
            "up_s": time.time() - self._began_s,
            "entry_key": self._train.entry_key,
            "num_steps": self.num_steps,
            "lease_ttl_s": self.spec.lease_ttl_s,
            **own,
            "readers": readers,
            "collating": self._maker.num_collating,
            "made": self._maker.shared.made,
            "shared_bytes": self._maker.shared.nbytes,
            "flushed": self._book.is_flushed,
            "rss_bytes": _rss_bytes(),
        }

    def holds_data(self) -> bool:
        """Whether an entry is open."""
        return self._maker.holds_data()

    @property
    def _train(self) -> Stream:
        return self._maker.stream(TRAIN)

    def _make_streams(self) -> dict[str, Stream]:
        return dict(streams_of(self.spec))

    def _attach(
        self, reader: str, holder: str, change: Callable[[Ledger, int], Ledger], rank: int | None = None
    ) -> Lease:
        schedule = self._train.schedule.to_json()
        try:
            ledger = self._book.attach(reader, change)
        except LeaseHeld:
            record("leases_refused", 1, server=self.spec.name)
            raise
        record("leases_granted", 1, server=self.spec.name)
        self._house.seen()
        log.info("attached name=%s holder=%s fence=%d", self.spec.name, holder, ledger.fence)
        frontier = ledger.frontier if rank is None else ledger.seats[rank].frontier
        return Lease(
            name=self.spec.name,
            fence=ledger.fence,
            ttl_s=self.spec.lease_ttl_s,
            frontier=frontier or 0,
            plan_hash=self._train.plan_hash,
            identity=self._train.identity,
            entry_key=self._train.entry_key,
            schedule=schedule,
        )

    def _open_book(self) -> LedgerBook:
        spec = self.spec
        owner = Owner(
            name=spec.name,
            shared=spec.share != "none",
            lease_ttl_s=spec.lease_ttl_s,
            incarnation_id=self._incarnation_id,
            plan_hash=lambda: self._train.plan_hash,
            more=self._more_to_keep,
            restore_more=self._restore_more,
        )
        return LedgerBook(owner, Journal(spec.journal, spec.storage_options) if spec.journal else None)

    def _more_to_keep(self) -> dict[str, Any]:
        """What else belongs into the journal."""
        return {}

    def _restore_more(self, record: dict[str, Any]) -> None:
        """Take what `_more_to_keep` gave to an earlier process."""

    def _after_commit(self, ledger: Ledger) -> None:
        """Let go of shared steps that nobody will ask for again."""
        if self.spec.share != "none":
            self._maker.let_go_below(self._book.ledgers.committed())


def _facts(ledger: Ledger) -> dict[str, Any]:
    now_s = time.time()
    return {
        "holder": ledger.holder,
        "fence": ledger.fence,
        "frontier": ledger.frontier,
        "skipped": len(ledger.skipped),
        "since_s": now_s - ledger.since_s if ledger.holder else None,
        "seen_s": now_s - ledger.seen_s if ledger.holder else None,
    }


def _node_id() -> str | None:
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else None


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
