"""A trainer's end of a batch server: attach, iterate steps, commit.

The trainer owns the shards. `fetch` calls are kept outstanding ahead of the step being trained; their
pending refs go straight to the workers and are never opened here.

Always true:
- refs are handed out as soon as a step is asked for, and no shard is opened;
- what `raysvc.client.lease_client` says.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from raysvc.actors.server.spec import Role, as_role
from raysvc.client.arguments import (
    flag,
    integer,
    mapping,
    meet,
    number,
    optional_integer,
    optional_text,
    refuse_takeover_of_foreign,
    text,
    texts,
)
from raysvc.client.connection import Connection, new_holder
from raysvc.client.evals import EvalStream
from raysvc.client.lease_client import LeaseClient
from raysvc.client.look_ahead import Limit, LookAhead
from raysvc.client.meter import DeliveredStep
from raysvc.client.steps import ClientStats as ClientStats
from raysvc.client.steps import MiniBatch as MiniBatch
from raysvc.client.steps import Step as Step
from raysvc.errors import ConfigError, ServerError, StepOutOfOrder
from raysvc.feedback.driver_feedback import Numbers
from raysvc.feedback.request import RowOutcomes

if TYPE_CHECKING:
    from raysvc.actors.server.spec import Lease, StepInfo
    from raysvc.client.rank_client import RankClient
    from raysvc.client.seats.own_seat import AnyMesh


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
    """

    def __init__(self, server: Any, lease: Lease, roles: Mapping[str, Role], limit: Limit) -> None:
        super().__init__(Connection(server, lease), tuple(roles.values()), limit)
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

    def collate_on(self, nodes: Sequence[str]) -> None:
        """Say where the workers are, before the first step: collators start there, and shards need not cross nodes.

        Args:
            nodes: Ray's id of the node of each rank.
        """
        self._connection.collate_on(texts("collate_on(nodes)", nodes))

    def eval(self, name: str, *, look_ahead_steps: int | None = None) -> EvalStream:
        """An eval of the job, from its first step; training does not notice.

        Args:
            look_ahead_steps: None: as in training.

        Raises:
            ServerError: the server has no eval of that name.
        """
        return EvalStream(self._connection, name, self.dp_size, self._eval_limit(name, look_ahead_steps))

    def set_mixture_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> int:
        """Change the weights of a mixture from a step on, for good; returns that step. They are on disk when this returns, and
        every resume and replay follows them. Calling it again with the same weights and step changes nothing.

        Args:
            weights: every source -> its weight, relative to the others, 0 for none of it; they count what `mixture.by` says.
            from_step: None: the first step that this client did not ask for, which is beyond its look-ahead.

        Raises:
            StepOutOfOrder: this client asked for that step already, or there is none.
            PlanError: the plan is no mixture; a source has no weight or is not known; a source joins after that step.
            ConfigError: a weight is negative or no number, or all are 0.
            ServerError: several readers, or rollouts, are served.
        """
        self._refuse_rollouts("set_mixture_weights")
        known = {
            name: number(f"set_mixture_weights(weights[{name!r}])", weight)
            for name, weight in mapping("set_mixture_weights(weights)", weights).items()
        }
        step = optional_integer("set_mixture_weights(from_step)", from_step, 0)
        return self._from(self._feedback.set_weights(known, step))

    def skip_rows(self, row_ids: Numbers, *, from_step: int | None = None) -> int:
        """Leave rows out from a step on, for good; returns that step. They leave holes: no other row moves.

        Args:
            row_ids: as in `MiniBatchInfo.row_ids`, or as a row log writes them; at most 100,000 in one call.
            from_step: as in `set_mixture_weights`.

        Raises:
            StepOutOfOrder: as `set_mixture_weights`.
            PlanError: there is no such row.
            ServerError: as `set_mixture_weights`.
        """
        self._refuse_rollouts("skip_rows")
        step = optional_integer("skip_rows(from_step)", from_step, 0)
        return self._from(self._feedback.skip_rows(row_ids, step))

    def decisions(self) -> list[dict[str, Any]]:
        """`from_step`, `weights` (or None) and `skip_rows` of what was decided so far, in its order."""
        return list(self._connection.get(self._connection.control("decisions")))

    def row_outcomes(self, first: int, stop: int) -> RowOutcomes:
        """Returns what was reported of the rows of the steps `first` to `stop - 1`; also before a restart.

        Raises:
            ServerError: as `set_mixture_weights`.
        """
        self._refuse_rollouts("row_outcomes")
        begin, end = (
            integer(f"row_outcomes({name})", at, 0) for name, at in (("first", first), ("stop", stop))
        )
        return self._feedback.outcomes(begin, end)

    def put_groups(self, groups: Any) -> Any:
        """Put rollouts; as `Rollouts.put_groups`."""
        self._refuse_unless_rollouts("put_groups")
        from raysvc.client.rollouts import Rollouts

        return Rollouts(self.lease.name, self._connection.server).put_groups(groups)

    def set_weight_version(self, version: int) -> None:
        """Say which weights train from now on (rollouts).

        Raises:
            ConfigError: it would make rows of a step that is planned already too old.
        """
        self._refuse_unless_rollouts("set_weight_version")
        told = integer("set_weight_version(version)", version, 0)
        self._connection.after_commits("set_weight_version", told, self.next_step)

    def publish(self, version: int, state_dict: Mapping[str, Any], *, folder: str | None = None) -> None:
        """Give weights to the producers (`Rollouts.weights`), and say that they train from now on, as `set_weight_version` does.

        Call it before the first step, too, and after a rewind: producers take what was published last, whatever its version.

        Args:
            version: of the weights.
            state_dict: name -> tensor, on any device; it is copied to the CPU.
            folder: one that trainer and producers see, or fsspec URL: the weights lie there as safetensors, the newest two of this run and
                those that a producer reads, and a server that was killed knows them again. None: in Ray's object store, where they are gone
                with the server until the next call.

        Raises:
            ConfigError: as `set_weight_version`, or a value is no tensor.
        """
        import numpy as np
        import ray

        from raysvc.rl.weights import blob_of, remove_older, write_blob

        self._refuse_unless_rollouts("publish")
        told = integer("publish(version)", version, 0)
        optional_text("publish(folder)", folder)
        blob = blob_of(mapping("publish(state_dict)", state_dict))
        if folder is None:
            ref = ray.put(np.frombuffer(blob, np.uint8))
            self._connection.after_commits("publish", told, ref, uuid.uuid4().hex, self.next_step)
            return
        root, name = write_blob(folder, self._run_name, told, blob)
        in_use = self._connection.after_commits("publish", told, root, name, self.next_step)
        if in_use is not None:
            remove_older(root, self._run_name, in_use)

    @cached_property
    def _run_name(self) -> str:
        """Returns what names the files of this run."""
        from raysvc.actors.server.spec import ServeSpec
        from raysvc.rl.weights import run_of

        spec_json, _ = self._connection.get(self._connection.control("spec_json"))
        return run_of(str(ServeSpec.model_validate_json(spec_json).journal))

    def forget_below(self, step: int) -> int:
        """Let a rollout server remove what only steps below `step` need; returns how many files went.

        Call it when the checkpoints that go back further are gone. A rewind or a state below `step` is refused from
        then on.

        Raises:
            StepOutOfOrder: a step below is not committed.
        """
        self._refuse_unless_rollouts("forget_below")
        return int(self._connection.after_commits("forget_below", integer("forget_below(step)", step, 0)))

    def _from(self, step: int) -> int:
        """A decision holds from `step` on: what was known of the sizes of steps to come is out of date."""
        if isinstance(self._window, LookAhead):
            self._window.forget_sizes()
        return step

    def _refuse_unless_rollouts(self, call: str) -> None:
        self._connection.check()
        if not self.lease.forms:
            where, what = f"server.name {self.lease.name!r}", f"serves an entry, and {call} is for rollouts"
            raise ServerError(where, what, "attach to a server that serve_rollouts started")

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


