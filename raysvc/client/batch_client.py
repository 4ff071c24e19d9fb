"""A trainer's end of a batch server: attach, iterate steps, commit.

The trainer owns the shards. `fetch` calls are kept outstanding ahead of the step being trained; their
pending refs go straight to the workers and are never opened here.

Always true:
- refs are handed out as soon as a step is asked for, and no shard is opened;
- what `raysvc.client.lease_client` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from raysvc.actors.server.spec import Role, as_role
from raysvc.client.arguments import (
    integer,
    text,
    texts,
)
from raysvc.client.connection import Connection, new_holder
from raysvc.client.decisions import Decisions
from raysvc.client.evals import EvalStream
from raysvc.client.lease_client import LeaseClient
from raysvc.client.look_ahead import Limit, LookAhead
from raysvc.client.meter import DeliveredStep
from raysvc.client.reach import check_columns, reach
from raysvc.client.steps import ClientStats as ClientStats
from raysvc.client.steps import MiniBatch as MiniBatch
from raysvc.client.steps import Step as Step
from raysvc.errors import ConfigError, ServerError, StepOutOfOrder

if TYPE_CHECKING:
    from raysvc.actors.server.spec import Lease, StepInfo
    from raysvc.client.rl.learner_rollouts import LearnerRollouts


@dataclass(frozen=True)
class _Fetch:
    index: int
    info: Any
    step: Step


class BatchClient(LeaseClient[_Fetch, Step]):
    """Holder of a lease; make it with `raysvc.attach`.

    Args:
        server: Ray handle.
        lease: of this client.
        roles: role -> its ranks and columns; the first one's shards are `MiniBatch.shards`.
        limit: of the look-ahead.
        locality_hints: node of each rank; None: unknown.
    """

    def __init__(
        self,
        server: Any,
        lease: Lease,
        roles: Mapping[str, Role],
        limit: Limit,
        locality_hints: Sequence[str] | None = None,
    ) -> None:
        super().__init__(Connection(server, lease), tuple(roles.values()), limit)
        if locality_hints is not None:
            self._connection.collate_on(locality_hints)
        self.roles = dict(roles)

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def steps(
        self, on_fetch: Callable[[Step], object] | None = None, *, stop: int | None = None
    ) -> Iterator[Step]:
        """Steps from the frontier on; commit each when it is trained.

        Args:
            on_fetch: called with each step as soon as it is requested, before its shards exist: pass the
                refs to the workers there. Must not block.
            stop: end before this step; None: end after the last step of the plan.

        Raises:
            StepFailed: the step that would come next could not be made.
            StepOutOfOrder: another iteration, a rewind or a state came between.
        """

        def ask(index: int) -> _Fetch:
            fetch = self._fetch(index)
            if on_fetch is not None:
                on_fetch(fetch.step)
            return fetch

        if on_fetch is not None and not callable(on_fetch):
            raise ConfigError("steps(on_fetch)", f"{on_fetch!r} cannot be called", "give a function")
        self._overlaps = on_fetch is not None
        return self._run(ask, stop)

    def fetch(self, index: int) -> Step:
        """Any one step, now; the same bytes every time. Moves nothing.

        Raises:
            StepOutOfOrder: there is no such step.
            StepFailed: it could not be made.
        """
        self._connection.check()
        self._in_range(index)
        return self._timed(self._fetch(int(index)))

    def eval(self, name: str, *, look_ahead_steps: int | None = None) -> EvalStream:
        """An eval of the job, from its first step; training does not notice.

        Args:
            look_ahead_steps: None: as in training.

        Raises:
            ServerError: the server has no eval of that name.
        """
        return EvalStream(self._connection, name, self.dp_size, self._eval_limit(name, look_ahead_steps))

    @property
    def decisions(self) -> Decisions:
        """What this trainer decides about rows to come: other weights of a mixture, rows to leave out.

        Raises:
            ServerError: several readers, or rollouts, are served.
        """
        self._refuse_rollouts("decisions")
        return Decisions(self._connection, self._feedback, self._forget_sizes)

    @property
    def rollouts(self) -> LearnerRollouts:
        """The rollouts that this trainer learns from: put groups, publish weights, delete what is no longer needed.

        Raises:
            ServerError: an entry is served.
        """
        self._connection.check()
        if not self.lease.forms:
            where, what = f"server.name {self.lease.name!r}", "serves an entry, and has no rollouts"
            raise ServerError(where, what, "attach to a server that serve_rollouts started")
        return self._learner

    @cached_property
    def _learner(self) -> LearnerRollouts:
        from raysvc.client.rl.learner_rollouts import LearnerRollouts

        return LearnerRollouts(self._connection, lambda: self.next_step)

    def _forget_sizes(self) -> None:
        """Forgets what was known of the sizes of steps to come, after a decision changed them."""
        if isinstance(self._window, LookAhead):
            self._window.forget_sizes()

    def _fetch(self, index: int) -> _Fetch:
        count, each = self.schedule.mini_batches_at(index), sum(role.dp_size for role in self._roles)
        info, *shards = self._feedback.ask(
            index, lambda: self._connection.fetch_step(index, self._roles, count)
        )
        if self.lease.forms:
            _hear(info, shards)
        minis = tuple(self._mini(shards[m * each : (m + 1) * each]) for m in range(count))
        step = Step(index, self.schedule.epoch_of(index), minis, self.schedule.update_epochs)
        return _Fetch(index, info, step)

    def _mini(self, shards: list[Any]) -> MiniBatch:
        by_role: dict[str, tuple[Any, ...]] = {}
        for name, role in self.roles.items():
            by_role[name], shards = tuple(shards[: role.dp_size]), shards[role.dp_size :]
        return MiniBatch(next(iter(by_role.values())), None, {} if "" in by_role else by_role)

    def _arrive(self, fetch: _Fetch) -> Step:
        info: StepInfo = self._connection.get(fetch.info)
        if info.index != fetch.index:
            raise StepOutOfOrder(self.lease.name, info.index, f"step {fetch.index}")
        self._connection.note_order(info)
        minis = tuple(
            MiniBatch(mini.shards, made, mini.by_role, rows)
            for mini, made, rows in zip(fetch.step.mini_batches, info.mini_batches, info.rows, strict=True)
        )
        times = (info.read_s, info.collate_s, info.groups_s, info.build_s)
        facts = (info.weight_versions, *times, info.rollouts)
        return Step(fetch.index, fetch.step.epoch, minis, fetch.step.update_epochs, *facts)

    def _given(self, step: Step) -> DeliveredStep:
        infos = [mini.info for mini in step.mini_batches if mini.info is not None]
        metrics = {} if step.rollouts is None else step.rollouts.metrics()
        times = (step.read_s, step.collate_s, 0.0, step.groups_s, step.build_s)
        return DeliveredStep(step.index, infos, *times, metrics)


def attach(
    name: str,
    dp_size: int = 1,
    *,
    roles: Mapping[str, Role | int] | None = None,
    locality_hints: Sequence[str] | None = None,
    takeover: bool | Literal["force"] = False,
    reader: str = "",
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> BatchClient:
    """Take the lease of a running server, for a process that drives all ranks. Where every rank attaches by itself, use `attach_rank`.

    Args:
        name: the server's name.
        dp_size: data-parallel ranks; every mini-batch has one shard per rank.
        roles: role -> data-parallel size, or a `raysvc.Role` that names its columns or batches too, if several models use the
            same rows; replaces `dp_size`.
        locality_hints: Ray's id of the node of each rank: with `server.collators` shards are made there, and need not cross nodes.
        takeover: fence whoever holds the lease; "force": also on a server that another owner started.
        reader: which trainer of a sweep this is, if the server has `share: stream`.
        look_ahead_steps: steps to fetch before they are needed; 0 fetches on demand.
        look_ahead_bytes: limit for those steps together; None: a quarter of the smallest node's object store.
        address: of the Ray cluster, if this process is not connected yet; None: RAY_ADDRESS, or one that runs on this machine.

    Raises:
        AddressError: no cluster answers.
        ServerError: no such server.
        VersionMismatch: it runs another minor version of raysvc.
        LeaseHeld: another trainer holds it; says who, and since when.
        ConfigError: an argument of a wrong type or out of range; a column that `plan.columns` does not have.
    """
    from raysvc.actors.launch import wait_for

    known = _checked_roles(roles, dp_size)
    nodes = None if locality_hints is None else texts("attach(locality_hints)", locality_hints)
    server, limit = reach("attach", name, takeover, reader, look_ahead_steps, look_ahead_bytes, address)
    check_columns(server, name, [each for role in known.values() for each in role.columns or ()])
    ref = server.attach.options(concurrency_group="lease").remote(new_holder(), bool(takeover), reader)
    return BatchClient(server, wait_for(ref, f"server {name!r}"), known, limit, nodes)


def _hear(info: Any, shards: Sequence[Any]) -> None:
    """Take the error of a step that could not be formed from all its refs: Ray prints those that nobody takes.

    A shard is not opened: it is asked for only where its step failed.
    """

    def answered(done: Any) -> None:
        if done.exception() is not None:
            for shard in shards:
                shard.future()

    info.future().add_done_callback(answered)


def _checked_roles(roles: Mapping[str, Role | int] | None, dp_size: int) -> dict[str, Role]:
    integer("attach(dp_size)", dp_size, 1)
    if roles is None:
        return {"": Role(int(dp_size))}
    if not isinstance(roles, Mapping) or not roles:
        raise ConfigError("attach(roles)", f"{roles!r} names no role", "give a mapping, role -> ranks")
    known = {text("attach(roles)", name): as_role(each) for name, each in roles.items()}
    for name, role in known.items():
        if not isinstance(role, Role):
            raise ConfigError(
                f"attach(roles[{name!r}])", f"{role!r} is not a role", "give an integer or a raysvc.Role"
            )
        integer(f"attach(roles[{name!r}])", role.dp_size, 1)
        if role.cp is not None:
            what = f"has cp={role.cp}, which the processes of a mesh have that attach by themselves"
            raise ConfigError(f"attach(roles[{name!r}])", what, "leave it out, or use attach_rank(mesh=...)")
        if role.columns is not None:
            texts(f"attach(roles[{name!r}].columns)", role.columns)
        if role.batches is not None and not hasattr(role.batches, "collate"):
            what, remedy = f"{role.batches!r} makes no batches", "give BatchRules(), or leave it out"
            raise ConfigError(f"attach(roles[{name!r}].batches)", what, remedy)
    return known
