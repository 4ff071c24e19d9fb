"""A rank's own end of a batch server, where every rank attaches by itself (Ray Train, HF Trainer, torchrun).

Axes: R ranks, B rows of a micro-batch, L its width.
Always true:
- a rank gets the bytes that the driver of a controller would hand it;
- a step is collated once for all ranks, and committed when all of them committed it;
- ranks of one group share a fence; a process of another group is refused, or fences all of them;
- with look-ahead, shards are brought here and copied by a thread before they are asked for;
- arrays are private copies, the object store's pages are let go.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raysvc.connection import POLL_S, Connection, new_holder
from raysvc.errors import ConfigError, StepOutOfOrder
from raysvc.look_ahead import Limit, LookAhead
from raysvc.plan.schedule import Schedule
from raysvc.state import frontier_of, state_of
from raysvc.steps import ClientStats

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from raysvc.actors.serving import Lease, StepInfo
    from raysvc.collate.info import MiniBatchInfo
    from raysvc.collate.shard import Denominators, Shard
    from raysvc.torch_dataset import RankDataset

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step as a rank sees it.

    Attributes:
        index: 0-based.
        epoch: 0-based.
        shards: one per mini-batch, numpy, private.
        infos: of the mini-batches over all ranks.
    """

    index: int
    epoch: int
    shards: tuple[Shard, ...]
    infos: tuple[MiniBatchInfo, ...]


@dataclass(frozen=True, eq=False)
class RankMicro:
    """One forward and backward of a rank.

    Attributes:
        step: index of the step.
        epoch: of the step.
        mini: number of the mini-batch in the step.
        tensors: name -> tensor, as `Shard.micro`; and `row_ids`, int64 [B], -1 for a dummy.
        denominators: of the whole mini-batch, over all ranks.
        layout: of the arrays.
        ends_mini: the optimizer steps after this one.
        ends_step: the last one of the step; commit after it.
    """

    step: int
    epoch: int
    mini: int
    tensors: dict[str, torch.Tensor]
    denominators: Denominators
    layout: str
    ends_mini: bool
    ends_step: bool


@dataclass(frozen=True)
class _Fetch:
    index: int
    step: Callable[[], RankStep]


