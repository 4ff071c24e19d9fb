"""A rank's own end of a batch server, where every rank attaches by itself (Ray Train, HF Trainer, torchrun).

Axes: R ranks, B rows of a micro-batch, L its width.
Always true:
- a rank gets the bytes that the driver of a controller would hand it;
- a step is collated once for all ranks, and committed when all of them committed it, the peers of a mesh too;
- ranks of one group share a fence; a process of another group is refused, or fences all of them;
- a rank that is further ahead of another than its look-ahead reaches logs who is behind; a rank that is dead is named in
  the log of the others before its lease ends, and by `RankLost` after that;
- with look-ahead the loop neither sends nor copies nor wakes who does;
- what `raysvc.client.lease_client` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from queue import Empty
from typing import TYPE_CHECKING, Any, Literal

from raysvc.actors.server.spec import Role
from raysvc.client.arguments import optional_text, texts
from raysvc.client.connection import Connection, new_holder
from raysvc.client.evals import RankEval
from raysvc.client.lease_client import LeaseClient
from raysvc.client.look_ahead import Limit
from raysvc.client.meter import DeliveredStep
from raysvc.client.rank_reader import RankReader, ReadAhead, StepFetch
from raysvc.client.reach import check_columns, reach
from raysvc.client.steps import MicroBatch as MicroBatch
from raysvc.client.steps import RankStep as RankStep
from raysvc.client.steps import micros_of
from raysvc.errors import ConfigError, PromptsEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from raysvc.actors.mesh import MeshSeat
    from raysvc.actors.server.spec import Lease
    from raysvc.client.seats.own_seat import AnyMesh
    from raysvc.client.torch_dataset import RankDataset


class RankClient(LeaseClient[StepFetch, RankStep]):
    """One seat of a lease; make it with `raysvc.attach_rank`.

    Attributes:
        rank: of data parallelism; its peers in a mesh have the same one, and get the same rows.
        mesh: of the group.
        coords: of this process in it.
    """

    def __init__(
        self, server: Any, lease: Lease, seat: MeshSeat, limit: Limit, columns: tuple[str, ...] | None = None
    ) -> None:
        mesh, coords = seat.mesh, seat.coords
        role = Role(mesh.dp, columns, cp=seat.share(lease.cuts)[0])
        super().__init__(Connection(server, lease, seat, limit.steps + 1), (role,), limit)
        self.rank, self.mesh, self.coords = coords.dp, mesh, coords
        self._reader = RankReader(self._connection, role)

    @property
    def loss_ranks(self) -> int:
        """The ranks over which gradients are averaged: those of data parallelism, and of context parallelism where lines are cut."""
        return self._roles[0].num_shards

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.micro_batches()

    def steps(self, *, stop: int | None = None) -> Iterator[RankStep]:
        """This rank's shards from its frontier on, as numpy arrays; commit each step.

        Raises:
            StepFailed: the step that would come next could not be made.
            StepOutOfOrder: another iteration, or a state, came between.
        """
        return self._run(lambda index: self._reader.ask(index, self.schedule.mini_batches_at(index)), stop)

    def micro_batches(self, device: str = "cpu", *, stop: int | None = None) -> Iterator[MicroBatch]:
        """This rank's micro-batches from its frontier on; commit a step after the one that `ends_step`."""
        return micros_of(self.steps(stop=stop), device)

    def as_torch_dataset(self, device: str = "cpu") -> RankDataset:
        """An `IterableDataset` of this rank's micro-batches; give it to `DataLoader(..., batch_size=None)`.

        A step is committed when the first micro-batch after it is asked for. The ranks are dealt already: keep
        samplers and `accelerator.prepare` away from the loader.
        """
        from raysvc.client.torch_dataset import RankDataset

        return RankDataset(self, device, self._state_at)

    def eval(self, name: str, *, look_ahead_steps: int | None = None) -> RankEval:
        """This rank's part of an eval of the job, from its first step; training does not notice.

        Args:
            look_ahead_steps: None: as in training.

        Raises:
            ServerError: the server has no eval of that name.
        """
        return RankEval(self._connection, name, self._roles[0], self._eval_limit(name, look_ahead_steps))

    def num_micro_batches(self) -> int:
        """Micro-batches of this rank in the whole run; plans all steps."""
        stop, server = self.schedule.num_steps, self._connection.server
        method = server.num_micro_batches.options(concurrency_group="fetch")
        return int(self._connection.get(method.remote(0, stop, self._roles[0])))

    def _iterate(self, ask: Callable[[int], StepFetch], stop: int) -> Iterator[RankStep]:
        return self._read_ahead(ask, stop) if self._limit.steps else super()._iterate(ask, stop)

    def _read_ahead(self, ask: Callable[[int], StepFetch], stop: int) -> Iterator[RankStep]:
        steps = range(self.next_step, min(stop, self.schedule.num_steps))
        sizes = self._sizes(steps.stop)
        self._begin_iteration()
        ahead = ReadAhead(self._connection, ask, self._brought, sizes, self._limit, steps, self._look_beside)
        self._window = ahead
        # few calls and objects, as in `commit`; `ReadAhead.take` in other words
        take, connection, noted = ahead.ready.get_nowait, self._connection, self._noted
        with closing(ahead):
            for index in steps:
                if self._window is not ahead:
                    self._refuse_older(ahead)
                if connection.ended:
                    connection.check()
                ahead.wanted += 1
                try:
                    taken = take()
                except Empty:
                    taken = None
                if taken is None:
                    try:
                        step = self._measured(ahead.wait)
                    except PromptsEnded:
                        return
                else:
                    step, given = taken
                    noted.append(given)
                    del given  # the loop alone holds what it has
                del taken
                if index >= self._taken:
                    self._taken = index + 1
                yield step

    def _brought(self, fetch: StepFetch) -> tuple[RankStep, DeliveredStep]:
        """In the thread of `ReadAhead`."""
        step = self._arrive(fetch)
        return step, self._given(step)

    def _look_beside(self) -> None:
        """In the thread of `ReadAhead`."""
        self._connection.send_commits()
        self._record()

    def _arrive(self, fetch: StepFetch) -> RankStep:
        return self._reader.arrive(fetch)

    def _given(self, step: RankStep) -> DeliveredStep:
        waits = step.groups_s, step.build_s
        given = (step.index, step.infos, step.read_s, step.collate_s, step.copy_s, *waits)
        return DeliveredStep(*given, step.rollout_metrics)

    def _ask_sizes(self, first: int, stop: int) -> Callable[[], list[int | None]]:
        return self._reader.ask_sizes(first, stop)

    def _form(self, step: int) -> int | None:
        nbytes = super()._form(step)
        return None if nbytes is None else nbytes // self.loss_ranks


