"""Keeps fetches outstanding ahead of the step that is needed, within a number of steps and of bytes.

Always true:
- steps are asked for in order, each once;
- beyond the step that is needed at most `limit.steps` are outstanding, and together at most `limit.nbytes`;
- the step that is needed is asked for whatever its size;
- when the iterator ends, by whatever way, nothing is outstanding.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator
from typing import Generic, NamedTuple, Protocol, TypeVar

SIZES_AT_ONCE = 8


class Indexed(Protocol):
    """Something asked for by step number."""

    @property
    def index(self) -> int: ...


F = TypeVar("F", bound=Indexed)


class Limit(NamedTuple):
    """How far ahead.

    Attributes:
        steps: beyond the one that is needed.
        nbytes: of those steps together; None: no limit.
    """

    steps: int
    nbytes: int | None = None


class LookAhead(Generic[F]):
    """The outstanding fetches of one iteration.

    Args:
        ask: starts the fetch of a step; must not block.
        sizes: starts to ask for the bytes of the steps [first, stop), and gives a function that waits for them.
        limit: how far ahead.
    """

    def __init__(
        self, ask: Callable[[int], F], sizes: Callable[[int, int], Callable[[], list[int]]], limit: Limit
    ) -> None:
        self._ask, self._ask_sizes, self._limit = ask, sizes, limit
        self._pending: collections.deque[F] = collections.deque()
        self._sizes: dict[int, int] = {}
        self._coming: tuple[int, Callable[[], list[int]]] | None = None  # (stop, wait) of asked sizes
        self._stop = 0

    @property
    def num_outstanding(self) -> int:
        """Fetches that were not yielded."""
        return len(self._pending)

    @property
    def nbytes(self) -> int:
        """Bytes of the fetches beyond the next one; 0 without a limit in bytes."""
        return sum(self._sizes.get(fetch.index, 0) for fetch in list(self._pending)[1:])

    def run(self, start: int, stop: int) -> Generator[F, None, None]:
        """Fetches of the steps [start, stop), each when it is needed."""
        self._stop = stop
        upcoming = start
        try:
            while True:
                current = self._pending[0].index if self._pending else upcoming
                while upcoming < min(current + 1 + self._limit.steps, stop) and self._fits(upcoming):
                    self._pending.append(self._ask(upcoming))
                    upcoming += 1
                if not self._pending:
                    return
                yield self._pending.popleft()
                self._sizes.pop(current, None)
        finally:
            self._pending.clear()

    def _fits(self, step: int) -> bool:
        if self._limit.nbytes is None:
            return True
        if not self._pending:
            if self._limit.steps:
                self._size_ahead(step)
            return True
        return self.nbytes + self._size(step) <= self._limit.nbytes

    def _size(self, step: int) -> int:
        if step not in self._sizes:
            if self._coming is None or step >= self._coming[0]:
                self._size_ahead(step)
            assert self._coming is not None
            stop, wait = self._coming
            sizes = wait()
            self._sizes.update(zip(range(stop - len(sizes), stop), sizes, strict=True))
            self._coming = None
            if stop < self._stop:
                self._size_ahead(stop)
        return self._sizes[step]

    def _size_ahead(self, first: int) -> None:
        if first in self._sizes or self._coming is not None:
            return
        stop = min(first + SIZES_AT_ONCE, self._stop)
        self._coming = (stop, self._ask_sizes(first, stop))
