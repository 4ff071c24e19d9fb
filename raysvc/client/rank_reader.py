"""Brings the steps of one stream to a rank: asked for from one thread, opened and copied in another.

Always true:
- with look-ahead, the training loop neither sends, nor waits for an answer that is there, nor copies;
- what is needed first is brought first;
- an error comes at its step;
- after `close` the thread is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.actors.server.spec import Role
from raysvc.client.connection import POLL_S, Connection
from raysvc.client.steps import RankStep, private
from raysvc.errors import StepOutOfOrder

if TYPE_CHECKING:
    from raysvc.actors.server.spec import StepInfo


@dataclass(frozen=True)
class RankFetch:
    """A step that was asked for; `step` waits for it."""

    index: int
    step: Callable[[], RankStep]


class RankReader:
    """See the module.

    Args:
        connection: with the rank's seat.
        num_ranks: of the group.
        in_threads: False: the caller sends, waits and copies (no look-ahead).
        stream: "" or the name of an eval.
    """

    def __init__(self, connection: Connection, num_ranks: int, in_threads: bool, stream: str = "") -> None:
        self._connection, self._num_ranks, self._stream = connection, num_ranks, stream
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="raysvc-take") if in_threads else None

    def ask(self, index: int, num_mini_batches: int) -> RankFetch:
        """Have a step fetched; returns at once."""
        args = (index, self._connection.rank, self._num_ranks, self._stream)
        if self._taker is None:
            refs = self._connection.fetch("fetch_rank", 1 + num_mini_batches, *args)
            return RankFetch(index, lambda: self._take(refs))
        taken: Future[RankStep] = Future()
        self._connection.soon(self._send, taken, self._taker, 1 + num_mini_batches, args)
        return RankFetch(index, lambda: self._awaited(taken))

    def arrive(self, fetch: RankFetch) -> RankStep:
        """Wait for a step.

        Raises:
            StepFailed: it could not be made.
        """
        step = fetch.step()
        if step.index != fetch.index:
            raise StepOutOfOrder(self._connection.lease.name, step.index, f"step {fetch.index}")
        return step

    def ask_sizes(self, first: int, stop: int) -> Callable[[], list[int]]:
        """Ask for the bytes of this rank's shards; gives a function that waits for them."""
        wait = self._connection.sizes(first, stop, (Role(self._num_ranks),), self._stream)
        return lambda: [size // self._num_ranks for size in wait()]

    def close(self) -> None:
        """End the thread; what it waits for is given up once the connection is closed or the step is there."""
        if self._taker is not None:
            self._taker.shutdown(wait=True, cancel_futures=True)

    def _send(
        self, taken: Future[RankStep], taker: ThreadPoolExecutor, num_returns: int, args: tuple[Any, ...]
    ) -> None:
        """In the sending thread: ask, and leave the rest to the taker."""
        try:
            taker.submit(self._take_into, taken, self._connection.fetch("fetch_rank", num_returns, *args))
        except Exception as error:  # noqa: BLE001 - raised where the step is awaited
            taken.set_exception(error)

    def _take_into(self, taken: Future[RankStep], refs: list[Any]) -> None:
        try:
            taken.set_result(self._take(refs))
        except Exception as error:  # noqa: BLE001 - raised where the step is awaited
            taken.set_exception(error)

    def _awaited(self, taken: Future[RankStep]) -> RankStep:
        while True:
            try:
                return taken.result(timeout=POLL_S)
            except TimeoutError:
                if taken.done():
                    raise
                self._connection.check()

    def _take(self, refs: list[Any]) -> RankStep:
        """Bring a step to this process; ends early when the client is detached."""
        import ray

        while len(ray.wait(refs, num_returns=len(refs), timeout=POLL_S)[0]) < len(refs):
            self._connection.check()
        info: StepInfo
        info, *shards = self._connection.get(refs)
        begin = time.perf_counter()
        own = tuple(map(private, shards))
        times = (info.read_s, info.collate_s, time.perf_counter() - begin, info.groups_s)
        return RankStep(info.index, info.epoch, own, info.mini_batches, *times)