def attach_rank(
    name: str,
    dp_size: int | None = None,
    *,
    rank: int | None = None,
    mesh: AnyMesh | None = None,
    coords: Mapping[str, int] | None = None,
    columns: Sequence[str] | None = None,
    takeover: bool | Literal["force"] = False,
    reader: str = "",
    group: str | None = None,
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> RankClient:
    """Take one seat of the lease of a running server, in a process that trains one rank: under torchrun, accelerate, Ray Train or Megatron.

    Args:
        name: as in `raysvc.attach`, like the others that are not named here.
        dp_size: data-parallel ranks; None: 1 if `rank` is given.
        rank: data-parallel rank of this process. Without it and `mesh`, the launch says both.
        mesh: of all processes, if some are peers that train the same rows (tensor, context, pipeline): a `raysvc.Mesh`, a torch
            `DeviceMesh`, torchtitan's `ParallelDims`, or "launched" (Megatron's parallel state, else accelerate's environment,
            else torchrun's); replaces `dp_size` and `rank`.
        coords: of this process in a `raysvc.Mesh`, axis -> place; None: from RANK, which counts tp first, then cp, then dp.
        columns: of `plan.columns`, that this process gets, such as those of its pipeline stage; None: all of them.
        group: what the ranks of one run have in common; None: from the launcher's environment.

    Raises:
        LeaseHeld: another group is alive.
        SeatRefused: another process has these coordinates, or the group has another mesh.
        ConfigError: arguments that exclude each other; a mesh that does not multiply to the processes of the launch; as `raysvc.attach`.
    """
    from raysvc.actors.launch import wait_for
    from raysvc.client.seats.launched import launched_group
    from raysvc.client.seats.own_seat import seat_asked_for

    seat = seat_asked_for(mesh, coords, dp_size, rank)
    wanted = None if columns is None else tuple(texts("attach_rank(columns)", columns))
    optional_text("attach_rank(group)", group)
    server, limit = reach("attach_rank", name, takeover, reader, look_ahead_steps, look_ahead_bytes, address)
    check_columns(server, name, wanted or ())
    method = server.attach_rank.options(concurrency_group="lease")
    holder, own = new_holder(), seat.mesh
    group = group or (launched_group() if own.size > 1 else holder)
    peers = {"mesh": own} if own.num_peers > 1 else {}  # servers of earlier versions know ranks alone
    ref = method.remote(group, holder, seat.number, own.dp, bool(takeover), reader, limit.steps, **peers)
    client = RankClient(server, wait_for(ref, f"server {name!r}"), seat, limit, wanted)
    if client.lease.cuts and rank is not None:
        client.detach()
        what = f"server {name!r} cuts lines for context parallelism (plan.cp_split), and moves labels"
        raise ConfigError("attach_rank(rank)", what, "give mesh=raysvc.Mesh(dp=..., cp=...), or leave it out")
    return client
