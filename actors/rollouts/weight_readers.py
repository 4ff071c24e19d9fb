"""Remembers the files of weights that producers are reading, so that none is removed under one.

Always true:
- a file that a living producer is reading is in use, whatever was published since;
- a producer that gives no sign of life keeps none in use;
- a server that has just started does not know who reads, and says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Published = tuple[int, list[Any]]


class WeightRead(NamedTuple):
    """A producer, by its owner, and the file that it is reading."""

    owner: str
    name: str


class WeightReaders:
    """See the module.

    Args:
        ttl_s: how long a producer counts as living without a sign of life.
        now_s: a clock that never goes back.
    """

    def __init__(self, ttl_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._now_s, self._begin_s = ttl_s, now_s, now_s()
        self._lock = threading.Lock()  # guards what follows
        self._reading: dict[str, WeightRead] = {}  # by the name of the read

    def begin(self, read: str, owner: str, newest: Callable[[], Published | None]) -> Published | None:
        """Returns what is published last, which `owner` reads from now on, if it is a file."""
        with self._lock:
            found = newest()
            if found is not None and isinstance(found[1][0], str):
                self._reading[read] = WeightRead(owner, found[1][1])
            return found

    def end(self, read: str) -> None:
        """It is read, or will not be."""
        with self._lock:
            self._reading.pop(read, None)

    def in_use(self, is_living: Callable[[str], bool]) -> list[str] | None:
        """Names of the files that are being read; None: that is not known yet, since reads may be older than this server."""
        with self._lock:
            self._reading = {read: its for read, its in self._reading.items() if is_living(its.owner)}
            if self._now_s() - self._begin_s < self._ttl_s:
                return None
            return sorted({its.name for its in self._reading.values()})
