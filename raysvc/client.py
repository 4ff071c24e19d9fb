"""A trainer's end of a batch server: attach, iterate steps, commit.

The trainer owns the shards. `fetch` calls are kept outstanding ahead of the step being trained; their
pending refs go straight to the workers and are never opened here.

Always true:
- steps come in order, from the frontier to the last one, each once;
- at most `look_ahead_steps` fetches are outstanding beyond the current step;
- `state_dict` is the committed frontier, never the look-ahead;
- after `detach` no thread, ref or lease of this client is left.
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.errors import LeaseError, StateMismatch, StepOutOfOrder
from raysvc.plan.schedule import Schedule

if TYPE_CHECKING:
    from types import TracebackType

    from raysvc.actors.batch_server import Lease, StepInfo
    from raysvc.collate.info import MiniBatchInfo

log = logging.getLogger(__name__)
STATE_VERSION = 1


@dataclass(frozen=True)
class Mini:
    """One optimizer step's worth of a step.

    Attributes:
        shards: one ObjectRef per data-parallel rank; pass them on, do not open them here.
        info: row ids, lengths, denominators; None while the step is only fetched ahead.
    """

    shards: tuple[Any, ...]
    info: MiniBatchInfo | None


@dataclass(frozen=True)
class Step:
    """What a trainer asks for by number.

    Attributes:
        index: 0-based.
        epoch: 0-based.
        mini_batches: each ends in one optimizer step.
    """

    index: int
    epoch: int
    mini_batches: tuple[Mini, ...]


class ClientStats(NamedTuple):
    """What a client has done since it attached."""

    steps: int  # yielded
    wait_s: float  # the caller waited for steps, all together
    last_wait_s: float  # ... for the newest one
    outstanding: int  # fetches not yet yielded


@dataclass(frozen=True)
class _Fetch:
    index: int
    info: Any
    step: Step


class BatchClient:
    """Holder of a lease; make it with `raysvc.attach`."""

    def __init__(self, server: Any, lease: Lease, dp_size: int, look_ahead_steps: int) -> None:
        self._server = server
        self.lease = lease
        self.dp_size = dp_size
        self.schedule = Schedule.from_json(lease.schedule)
        self._look_ahead_steps = look_ahead_steps
        self._frontier = lease.frontier
        self._outstanding: collections.deque[_Fetch] = collections.deque()
        self._commits: collections.deque[Any] = collections.deque()
        self._steps = 0
        self._wait_s = 0.0
        self._last_wait_s = 0.0
        self._stop = threading.Event()
        self._lost: BaseException | None = None
        self._heart = threading.Thread(target=self._beat, name=f"raysvc-lease-{lease.name}", daemon=True)
        self._heart.start()

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def __len__(self) -> int:
        """Steps that are left."""
        return self.schedule.num_steps - self._frontier

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
        """
        self._outstanding.clear()
        upcoming = self._frontier
        end = self.schedule.num_steps if stop is None else min(stop, self.schedule.num_steps)
        while True:
            current = self._outstanding[0].index if self._outstanding else upcoming
            while upcoming < min(current + 1 + self._look_ahead_steps, end):
                self._outstanding.append(self._fetch(upcoming))
                if on_fetch is not None:
                    on_fetch(self._outstanding[-1].step)
                upcoming += 1
            if not self._outstanding:
                return
            yield self._arrive(self._outstanding.popleft())

    def commit(self, step: int, *, skipped: bool = False) -> None:
        """Say that `step` is trained (or was skipped). Returns at once; a refusal is raised by the next call.

        Raises:
            StepOutOfOrder: a step before it is not committed.
        """
        self._check()
        if step > self._frontier:
            raise StepOutOfOrder(
                self.lease.name, step, f"step {self._frontier}, the first that is not committed"
            )
        if step < self._frontier:
            return
        self._frontier = step + 1
        self._commits.append(self._control("commit", step, skipped))
        while len(self._commits) > 1 and self._ready(self._commits[0]):
            self._get(self._commits.popleft())

    def state_dict(self) -> dict[str, Any]:
        """The committed frontier, as small JSON; safe with fetches in flight."""
        return {
            "version": STATE_VERSION,
            "frontier": self._frontier,
            "epoch": self.schedule.epoch_of(min(self._frontier, self.schedule.num_steps - 1)),
            "plan_hash": self.lease.plan_hash,
            "entry_key": self.lease.entry_key,
            "dp_size": self.dp_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the trainer's checkpoint wins over the server's memory. dp_size may differ.

        Raises:
            StateMismatch: the state belongs to other rows or another order; it says which.
        """
        if state.get("version") != STATE_VERSION:
            remedy = "use the raysvc version that wrote it"
            raise StateMismatch("state.version", f"{state.get('version')!r} is not {STATE_VERSION}", remedy)
        self._move(state["frontier"], state["plan_hash"], state["entry_key"])

    def rewind(self, step: int) -> None:
        """Make `step` the next one to train, earlier or later than the frontier."""
        self._move(step, self.lease.plan_hash, self.lease.entry_key)

    def peek(self, step: int) -> StepInfo:
        """Row ids, lengths and counts of any step; no tensors."""
        info: StepInfo = self._get(self._control("peek", step, self.dp_size, fenced=False))
        return info

    def stats(self) -> ClientStats:
        """Counters since attach."""
        return ClientStats(self._steps, self._wait_s, self._last_wait_s, len(self._outstanding))

    def detach(self) -> None:
        """Give the lease back; safe to call twice, and with fetches in flight."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._outstanding.clear()
        try:
            while self._commits:
                self._get(self._commits.popleft())
            self._get(self._control("detach"))
        finally:
            self._heart.join(timeout=5.0)

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

    def _move(self, frontier: int, plan_hash: str, entry_key: str) -> None:
        self._frontier = self._get(self._control("move", frontier, plan_hash, entry_key))
        self._outstanding.clear()

    def _fetch(self, index: int) -> _Fetch:
        count = self.schedule.mini_batches_at(index)
        method = self._server.fetch.options(
            num_returns=1 + count * self.dp_size, concurrency_group="fetch", max_task_retries=-1
        )
        refs = method.remote(self.lease.fence, index, self.dp_size)
        info, shards = (refs[0], refs[1:]) if isinstance(refs, list) else (refs, [])
        minis = tuple(
            Mini(tuple(shards[m * self.dp_size : (m + 1) * self.dp_size]), None) for m in range(count)
        )
        return _Fetch(index, info, Step(index, self.schedule.epoch_of(index), minis))

    def _arrive(self, fetch: _Fetch) -> Step:
        begin = time.perf_counter()
        info: StepInfo = self._get(fetch.info)
        self._last_wait_s = time.perf_counter() - begin
        self._wait_s += self._last_wait_s
        self._steps += 1
        minis = tuple(
            Mini(m.shards, i) for m, i in zip(fetch.step.mini_batches, info.mini_batches, strict=True)
        )
        return Step(fetch.index, fetch.step.epoch, minis)

    def _control(self, name: str, *args: Any, fenced: bool = True) -> Any:
        method = getattr(self._server, name).options(concurrency_group="control")
        return method.remote(*((self.lease.fence,) if fenced else ()), *args)

    def _get(self, ref: Any) -> Any:
        from raysvc.actors.launch import wait_for

        self._check()
        return wait_for(ref, f"server {self.lease.name!r}")

    @staticmethod
    def _ready(ref: Any) -> bool:
        import ray

        return bool(ray.wait([ref], timeout=0)[0])

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _beat(self) -> None:
        import ray

        from raysvc.actors.launch import wait_for

        period_s = self.lease.ttl_s / 3
        while not self._stop.wait(period_s):
            try:
                wait_for(self._control("heartbeat"), f"server {self.lease.name!r}", self.lease.ttl_s)
            except LeaseError as error:
                self._lost = error
                log.error("lease lost name=%s fence=%d", self.lease.name, self.lease.fence)
                return
            except (ray.exceptions.RayError, TimeoutError) as error:
                log.warning("heartbeat failed name=%s error=%s", self.lease.name, type(error).__name__)


def attach(
    name: str,
    dp_size: int = 1,
    *,
    takeover: bool = False,
    look_ahead_steps: int = 2,
    address: str | None = None,
) -> BatchClient:
    """Take the lease of a running server.

    Args:
        name: the server's name.
        dp_size: data-parallel ranks; every mini-batch comes in so many shards.
        takeover: fence whoever holds the lease.
        look_ahead_steps: steps fetched before they are asked for; 0 fetches on demand.
        address: of the Ray cluster; only used when this process is not connected yet.

    Raises:
        ServerError: no such server.
        LeaseHeld: another trainer holds it.
    """
    from raysvc.actors.launch import find_server, wait_for
    from raysvc.cluster import connect

    connect(address)
    server = find_server(name)
    holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    ref = server.attach.options(concurrency_group="control").remote(holder, takeover)
    return BatchClient(server, wait_for(ref, f"server {name!r}"), dp_size, look_ahead_steps)
