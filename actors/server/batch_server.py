"""The named actor that plans and collates the steps of one trainer (or, shared, of a sweep of them).

Always true:
- `fetch(step)` is pure in (plan, decisions, step, roles), and no decision changes a step that was handed out: the
  same call gives the same bytes, before and after a restart of this process, so Ray may retry it and rebuild lost
  shards with it;
- shards are returned by value: the caller owns them, and they outlive this process; large ones that peers share are refs of this
  process, and who finds one lost asks again;
- every call that changes something may come twice: Ray repeats it when the server died before it answered;
- no order of calls is assumed: Ray does not keep it when it repeats them;
- what must outlive the process (leases, frontiers) is in the journal: at once for leases and moves, within
  a second for commits;
- `control` calls never wait for a collation, nor for the journal (a concurrency group of their own).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from raysvc.actors.mesh import Mesh, MeshSeat
from raysvc.actors.server.entry_stream import streams_of
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.kept.folder_claim import claim_of
from raysvc.actors.server.lease_store import LeaseStore
from raysvc.actors.server.leases import Leases
from raysvc.actors.server.orphan_watch import OrphanWatch
from raysvc.actors.server.reader_lease import Peers, ReaderLease
from raysvc.actors.server.spec import TRAIN as TRAIN
from raysvc.actors.server.spec import AdmittedStep, Commit
from raysvc.actors.server.spec import Lease as Lease
from raysvc.actors.server.spec import Role as Role
from raysvc.actors.server.spec import ServeSpec as ServeSpec
from raysvc.actors.server.spec import StepInfo as StepInfo
from raysvc.actors.server.spec import StepOutline as StepOutline
from raysvc.actors.server.step_cache import RAY_SENDS_ALONG, PeerRefs
from raysvc.actors.server.step_maker import Made, StepMaker, Stream
from raysvc.actors.server.trainer_feedback import TrainerFeedback
from raysvc.actors.server.trainer_reports import TrainerReports
from raysvc.actors.versions import HERE, Side, check_versions_meet
from raysvc.cache.store.claim import Claim
from raysvc.collate.reused_memory import keep_freed_memory
from raysvc.collate.shard import CutWire, Shard, Wire, cut
from raysvc.errors import ConfigError, LeaseHeld, StepOutOfOrder
from raysvc.feedback.request import Request, RowOutcomes
from raysvc.media.medium import COLUMN
from raysvc.metrics import record, speak_for_server_of

log = logging.getLogger(__name__)


class BatchServer:
    """See the module. Constructed from text, so that a restart needs nothing else, and never fails to start: what
    cannot be opened is told to whoever asks for it.

    Args:
        spec_json: a `ServeSpec`.
        incarnation_id: differs between two actors of one name, and is the same after a restart of one.
        train: what is trained; None: the entry of the spec.
        claim: on the folder of the journal; None: a new one, where there is a journal.
    """

    def __init__(
        self,
        spec_json: str,
        incarnation_id: str,
        train: Stream | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.spec = spec = ServeSpec.model_validate_json(spec_json)
        self._incarnation_id = incarnation_id
        speak_for_server_of(spec.team)
        keep_freed_memory()
        self._began_s = time.monotonic()
        self._entries = streams_of(spec)
        streams: dict[str, Stream] = {**self._entries}
        self._maker = StepMaker(spec, {**streams, TRAIN: train} if train else streams)
        self._claim = claim = claim or claim_of(spec, incarnation_id)
        journal = Journal(spec.journal, spec.storage_options, claim) if spec.journal else None
        self._feedback = TrainerFeedback(spec, self._entries.get(TRAIN), claim)
        nobody = Leases(spec.name, shared=spec.share != "none")
        self._leases = LeaseStore(nobody, spec.lease_ttl_s, incarnation_id, journal)
        self._planned_steps: int | None = None  # once somebody attached
        self._orphans = OrphanWatch(spec, self._leases, self._maker, self._export)
        self._reports = TrainerReports()
        self._peer_refs = PeerRefs()

    @property
    def num_steps(self) -> int:
        """Steps of all epochs."""
        return self._train.schedule.num_steps

    def spec_json(self) -> tuple[str, str]:
        """The spec this server runs with, and its incarnation."""
        return self.spec.model_dump_json(), self._incarnation_id

    def describe(self) -> dict[str, Any]:
        """Returns what this server serves; no lease needed.

        Raises:
            EntryError: the entry cannot be opened.
            PlanError: no plan can satisfy rows and config.
            FolderHeld: another server that lives owns the run folder.
        """
        with self._orphans.visit():
            if self._claim is not None:
                self._claim.take()
            return {
                "name": self.spec.name,
                "num_rows": self._train.num_rows,
                "schedule": self._train.schedule.to_json(),
                "evals": {name: self._maker.stream(name).schedule.to_json() for name in self.spec.evals},
            }

    def eval_schedule(self, name: str) -> dict[str, Any]:
        """JSON of the schedule of an eval.

        Raises:
            ServerError: there is no such eval; the error lists those that are there.
        """
        return self._maker.stream(name).schedule.to_json()

    def meet(self, version: str, wire: int) -> Side:
        """The version and wire format of this server.

        Raises:
            VersionMismatch: it does not work with such a client.
        """
        check_versions_meet(self.spec.name, Side(version, wire), HERE)
        return HERE

    def attach(self, holder: str, takeover: bool = False, reader: str = "") -> Lease:
        """Give out the next fence.

        Raises:
            LeaseHeld: another trainer holds a living lease and `takeover` is False.
        """
        self._own_again()
        self._feedback.read_again()
        return self.attach_rank(holder, holder, 0, 1, takeover, reader)

    def attach_rank(
        self,
        group: str,
        holder: str,
        rank: int,
        num_ranks: int,
        takeover: bool = False,
        reader: str = "",
        look_ahead_steps: int = 0,
        mesh: Mesh | None = None,
    ) -> Lease:
        """Give a process its seat; those of one group share a fence.

        Args:
            rank: number of the seat in `mesh`; so in all calls that name a rank.
            num_ranks: of data parallelism.
            mesh: None: of dp alone.

        Raises:
            LeaseHeld: another trainer, or another process on that seat, holds a living lease.
        """
        with self._orphans.visit():
            train, window = self._train, look_ahead_steps + 1
            plan_hash, schedule = train.plan_hash, train.schedule.to_json()
            try:
                lease = self._leases.attach(
                    reader, plan_hash, group, holder, rank, mesh or Mesh(num_ranks), takeover, window
                )
            except LeaseHeld:
                record("leases_refused", 1, server=self.spec.name)
                raise
            record("leases_granted", 1, server=self.spec.name)
            self._planned_steps = None if train.schedule.is_endless else self.num_steps
            log.info("attached name=%s holder=%s fence=%d", self.spec.name, holder, lease.fence)
            return Lease(
                name=self.spec.name,
                fence=lease.fence,
                ttl_s=self.spec.lease_ttl_s,
                frontier=lease.seats[rank].frontier or 0,
                plan_hash=plan_hash,
                identity=train.identity,
                entry_key=train.entry_key,
                schedule=schedule,
                collators=self.spec.collators,
                decided=tuple(one.mark for one in self._feedback.decisions),
                cuts=self.spec.plan.cp_split is not None,
                committed_by=lease.committed_by,
            )

    def heartbeat(self, fence: int, rank: int = 0, report: dict[str, Any] | None = None) -> Peers:
        """A sign of life; returns what a rank should know of the others.

        Args:
            report: what the trainer measured, as `raysvc.client.meter`; shown by `stats`.
        """
        peers = self._leases.beat(fence, rank)
        if report is not None:
            told = Side(report.get("version", HERE.version), report.get("wire", HERE.wire))
            check_versions_meet(self.spec.name, told, HERE)  # this process may be newer than the attach
            self._reports.note(fence, rank, report)
        return peers

    def commit(self, fence: int, step: int, skipped: bool = False, rank: int = 0, moves: int = 0) -> int:
        """Note that all steps up to `step` are trained; returns the frontier. Order and number of calls do not matter.

        Args:
            skipped: `step` itself was not applied.
            moves: how often this seat had moved when the commit was sent.

        Raises:
            FencedError: the caller was replaced.
            StepOutOfOrder: there is no such step.
        """
        if not 0 <= step < self.num_steps:
            self._leases.check(fence)
            raise StepOutOfOrder(self.spec.name, step, f"a step from 0 to {self.num_steps - 1}")
        lease = self._leases.commit(fence, step, rank, moves=moves, skipped=skipped)
        self._maker.let_go_below(self._leases.leases.committed())
        if lease.frontier == self.num_steps:
            self.flush()
        return lease.frontier

    def move(
        self,
        fence: int,
        frontier: int,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        moves: int | None = None,
    ) -> int:
        """Go to the frontier of the trainer's checkpoint, `state` being a `PlanState`.

        Args:
            moves: how often this seat has moved, with this one; None: once more.

        Raises:
            FencedError: the caller was replaced.
            StateMismatch: the checkpoint was made with other rows or another order.
            StepOutOfOrder: there is no such step.
        """
        if state is not None:
            self._train.check(state)
        if not 0 <= frontier <= self.num_steps:
            raise StepOutOfOrder(self.spec.name, frontier, f"a step from 0 to {self.num_steps}")
        self._leases.move(fence, frontier, rank, moves=moves)
        return frontier

    def detach(self, fence: int, rank: int = 0) -> None:
        """Give the lease (or a rank's seat) back; the frontier stays, and is in the journal when this returns."""
        self._leases.detach(fence, rank)
        if not any(lease.holder for lease in self._leases.leases.by_reader.values()):
            self._maker.shared.clear()

    def flush(self, last: bool = False) -> None:
        """Write what changed to the journal; `last`: give the run folder back, this server ends."""
        self._leases.flush()
        if last and self._claim is not None:
            self._claim.release()

    def _own_again(self) -> None:
        """Go on in an empty run folder where the earlier run was moved out of the way and nobody trains."""
        if self._claim is not None and self.spec.rollouts is None and not self._leases.lives():
            self._claim.renew()

    def outline(self, step: int, dp_size: int = 1, stream: str = TRAIN) -> StepOutline:
        """Row ids, lengths and counts of a step, from the plan alone; never waits.

        Raises:
            StepOutOfOrder: there is no such step.
            ServerError: its rows are not tokenized yet.
        """
        return self._maker.outline(step, dp_size, stream)

    def sizes(self, first: int, stop: int, roles: tuple[Role, ...], stream: str = TRAIN) -> list[int | None]:
        """Returns what `StepMaker.sizes` does; never waits."""
        return self._maker.sizes(first, stop, roles, stream)

    def check_columns(self, columns: tuple[str, ...]) -> None:
        """Refuse columns that a role cannot have.

        Raises:
            ConfigError: one that `plan.columns` does not name.
        """
        missing = sorted(
            set(columns) - set(self.spec.plan.columns) - ({COLUMN} if self.spec.processor else set())
        )
        if missing:
            what = f"a role asks for {', '.join(missing)}, and plan.columns has {', '.join(self.spec.plan.columns)}"
            raise ConfigError(
                "attach(roles)", what, "name it in plan.columns and serve again, or leave it out"
            )

    def num_micro_batches(self, first: int, stop: int, dp_size: Role | int, stream: str = TRAIN) -> int:
        """Micro-batches of one rank in the steps `first` to `stop - 1`; plans them all."""
        source = self._maker.stream(stream)
        outlines = (source.outline(step, dp_size) for step in range(first, stop))
        return sum(mini.num_micro_batches for outline in outlines for mini in outline.mini_batches)

    def fetch(
        self, fence: int, step: int, roles: tuple[Role, ...], stream: str = TRAIN
    ) -> tuple[StepInfo | Wire, ...]:
        """The step's info, then its shards as they travel (`Shard.to_wire`): mini-batch after mini-batch, role after role, rank after rank.

        Raises:
            FencedError: the caller was replaced.
            StepOutOfOrder: there is no such step.
            StepFailed: the step could not be made; carries the cause.
        """
        info, shards = self._made(fence, step, roles, stream)
        return (info, *(shard.to_wire() for shard in shards))

    def fetch_rank(
        self,
        fence: int,
        step: int,
        rank: int,
        num_ranks: int,
        stream: str = TRAIN,
        commits: Sequence[Commit] = (),
        columns: tuple[str, ...] | None = None,
        node: str | None = None,
    ) -> list[Any]:
        """The step's info (`StepInfo.for_rank`), then this rank's shard of each mini-batch (`shard.cut`); collated once for all ranks,
        and the same one for all peers of a dp rank; with `plan.cp_split` each context-parallel rank has a part of its own.

        Args:
            num_ranks: of data parallelism.
            commits: of this rank, which came along: a call saved at every step.
            columns: of `plan.columns`, that this process wants; None: all of them.
            node: of a process whose peers take the same; its shards then are one ref of all, and whether it is the first of its node,
                unless they are small. None: shards are returned by value.

        A step that ranks ask for while they are no further apart than their look-ahead is kept until all have it, however
        small `share_bytes` is.

        Raises:
            FencedError, StepOutOfOrder, StepFailed: as `fetch`.
        """
        for commit in commits:
            self.commit(fence, commit.step, commit.skipped, rank, commit.moves)
        seat = MeshSeat(self._leases.check(fence).mesh, rank)
        cp, own = seat.share(self.spec.plan.cp_split is not None)
        role = Role(num_ranks, cp=cp)
        info, shards = self._made(fence, step, (role,), stream, by_rank=True)
        known = info.for_rank(self._leases.check(fence).frontier)
        whole = shards[own :: role.num_shards]
        mine = [self._with_columns(shard, columns) for shard in whole]

        def wires() -> list[CutWire]:
            return [cut(shard.to_wire()) for shard in mine]

        if node is None or sum(shard.nbytes for shard in mine) <= RAY_SENDS_ALONG:
            return [known, *wires()]
        return [known, *self._peer_refs.get(whole[0], columns, node, wires)]

    def _with_columns(self, shard: Shard, columns: tuple[str, ...] | None) -> Shard:
        """The shard without the arrays of other columns; nothing is copied."""
        if columns is None:
            return shard
        media = () if COLUMN in columns else shard.of_media
        return shard.without({*self.spec.plan.columns, *media} - set(columns))

    def _made(
        self, fence: int, step: int, roles: tuple[Role, ...], stream: str, by_rank: bool = False
    ) -> Made:
        """Info and shards of a step, for a driver or for the ranks that each ask for it."""
        lease, alone = self._leases.check(fence), self.spec.share == "none"
        if alone and not by_rank:
            return self._maker.make(step, roles, stream)
        readers = lease.mesh.size if alone else None
        pinned = alone and stream == TRAIN and step < lease.frontier + 2 * lease.window
        return self._maker.make_shared(step, roles, stream, readers, pinned)

    def admit(self, fence: int, step: int, stream: str = TRAIN) -> AdmittedStep:
        """Let a trainer's collators make a step; they wait for what it returns.

        Raises:
            FencedError: the caller was replaced.
            StepOutOfOrder: there is no such step.
            StepFailed: its rows will not be there.
        """
        self._leases.check(fence)
        return AdmittedStep(
            self._maker.admit(step, stream), len(self._feedback.decisions) if stream == TRAIN else 0
        )

    def decide(self, fence: int, request: Request, asked: int) -> tuple[int, str]:
        """Does what `TrainerFeedback.decide` does; returns the step from which the decision holds, and a digest of
        what it changes.

        Raises:
            FencedError: the caller was replaced.
        """
        self._leases.check(fence)
        made = self._feedback.decide(request, asked)
        self._maker.let_go_from(made.from_step)
        return made.mark

    def decisions(self) -> list[dict[str, Any]]:
        """`from_step`, `weights` and `skip_rows` of what was decided so far, in its order."""
        names = ("from_step", "weights", "skip_rows")
        return [{name: getattr(one, name) for name in names} for one in self._feedback.decisions]

    def report_rows(self, fence: int, outcomes: RowOutcomes) -> None:
        """Does what `TrainerFeedback.report` does.

        Raises:
            FencedError: the caller was replaced.
        """
        self._leases.check(fence)
        self._feedback.report(outcomes)

    def row_outcomes(self, fence: int, first: int, stop: int) -> RowOutcomes:
        """Returns what `TrainerFeedback.outcomes` does.

        Raises:
            FencedError: the caller was replaced.
        """
        self._leases.check(fence)
        return self._feedback.outcomes(first, stop)

    def end_build(self, why: str) -> None:
        """The build of the entry that is served has failed; steps that need more of it fail with `why`. "": another build begins."""
        for stream in self._entries.values():
            stream.end_build(why)

    def stats(self) -> dict[str, Any]:
        """Plain facts about this server."""
        leases = self._leases.serving(self._train.plan_hash)
        readers = {
            reader: {**_facts(lease), "trainer": self._reports.of(lease.fence) if lease.holder else None}
            for reader, lease in leases.by_reader.items()
        }
        nobody = {**_facts(leases.of_reader("")), "trainer": None}
        own = readers.get("") or next(iter(readers.values()), nobody)
        return {
            "name": self.spec.name,
            "owner": self.spec.owner,
            "team": self.spec.team,
            "pid": os.getpid(),
            "node": _node_id(),
            "version": HERE.version,
            "up_s": time.monotonic() - self._began_s,
            "entry_key": self._train.entry_key,
            "num_steps": None if self._train.schedule.is_endless else self.num_steps,
            "lease_ttl_s": self.spec.lease_ttl_s,
            "journal": self.spec.journal,
            **own,
            "readers": readers,
            "collating": self._maker.num_collating,
            "made": self._maker.shared.made,
            "shared_bytes": self._maker.shared.nbytes,
            "flushed": self._leases.is_flushed,
            "rss_bytes": _rss_bytes(),
        }

    def _export(self) -> None:
        """Set the gauges of what is served; Ray forgets one that is not set again."""
        if self._planned_steps is not None:
            record("planned_steps", self._planned_steps, server=self.spec.name)

    def holds_data(self) -> bool:
        """Returns whether an entry is open."""
        return self._maker.holds_data()

    @property
    def _train(self) -> Stream:
        return self._maker.stream(TRAIN)


def _facts(lease: ReaderLease) -> dict[str, Any]:
    now_s = time.monotonic()
    return {
        "holder": lease.shown_holder,
        "fence": lease.fence,
        "frontier": lease.frontier,
        "committed_by": lease.committed_by or None,
        "skipped": len(lease.skipped),
        "since_s": now_s - lease.since_s if lease.holder else None,
        "seen_s": now_s - lease.seen_s if lease.holder else None,
    }


def _node_id() -> str | None:
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else None


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
