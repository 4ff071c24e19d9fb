"""Commits of one seat that are not sent yet.

Always true:
- a commit that is noted wakes nobody while a thread looks for commits by itself, unless `AT_MOST` wait already;
- what is taken says all that was noted: the newest commit covers those before it, and a skipped step stays named;
- none is lost between the loop that notes, the thread that looks, and its end.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from raysvc.actors.server.spec import Commit

AT_MOST = 8


class Commits:
    """See the module.

    Args:
        wake: has `take` called soon.

    Attributes:
        moves: of this seat so far.
        lookers: threads in `looked_for`.
        takes: how often `take` was called.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.moves = 0
        self._wake = wake
        self._noted: collections.deque[tuple[int, bool, int]] = collections.deque()
        self._lock = threading.Lock()
        self.lookers = 0  # written under _lock
        self.takes = 0  # written by who takes

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, step: int, skipped: bool) -> None:
        """Have a commit sent soon."""
        self._noted.append((step, skipped, self.moves))
        if not self.lookers or len(self._noted) >= AT_MOST:
            self._wake()

    def take(self) -> list[Commit]:
        """Returns what has to be sent of those noted so far, in their order; one thread at a time."""
        self.takes += 1
        return covering([Commit(*self._noted.popleft()) for _ in range(len(self._noted))])

    @contextmanager
    def looked_for(self) -> Iterator[None]:
        """While it lasts a thread calls `take` every few milliseconds; look once more after it."""
        with self._lock:
            self.lookers += 1
        try:
            yield
        finally:
            with self._lock:
                self.lookers -= 1


def covering(commits: Sequence[Commit]) -> list[Commit]:
    """Those of `commits` that say all of it together; within one move their steps ascend, and a move makes those before it void."""
    return [one for one in commits[:-1] if one.skipped] + list(commits[-1:])
