"""Group commits: many callers append, one of them writes for all of them, in order.

1. A caller appends, under the lock that orders what it appends, gets tickets, and seals when it has appended all.
2. It lets go of that lock and waits for the ticket.
3. The first who waits writes all that was sealed until then; the others wait, and the next of them writes the rest.
Always true:
- nothing is written under the caller's lock;
- what a caller appended before it sealed is handed to one `write`, never to two;
- when `wait` returns, all that was appended up to the ticket is written, in the order in which it was appended;
- what could not be written stays first in line: the caller gets the error, and the next one tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupCommit(Generic[T]):
    """See the module.

    Args:
        write: makes a list of items durable, and takes each out of the list when it is; called by one thread at a time.
    """

    def __init__(self, write: Callable[[list[T]], None]) -> None:
        self._write = write
        self._changed = threading.Condition()  # guards what follows
        self._pending: list[T] = []
        self._unsealed: list[T] = []
        self._appended = self._durable = 0
        self._writing = False

    @property
    def last(self) -> int:
        """The newest ticket."""
        with self._changed:
            return self._appended

    def append(self, item: T) -> int:
        """Add an item to what the next `seal` puts in line; returns its ticket."""
        with self._changed:
            self._unsealed.append(item)
            self._appended += 1
            return self._appended

    def seal(self) -> None:
        """Put in line what was appended; without this nobody writes it."""
        with self._changed:
            self._pending += self._unsealed
            self._unsealed = []
            self._changed.notify_all()

    def wait(self, ticket: int) -> None:
        """Return when everything up to `ticket` is durable; whatever `write` raises comes to who called it."""
        while True:
            with self._changed:
                while (self._writing or not self._pending) and self._durable < ticket:
                    self._changed.wait()
                if self._durable >= ticket:
                    return
                self._writing, batch, self._pending = True, self._pending, []
            self._lead(batch)

    def _lead(self, batch: list[T]) -> None:
        count = len(batch)
        try:
            self._write(batch)
        finally:
            with self._changed:
                self._pending = [*batch, *self._pending]
                self._durable += count - len(batch)
                self._writing = False
                self._changed.notify_all()
