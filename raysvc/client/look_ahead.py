"""Keeps fetches outstanding ahead of the step that is needed, within a number of steps and of bytes.

Always true:
- steps are asked for in order, each once;
- beyond the step that is needed at most `limit.steps` are outstanding, and together at most `limit.nbytes`;
- the step that is needed is asked for whatever its size;
- a step of unknown size is asked for when it is needed, not before;
- when the iterator ends, by whatever way, nothing is outstanding.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator
from typing import Generic, NamedTuple, Protocol, TypeVar

SIZES_AT_ONCE = 16


class NumberedStep(Protocol):
    """Something asked for by step number."""

    @property
    def index(self) -> int: ...


F = TypeVar("F", bound=NumberedStep)


class Limit(NamedTuple):
    """Says how far ahead steps are asked for.

    Attributes:
        steps: beyond the one that is needed.
        nbytes: of those steps together; None: no limit.
    """

    steps: int
    nbytes: int | None = None


class Sizes(Protocol):
    """Bytes of steps."""

    def prepare(self, step: int) -> None:
        """The size of this step, or of those after it, is asked for soon."""

    def size(self, step: int) -> int | None:
        """Bytes of a step; None: nobody knows yet. Steps are asked for in order, one perhaps several times."""

    def forget(self) -> None:
        """Steps that were not asked for yet are made otherwise from now on."""


class LookAhead(Generic[F]):
    """The outstanding fetches of one iteration.

    Args:
        ask: starts the fetch of a step; must not block.
        sizes: of the steps.
        limit: how far ahead.
    """

    def __init__(self, ask: Callable[[int], F], sizes: Sizes, limit: Limit) -> None:
        self._ask, self._sizes, self._limit = ask, sizes, limit
        self._pending: collections.deque[F] = collections.deque()
        self._nbytes: dict[int, int] = {}  # of the pending steps, where known
        self._current = self._upcoming = self._stop = 0  # needed now; asked for next; end

    @property
    def num_outstanding(self) -> int:
        """Fetches that were not yielded."""
        return len(self._pending)

    @property
    def nbytes(self) -> int:
        """Bytes of the fetches beyond the one that is needed; 0 without a limit in bytes."""
        return sum(
            self._nbytes.get(fetch.index, 0) for fetch in list(self._pending) if fetch.index > self._current
        )

    def run(self, start: int, stop: int) -> Generator[F, None, None]:
        """Fetches of the steps [start, stop), each when it is needed."""
        self._current = self._upcoming = start
        self._stop = stop
        try:
            while self._current < stop:
                self.extend()
                yield self._pending.popleft()
                self._current += 1
                self._nbytes.pop(self._current, None)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of what is outstanding; nothing more is asked for."""
        self._stop = 0
        self._pending.clear()

    def extend(self) -> None:
        """Ask for what fits now; `run` does so before it yields, and another time is when sizes may be known."""
        while self._upcoming < min(self._current + 1 + self._limit.steps, self._stop) and self._fits(
            self._upcoming
        ):
            self._pending.append(self._ask(self._upcoming))
            self._upcoming += 1

    def forget_sizes(self) -> None:
        """Sizes of steps that were not asked for yet are not known any more."""
        self._sizes.forget()

    def _fits(self, step: int) -> bool:
        if self._limit.nbytes is None:
            return True
        if step == self._current:
            if self._limit.steps:
                self._sizes.prepare(step)
            return True
        size = self._sizes.size(step)
        if size is None or self.nbytes + size > self._limit.nbytes:
            return False
        self._nbytes[step] = size
        return True


class PlannedSizes:
    """Sizes that a plan knows, asked for `SIZES_AT_ONCE` at a time and ahead of need.

    Args:
        ask: starts to ask for the bytes of the steps [first, stop), and gives a function that waits for them.
        stop: there is no step from here on.
    """

    def __init__(self, ask: Callable[[int, int], Callable[[], list[int | None]]], stop: int) -> None:
        self._ask, self._stop = ask, stop
        self._known: dict[int, int] = {}  # of the newest answer
        self._coming: tuple[int, Callable[[], list[int | None]]] | None = None  # (stop, wait) of asked sizes

    def prepare(self, step: int) -> None:
        """Start to ask for the sizes of this step and the next ones."""
        if step in self._known or self._coming is not None:
            return
        stop = min(step + SIZES_AT_ONCE, self._stop)
        self._coming = (stop, self._ask(step, stop))

    def size(self, step: int) -> int | None:
        """Bytes of a step; waits when they were not asked for in time. None: its rows are not there yet."""
        if step not in self._known:
            if self._coming is None or step >= self._coming[0]:
                self._coming = None
                self.prepare(step)
            assert self._coming is not None
            stop, wait = self._coming
            sizes = wait()
            told = zip(range(stop - len(sizes), stop), sizes, strict=True)
            self._known = {place: size for place, size in told if size is not None}
            self._coming = None
            if stop < self._stop and None not in sizes:
                self.prepare(stop)
        return self._known.get(step)

    def forget(self) -> None:
        """They are asked for again."""
        self._known, self._coming = {}, None


class FormedSizes:
    """Sizes that are known once a step is formed, of what others deliver.

    Args:
        form: has a step formed if that is possible now, and gives its bytes; None when it is not.
    """

    def __init__(self, form: Callable[[int], int | None]) -> None:
        self._form = form

    def prepare(self, step: int) -> None:
        """Nothing can be asked ahead."""

    def size(self, step: int) -> int | None:
        """Bytes of a step, None while it cannot be formed."""
        return self._form(step)

    def forget(self) -> None:
        """Nothing is kept."""