class RankClient:
    """One seat of a lease; make it with `raysvc.attach(name, dp_size=R, rank=r)`."""

    def __init__(self, server: Any, lease: Lease, rank: int, num_ranks: int, limit: Limit) -> None:
        self.lease, self.rank, self.dp_size = lease, rank, num_ranks
        self.schedule = Schedule.from_json(lease.schedule)
        self._connection = Connection(server, lease, rank)
        self._limit = limit
        self._frontier = lease.frontier
        self._window: LookAhead[_Fetch] | None = None
        # one thread: what is needed first is brought first
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="raysvc-take") if limit.steps else None
        self._steps = 0
        self._wait_s = 0.0
        self._last_wait_s = 0.0

    def __iter__(self) -> Iterator[RankMicro]:
        return self.micro_batches()

    @property
    def frontier(self) -> int:
        """This rank's next step."""
        return self._frontier

    def steps(self, *, stop: int | None = None) -> Iterator[RankStep]:
        """This rank's shards from its frontier on, as numpy arrays; commit each step.

        Raises:
            StepFailed: the step that would come next could not be made.
            StepOutOfOrder: another iteration, or a state, came between.
        """
        window = self._window = LookAhead(self._fetch, self._sizes, self._limit)
        end = self.schedule.num_steps if stop is None else min(stop, self.schedule.num_steps)
        with closing(window.run(self._frontier, end)) as fetches:
            while True:
                if self._window is not window:
                    expected = f"a new iteration from step {self._frontier}"
                    raise StepOutOfOrder(self.lease.name, self._frontier, expected)
                fetch = next(fetches, None)
                if fetch is None:
                    return
                yield self._arrive(fetch)

    def micro_batches(self, device: str = "cpu", *, stop: int | None = None) -> Iterator[RankMicro]:
        """This rank's micro-batches from its frontier on; commit a step after the one that `ends_step`."""
        for step in self.steps(stop=stop):
            for number, shard in enumerate(step.shards):
                with_ids = replace(shard, arrays={**shard.arrays, "row_ids": shard.row_ids})
                for index in range(len(shard.micro_batches)):
                    ends_mini = index + 1 == len(shard.micro_batches)
                    yield RankMicro(
                        step=step.index,
                        epoch=step.epoch,
                        mini=number,
                        tensors=_on(device, with_ids.micro(index)),
                        denominators=shard.denominators,
                        layout=shard.layout,
                        ends_mini=ends_mini,
                        ends_step=ends_mini and number + 1 == len(step.shards),
                    )

    def as_torch_dataset(self, device: str = "cpu") -> RankDataset:
        """An `IterableDataset` of this rank's micro-batches; give it to `DataLoader(..., batch_size=None)`.

        A step is committed when the first micro-batch after it is asked for. The ranks are dealt already: keep
        samplers and `accelerator.prepare` away from the loader.
        """
        from raysvc.torch_dataset import RankDataset

        return RankDataset(self, device)

    def num_micro_batches(self) -> int:
        """Micro-batches of this rank that are left; plans all steps that are left."""
        stop, server = self.schedule.num_steps, self._connection.server
        method = server.num_micro_batches.options(concurrency_group="fetch")
        return int(self._connection.get(method.remote(self._frontier, stop, self.dp_size)))

    def commit(self, step: int, *, skipped: bool = False) -> None:
        """Say that this rank trained `step`; returns at once, a refusal is raised by one of the next calls.

        Raises:
            StepOutOfOrder: a step before it is not committed.
        """
        self._connection.check()
        if step > self._frontier:
            expected = f"step {self._frontier}, the first that is not committed"
            raise StepOutOfOrder(self.lease.name, step, expected)
        if step == self._frontier:
            self._frontier = step + 1
            self._connection.commit(step, skipped)

    def state_dict(self) -> dict[str, Any]:
        """This rank's committed frontier; equal on all ranks after a step."""
        return {**state_of(self.lease, self.schedule, self._frontier), "dp_size": self.dp_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; every rank loads it. dp_size may differ.

        Raises:
            StateMismatch: the state belongs to other rows or another order; it says which.
        """
        self._move(frontier_of(state), state["plan"])

    def rewind(self, step: int) -> None:
        """Make `step` the next one; every rank says so."""
        self._move(step, None)

    def stats(self) -> ClientStats:
        """Counters since attach."""
        window = self._window
        outstanding, nbytes = (window.num_outstanding, window.nbytes) if window else (0, 0)
        return ClientStats(self._steps, self._wait_s, self._last_wait_s, outstanding, nbytes)

    def detach(self) -> None:
        """Give the seat back; safe to call twice."""
        self._window = None
        try:
            self._connection.close()
        finally:
            if self._taker is not None:
                self._taker.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> RankClient:
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

    def _move(self, frontier: int, plan_state: dict[str, Any] | None) -> None:
        ref = self._connection.ledger("move", frontier, plan_state, rank=self.rank)
        self._frontier = self._connection.get(ref)
        self._window = None

    def _fetch(self, index: int) -> _Fetch:
        count = self.schedule.mini_batches_at(index)
        refs = self._connection.fetch("fetch_rank", 1 + count, index, self.rank, self.dp_size)
        if self._taker is None:
            return _Fetch(index, lambda: self._take(refs))
        return _Fetch(index, self._taker.submit(self._take, refs).result)

    def _take(self, refs: list[Any]) -> RankStep:
        """Bring a step to this process; ends early when the client is detached."""
        import ray

        while len(ray.wait(refs, num_returns=len(refs), timeout=POLL_S)[0]) < len(refs):
            self._connection.check()
        info: StepInfo
        info, *shards = self._connection.get(refs)
        return RankStep(info.index, info.epoch, tuple(map(_private, shards)), info.mini_batches)

    def _sizes(self, first: int, stop: int) -> Callable[[], list[int]]:
        ref = self._connection.control("sizes", first, stop, (self.dp_size,))
        return lambda: [size // self.dp_size for size in self._connection.get(ref)]

    def _arrive(self, fetch: _Fetch) -> RankStep:
        begin = time.perf_counter()
        step = fetch.step()
        if step.index != fetch.index:
            raise StepOutOfOrder(self.lease.name, step.index, f"step {fetch.index}")
        self._last_wait_s = time.perf_counter() - begin
        self._wait_s += self._last_wait_s
        self._steps += 1
        return step


def attach_rank(
    server: Any,
    name: str,
    rank: int,
    num_ranks: int,
    group: str | None,
    reader: str,
    takeover: bool,
    limit: Limit,
) -> RankClient:
    """Take one rank's seat; arguments as in `raysvc.attach`.

    Raises:
        ConfigError: the rank is none of the ranks.
        LeaseHeld: another group, or another process on that seat, is alive.
    """
    from raysvc.actors.launch import wait_for

    if not 0 <= rank < num_ranks:
        raise ConfigError("attach(rank)", f"{rank} is none of {num_ranks} ranks", "give dp_size=world size")
    method = server.attach_rank.options(concurrency_group="ledger")
    ref = method.remote(group or launched_group(), new_holder(), rank, num_ranks, takeover, reader)
    return RankClient(server, wait_for(ref, f"server {name!r}"), rank, num_ranks, limit)


def launched_group() -> str:
    """What the ranks of one launch have in common, from the environment that torchrun or Ray Train made."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return f"ranks of {env['TORCHELASTIC_RUN_ID']}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "MASTER_ADDR" in env:
        return f"ranks of {env['MASTER_ADDR']}:{env.get('MASTER_PORT', '')}"
    return "ranks"


def _on(device: str, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _private(shard: Shard) -> Shard:
    arrays = {name: array.copy() for name, array in shard.arrays.items()}
    return replace(shard, arrays=arrays, row_ids=shard.row_ids.copy())
