"""Brings the steps of one stream to a rank; `ReadAhead` does so in a thread of its own, ahead of the loop that takes them.

Always true:
- with look-ahead, a step that is there is taken without sending, copying or waking anybody;
- the memory of a step that the loop let go of is given back by the thread;
- what is needed first is brought first; shards that are lost with a server are asked for again;
- an error comes at its step;
- after `close` the thread ends soon, and the end of the connection waits for it.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from raysvc.actors.server.spec import Role, StepInfo
from raysvc.client.connection import POLL_S, Connection
from raysvc.client.look_ahead import Limit, LookAhead, Sizes
from raysvc.client.steps import RankStep
from raysvc.collate.shard import private, read_shard
from raysvc.errors import StepFailed, StepOutOfOrder
from raysvc.nodes.objects import are_made

log = logging.getLogger(__name__)
LOOK_AFTER = 1 / 4
LOOK_AFTER_S = (0.002, 0.25)
T = TypeVar("T")


@dataclass(frozen=True)
class StepFetch:
    """A step that was asked for: refs of its info and of its shards, or one of all together."""

    index: int
    refs: list[Any]


class RankReader:
    """Asks for the steps of one stream, and opens them.

    Args:
        connection: with the rank's seat.
        role: ranks of the group, and parts of their shards.
        stream: "" or the name of an eval.
    """

    def __init__(self, connection: Connection, role: Role, stream: str = "") -> None:
        self._connection, self._role, self._stream = connection, role, stream

    def ask(self, index: int, num_mini_batches: int) -> StepFetch:
        """Have a step fetched; returns at once."""
        refs = self._connection.fetch_rank(index, self._role, num_mini_batches, self._stream)
        return StepFetch(index, refs)

    def arrive(self, fetch: StepFetch) -> RankStep:
        """Wait for a step and bring it to this process; ends early when the client is detached.

        Raises:
            StepFailed: it could not be made.
        """
        info, shards, first = self._opened(fetch)
        if info.index != fetch.index:
            raise StepOutOfOrder(self._connection.lease.name, info.index, f"step {fetch.index}")
        self._connection.note_order(info)
        if not self._stream:
            self._connection.arrived(info)
        begin = time.perf_counter()
        own = tuple(read_shard(private(shard)) for shard in shards)
        times = (info.read_s, info.collate_s, time.perf_counter() - begin, info.groups_s, info.build_s)
        return RankStep(info.index, info.epoch, own, info.mini_batches, *times, info.rollout_metrics, first)

    def ask_sizes(self, first: int, stop: int) -> Callable[[], list[int | None]]:
        """Ask for the bytes of this rank's shards; gives a function that waits for them."""
        wait, parts = self._connection.sizes(first, stop, (self._role,), self._stream), self._role.num_shards
        return lambda: [None if size is None else size // parts for size in wait()]

    def _opened(self, fetch: StepFetch, lost: Any = None) -> tuple[StepInfo, list[Any], bool]:
        """Info and shards of what a collator or the server answered, and whether this process is the first of its node.

        Args:
            lost: the ref of the shards that was answered before, and could not be opened.
        """
        import ray

        values = self._values(fetch.refs)
        if len(values) > 1:
            return values[0], values[1:], True
        info, *shards = values[0]
        if not (shards and isinstance(shards[0], ray.ObjectRef)):
            return StepInfo.of_rank(info), shards, True
        known, (ref, first) = StepInfo.of_rank(info), shards
        try:
            (shards,) = self._values([ref])
        except ray.exceptions.ObjectLostError as error:  # with the server; the next one makes the same
            name = self._connection.lease.name
            if ref == lost:
                raise StepFailed(
                    name, fetch.index, f"its shards are lost and the server lives ({error})"
                ) from error
            log.warning("shards lost name=%s step=%d: asked again", name, fetch.index)
            return self._opened(self.ask(fetch.index, len(known.mini_batches)), ref)
        return known, shards, first

    def _values(self, refs: list[Any]) -> list[Any]:
        import ray

        while not are_made(refs, POLL_S):
            self._connection.check()
        try:
            return list(ray.get(refs))
        except ray.exceptions.RayError:
            return list(self._connection.get(refs))  # with the server's own error


def pause_s(taken_s: float, now_s: float) -> float:
    """Returns how long the thread sleeps before it looks what was taken: a quarter of the time since the last step
    was taken, within bounds.

    Args:
        taken_s, now_s: values of one clock.
    """
    least_s, most_s = LOOK_AFTER_S
    return min(max(LOOK_AFTER * (now_s - taken_s), least_s), most_s)


class ReadAhead(Generic[T]):
    """Steps of one iteration, asked for, opened and copied in a thread of its own.

    A loop that takes a step which is there wakes no thread: one that wakes just then wants the interpreter while the loop
    has it. So the thread looks by itself what was taken; a loop that has to wait wakes it.

    Args:
        connection: with the rank's seat.
        ask: starts the fetch of a step.
        bring: waits for it, and makes what `take` gives.
        sizes: of the steps.
        limit: how far ahead.
        steps: of the iteration.
        beside: called in the thread every few milliseconds: it sends commits (see `Connection.sends_commits`).

    Attributes:
        ready: steps that are there, in order; None in the place of one that could not be made: `wait` says why.
        wanted: steps that the loop asked for; the loop alone writes it.
    """

    def __init__(
        self,
        connection: Connection,
        ask: Callable[[int], StepFetch],
        bring: Callable[[StepFetch], T],
        sizes: Sizes,
        limit: Limit,
        steps: range,
        beside: Callable[[], object] | None = None,
    ) -> None:
        self._connection, self._ask, self._bring, self._steps = connection, ask, bring, steps
        self._look_beside = beside
        self._window = LookAhead(self._asked_for, sizes, limit)
        self.ready: SimpleQueue[T | None] = SimpleQueue()
        self.wanted = 0
        self._notes: SimpleQueue[None] = (
            SimpleQueue()
        )  # wakes the thread: an answer, a loop that waits, the end
        self._closed = False
        self._error: Exception | None = None  # of the None in `ready`
        # the thread alone touches those below
        self._seen = 0  # of `wanted`
        self._num_asked = self._num_brought = 0
        self._coming: collections.deque[tuple[StepFetch, Future[Any]]] = collections.deque()
        self._taken_s = time.monotonic()
        self._held: collections.deque[T] = collections.deque()  # brought, and not known to be done with
        connection.beside(self._run, "read")

    @property
    def num_outstanding(self) -> int:
        """Steps that were asked for and not taken."""
        return max(self._num_asked - self.wanted, 0)

    @property
    def nbytes(self) -> int:
        """Returns what `LookAhead.nbytes` does."""
        return self._window.nbytes

    def take(self) -> T | None:
        """The next step if it is there; None: call `wait`.

        Raises:
            LeaseError, ServerError: the connection has ended.
        """
        if self._connection.ended:
            self._connection.check()
        self.wanted += 1
        try:
            return self.ready.get_nowait()
        except Empty:
            return None

    def wait(self) -> T:
        """Wait for the step that `take` had not.

        Raises:
            StepFailed: it could not be made.
            LeaseError, ServerError: the connection has ended.
        """
        self._notes.put(None)
        while self._error is None or not self.ready.empty():
            try:
                step = self.ready.get(timeout=POLL_S)
            except Empty:
                self._connection.check()
            else:
                if step is not None:
                    return step
        raise self._error

    def close(self) -> None:
        """Give up what was not taken; returns at once."""
        self._closed = True
        self._notes.put(None)

    def _asked_for(self, index: int) -> StepFetch:
        fetch = self._ask(index)
        answer, notes = fetch.refs[0].future(), self._notes
        self._num_asked += 1
        self._coming.append((fetch, answer))
        answer.add_done_callback(lambda _: notes.put(None))
        return fetch

    def _run(self) -> None:
        window = self._window.run(self._steps.start, self._steps.stop)
        commits = self._connection.sends_commits() if self._look_beside else nullcontext()
        try:
            with commits, closing(window):
                self._bring_all(window)
        except Exception as error:  # noqa: BLE001 - raised where the step is taken
            self._error = error
            self.ready.put(None)
        finally:
            self._coming.clear()
            self._held.clear()

    def _bring_all(self, window: Generator[StepFetch, None, None]) -> None:
        while self._num_brought < len(self._steps) and not (self._closed or self._connection.closed):
            if self._seen < self.wanted:
                next(window)  # asks for those that may be ahead now
                self._seen += 1
                if self._seen > 1:  # the loop let go of the step before; its memory is given back here
                    self._held.popleft()
                self._taken_s = time.monotonic()
            elif self._coming and self._coming[0][1].done():
                fetch, _ = self._coming.popleft()
                self._held.append(self._bring(fetch))
                self.ready.put(self._held[-1])
                self._num_brought += 1
                self._window.extend()  # of rollouts more may have come
            else:
                self._look()

    def _look(self) -> None:
        """Do what nobody waits for; then wait for an answer, a loop that waits, or the next look."""
        if self._look_beside is not None:
            self._look_beside()
        with suppress(Empty):
            self._notes.get(timeout=pause_s(self._taken_s, time.monotonic()))
