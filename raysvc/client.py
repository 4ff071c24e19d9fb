"""A trainer's end of a batch server: attach, iterate steps, commit.

The trainer owns the shards. `fetch` calls are kept outstanding ahead of the step being trained; their
pending refs go straight to the workers and are never opened here.

Always true:
- steps come in order, from the frontier to the last one, each once;
- look-ahead is bounded in steps and in bytes, and changes no byte of what comes;
- `state_dict` is the committed frontier, never the look-ahead;
- after `detach` no thread, ref or lease of this client is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from raysvc.connection import Connection, new_holder
from raysvc.errors import StepOutOfOrder
from raysvc.eval_stream import EvalStream
from raysvc.look_ahead import Limit, LookAhead
from raysvc.plan.schedule import Schedule
from raysvc.state import frontier_of, state_of
from raysvc.steps import ClientStats as ClientStats
from raysvc.steps import Mini as Mini
from raysvc.steps import Step as Step

if TYPE_CHECKING:
    from types import TracebackType

    from raysvc.actors.serving import Lease, StepInfo, StepOutline
    from raysvc.rank_client import RankClient

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Fetch:
    index: int
    info: Any
    step: Step


class BatchClient:
    """Holder of a lease; make it with `raysvc.attach`.

    Args:
        server: Ray handle.
        lease: of this client.
        roles: role -> data-parallel size; the first one's shards are `Mini.shards`.
        limit: of the look-ahead.
    """

    def __init__(self, server: Any, lease: Lease, roles: Mapping[str, int], limit: Limit) -> None:
        self.lease = lease
        self.roles = dict(roles)
        self.schedule = Schedule.from_json(lease.schedule)
        self._connection = Connection(server, lease)
        self._limit = limit
        self._frontier = lease.frontier
        self._window: LookAhead[_Fetch] | None = None  # of the newest iteration; an older one is refused
        self._steps = 0
        self._wait_s = 0.0
        self._last_wait_s = 0.0

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def __len__(self) -> int:
        """Steps that are left."""
        return self.schedule.num_steps - self._frontier

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of the first role."""
        return next(iter(self.roles.values()))

    @property
    def frontier(self) -> int:
        """The next step to train; all before it are committed."""
        return self._frontier

    def steps(
        self, on_fetch: Callable[[Step], object] | None = None, *, stop: int | None = None
    ) -> Iterator[Step]:
        """Steps from the frontier on; commit each when it is trained.

        Args:
            on_fetch: called with each step as soon as it is asked for, before its shards exist: hand the
                refs to the workers there. Must not block.
            stop: end before this step; None: after the last one of the plan.

        Raises:
            StepFailed: the step that would come next could not be made.
            StepOutOfOrder: another iteration, a rewind or a state came between.
        """

        def ask(index: int) -> _Fetch:
            fetch = self._fetch(index)
            if on_fetch is not None:
                on_fetch(fetch.step)
            return fetch

        window = self._window = LookAhead(ask, self._sizes, self._limit)
        end = self.schedule.num_steps if stop is None else min(stop, self.schedule.num_steps)
        with closing(window.run(self._frontier, end)) as fetches:
            while True:
                if self._window is not window:
                    expected = f"a new iteration from step {self._frontier}, after the rewind"
                    raise StepOutOfOrder(self.lease.name, self._frontier, expected)
                fetch = next(fetches, None)
                if fetch is None:
                    return
                yield self._arrive(fetch)

    def fetch(self, index: int) -> Step:
        """Any one step, now; the same bytes every time. Moves nothing.

        Raises:
            StepOutOfOrder: there is no such step.
            StepFailed: it could not be made.
        """
        self._in_range(index)
        return self._arrive(self._fetch(index))

    def commit(self, step: int, *, skipped: bool = False) -> None:
        """Say that `step` is trained (or was skipped). Returns at once; a refusal is raised by one of the next calls.

        Raises:
            StepOutOfOrder: a step before it is not committed.
        """
        self._connection.check()
        if step > self._frontier:
            raise StepOutOfOrder(
                self.lease.name, step, f"step {self._frontier}, the first that is not committed"
            )
        if step < self._frontier:
            return
        self._frontier = step + 1
        self._connection.commit(step, skipped)

    def state_dict(self) -> dict[str, Any]:
        """The committed frontier, as small JSON; safe with fetches in flight."""
        return {**state_of(self.lease, self.schedule, self._frontier), "dp_size": self.dp_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the trainer's checkpoint wins over the server's memory. dp_size may differ.

        Raises:
            StateMismatch: the state belongs to other rows or another order; it says which.
        """
        self._move(frontier_of(state), state["plan"])

    def rewind(self, step: int) -> None:
        """Make `step` the next one to train, earlier or later than the frontier."""
        self._move(step, None)

    def peek(self, step: int) -> StepOutline:
        """Row ids, lengths and counts of any step, from the plan alone; no row is read.

        Raises:
            StepOutOfOrder: there is no such step.
        """
        self._in_range(step)
        outline: StepOutline = self._connection.get(self._connection.control("peek", step, self.dp_size))
        return outline

    def eval(self, name: str, *, look_ahead_steps: int | None = None) -> EvalStream:
        """An eval of the job, from its first step; training does not notice.

        Args:
            look_ahead_steps: None: as in training.

        Raises:
            ServerError: the server has no eval of that name.
        """
        steps = self._limit.steps if look_ahead_steps is None else look_ahead_steps
        return EvalStream(self._connection, name, self.dp_size, Limit(steps, self._limit.nbytes))

    def put_groups(self, groups: Any) -> Any:
        """Put rollouts; as `Rollouts.put_groups`."""
        from raysvc.producers import Rollouts

        return Rollouts(self.lease.name, self._connection.server).put_groups(groups)

    def set_weight_version(self, version: int) -> None:
        """Say which weights train from now on (rollouts).

        Raises:
            ConfigError: it would make rows of a step that is planned already too old.
        """
        self._connection.get(self._connection.ledger("set_weight_version", version))

    def stats(self) -> ClientStats:
        """Counters since attach."""
        window = self._window
        outstanding, nbytes = (window.num_outstanding, window.nbytes) if window else (0, 0)
        return ClientStats(self._steps, self._wait_s, self._last_wait_s, outstanding, nbytes)

    def detach(self) -> None:
        """Give the lease back; safe to call twice, and with fetches in flight."""
        self._window = None
        self._connection.close()

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
            return
        try:  # the loop's own error is the one to see
            self.detach()
        except Exception:
            log.warning("detach failed name=%s", self.lease.name, exc_info=True)

    def _in_range(self, step: int) -> None:
        if not 0 <= step < self.schedule.num_steps:
            raise StepOutOfOrder(self.lease.name, step, f"a step from 0 to {self.schedule.num_steps - 1}")

    def _move(self, frontier: int, plan_state: dict[str, Any] | None) -> None:
        self._frontier = self._connection.get(self._connection.ledger("move", frontier, plan_state))
        self._window = None

    def _sizes(self, first: int, stop: int) -> Callable[[], list[int]]:
        ref = self._connection.control("sizes", first, stop, tuple(self.roles.values()))
        return lambda: list(self._connection.get(ref))

    def _fetch(self, index: int) -> _Fetch:
        count, sizes = self.schedule.mini_batches_at(index), tuple(self.roles.values())
        info, *shards = self._connection.fetch("fetch", 1 + count * sum(sizes), index, sizes)
        minis = tuple(self._mini(shards[m * sum(sizes) : (m + 1) * sum(sizes)]) for m in range(count))
        step = Step(index, self.schedule.epoch_of(index), minis, self.schedule.update_epochs)
        return _Fetch(index, info, step)

    def _mini(self, shards: list[Any]) -> Mini:
        by_role: dict[str, tuple[Any, ...]] = {}
        for role, dp_size in self.roles.items():
            by_role[role], shards = tuple(shards[:dp_size]), shards[dp_size:]
        return Mini(next(iter(by_role.values())), None, {} if "" in by_role else by_role)

    def _arrive(self, fetch: _Fetch) -> Step:
        begin = time.perf_counter()
        info: StepInfo = self._connection.get(fetch.info)
        if info.index != fetch.index:
            raise StepOutOfOrder(self.lease.name, info.index, f"step {fetch.index}")
        self._last_wait_s = time.perf_counter() - begin
        self._wait_s += self._last_wait_s
        self._steps += 1
        minis = tuple(
            Mini(mini.shards, made, mini.by_role, rows)
            for mini, made, rows in zip(fetch.step.mini_batches, info.mini_batches, info.rows, strict=True)
        )
        facts = (info.weight_versions, info.read_s, info.collate_s)
        return Step(fetch.index, fetch.step.epoch, minis, fetch.step.update_epochs, *facts)


@overload
def attach(
    name: str,
    dp_size: int = 1,
    *,
    rank: None = None,
    roles: Mapping[str, int] | None = None,
    takeover: bool = False,
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
    takeover: bool = False,
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
    roles: Mapping[str, int] | None = None,
    takeover: bool = False,
    reader: str = "",
    group: str | None = None,
    look_ahead_steps: int = 2,
    look_ahead_bytes: int | None = None,
    address: str | None = None,
) -> BatchClient | RankClient:
    """Take the lease of a running server.

    Args:
        name: the server's name.
        dp_size: data-parallel ranks; every mini-batch comes in so many shards.
        rank: of this process, when every rank attaches by itself; then a `RankClient` comes back.
        roles: role -> data-parallel size, when several models train on the same rows; instead of `dp_size`.
        takeover: fence whoever holds the lease.
        reader: which trainer of a sweep this is, where the server has `share: stream`.
        group: what the ranks of one run have in common; None: from the launcher's environment.
        look_ahead_steps: steps fetched before they are asked for; 0 fetches on demand.
        look_ahead_bytes: of those steps together; None: a quarter of the smallest node's object store.
        address: of the Ray cluster; only used when this process is not connected yet.

    Returns:
        A `BatchClient`, or with `rank` a `RankClient`.

    Raises:
        ServerError: no such server.
        LeaseHeld: another trainer holds it; says who, and since when.
    """
    from raysvc.actors.launch import find_server, wait_for
    from raysvc.cluster import connect

    connect(address)
    server = find_server(name)
    limit = Limit(look_ahead_steps, _quarter_of_store() if look_ahead_bytes is None else look_ahead_bytes)
    if rank is not None:
        from raysvc.rank_client import attach_rank

        return attach_rank(server, name, rank, dp_size, group, reader, takeover, limit)
    ref = server.attach.options(concurrency_group="ledger").remote(new_holder(), takeover, reader)
    return BatchClient(server, wait_for(ref, f"server {name!r}"), roles or {"": dp_size}, limit)


def _quarter_of_store() -> int | None:
    import ray

    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    return int(min(stores, default=0) // 4) or None