@overload
def attach(
    name: str,
    dp_size: int = 1,
    *,
    rank: None = None,
    roles: Mapping[str, Role | int] | None = None,
    takeover: bool | Literal["force"] = False,
    reader: str = "",
    group: str | None = None,
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> BatchClient: ...
@overload
def attach(
    name: str,
    dp_size: int = 1,
    *,
    rank: int,
    takeover: bool | Literal["force"] = False,
    reader: str = "",
    group: str | None = None,
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> RankClient: ...
@overload
def attach(
    name: str,
    *,
    mesh: AnyMesh,
    coords: Mapping[str, int] | None = None,
    columns: Sequence[str] | None = None,
    takeover: bool | Literal["force"] = False,
    reader: str = "",
    group: str | None = None,
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> RankClient: ...
def attach(
    name: str,
    dp_size: int = 1,
    *,
    rank: int | None = None,
    roles: Mapping[str, Role | int] | None = None,
    mesh: AnyMesh | None = None,
    coords: Mapping[str, int] | None = None,
    columns: Sequence[str] | None = None,
    takeover: bool | Literal["force"] = False,
    reader: str = "",
    group: str | None = None,
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> BatchClient | RankClient:
    """Take the lease of a running server.

    Args:
        name: the server's name.
        dp_size: data-parallel ranks; every mini-batch has one shard per rank.
        rank: rank of this process, if every rank attaches by itself; the result is then a `RankClient`.
        roles: role -> data-parallel size, or a `raysvc.Role` that names its columns or batches too, if several models use the
            same rows; replaces `dp_size`.
        mesh: of all processes, if every one attaches by itself and some are peers that train the same rows (tensor, context,
            pipeline): a `raysvc.Mesh`, a torch `DeviceMesh`, torchtitan's `ParallelDims`, or "launched" (Megatron's parallel
            state, else accelerate's environment, else torchrun's); replaces `dp_size` and `rank`.
        coords: of this process in a `raysvc.Mesh`, axis -> place; None: from RANK, which counts tp first, then cp, then dp.
        columns: of `plan.columns`, that this process of a mesh gets, such as those of its pipeline stage; None: all of them.
        takeover: fence whoever holds the lease; "force": also on a server that another owner started.
        reader: which trainer of a sweep this is, if the server has `share: stream`.
        group: what the ranks of one run have in common; None: from the launcher's environment.
        look_ahead_steps: steps to fetch before they are needed; 0 fetches on demand.
        look_ahead_bytes: limit for those steps together; None: a quarter of the smallest node's object store.
        address: of the Ray cluster; only used if this process is not connected yet.

    Returns:
        A `BatchClient`, or with `rank` or `mesh` a `RankClient`.

    Raises:
        ServerError: no such server.
        VersionMismatch: it runs another minor version of raysvc.
        LeaseHeld: another trainer holds it; says who, and since when.
        SeatRefused: another process has these coordinates, or the group has another mesh.
        ConfigError: an argument of a wrong type or out of range; a column that `plan.columns` does not have; a mesh that does not
            multiply to the processes of the launch.
    """
    from raysvc.actors.launch import find_server, wait_for
    from raysvc.client.seats.own_seat import own_columns, seat_asked_for
    from raysvc.cluster import connect

    known = _checked_roles(roles, dp_size, rank)
    seat = seat_asked_for(mesh, coords, dp_size, rank, roles)
    text("attach(name)", name)
    if takeover != "force":
        flag("attach(takeover)", takeover)
    text("attach(reader)", reader, empty=True)
    optional_text("attach(group)", group)
    integer("attach(look_ahead_steps)", look_ahead_steps, 0)
    optional_integer("attach(look_ahead_bytes)", look_ahead_bytes, 0)
    optional_text("attach(address)", address)
    connect(address)
    server = find_server(name)
    meet(server, name)
    if takeover is True:
        refuse_takeover_of_foreign(server, name)
    limit = Limit(look_ahead_steps, _quarter_of_store() if look_ahead_bytes is None else look_ahead_bytes)
    wanted = own_columns(columns, mesh)
    _check_columns(
        server,
        name,
        [each for one in (wanted, *(role.columns for role in known.values())) for each in one or ()],
    )
    if seat is not None:
        from raysvc.client.rank_client import attach_rank

        client = attach_rank(server, name, seat, group, reader, bool(takeover), limit, wanted)
        if client.lease.cuts and rank is not None:
            client.detach()
            what = f"server {name!r} cuts lines for context parallelism (plan.cp_split), and moves labels"
            raise ConfigError(
                "attach(rank)", what, "attach with mesh=raysvc.Mesh(dp=..., cp=...), or leave it out"
            )
        return client
    ref = server.attach.options(concurrency_group="lease").remote(new_holder(), bool(takeover), reader)
    return BatchClient(server, wait_for(ref, f"server {name!r}"), known, limit)


def _hear(info: Any, shards: Sequence[Any]) -> None:
    """Take the error of a step that could not be formed from all its refs: Ray prints those that nobody takes.

    A shard is not opened: it is asked for only where its step failed.
    """

    def answered(done: Any) -> None:
        if done.exception() is not None:
            for shard in shards:
                shard.future()

    info.future().add_done_callback(answered)


def _check_columns(server: Any, name: str, columns: Sequence[str]) -> None:
    from raysvc.actors.launch import wait_for

    if columns:
        check = server.check_columns.options(concurrency_group="control").remote(tuple(columns))
        wait_for(check, f"server {name!r}")


def _checked_roles(roles: Mapping[str, Role | int] | None, dp_size: int, rank: int | None) -> dict[str, Role]:
    integer("attach(dp_size)", dp_size, 1)
    if rank is not None:
        integer("attach(rank)", rank, 0, dp_size)
    if roles is None:
        return {"": Role(int(dp_size))}
    if not isinstance(roles, Mapping) or not roles:
        raise ConfigError("attach(roles)", f"{roles!r} names no role", "give a mapping, role -> ranks")
    if rank is not None:
        raise ConfigError("attach(roles)", "is given together with rank", "leave one of them out")
    known = {text("attach(roles)", name): as_role(each) for name, each in roles.items()}
    for name, role in known.items():
        if not isinstance(role, Role):
            raise ConfigError(
                f"attach(roles[{name!r}])", f"{role!r} is not a role", "give an integer or a raysvc.Role"
            )
        integer(f"attach(roles[{name!r}])", role.dp_size, 1)
        if role.cp is not None:
            what = f"has cp={role.cp}, which the processes of a mesh have that attach by themselves"
            raise ConfigError(f"attach(roles[{name!r}])", what, "leave it out, or attach with mesh=")
        if role.columns is not None:
            texts(f"attach(roles[{name!r}].columns)", role.columns)
        if role.batches is not None and not hasattr(role.batches, "collate"):
            what, remedy = f"{role.batches!r} makes no batches", "give BatchRules(), or leave it out"
            raise ConfigError(f"attach(roles[{name!r}].batches)", what, remedy)
    return known


def _quarter_of_store() -> int | None:
    import ray

    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    return int(min(stores, default=0) // 4) or None
