"""Memory of a step's arrays, used again when nobody holds the arrays of an earlier step.

The first touch of fresh memory costs as much as the copy into it, and malloc returns large blocks to the system when they are freed. Blocks of a step's
arrays are kept here; a process that collates all the time has malloc keep what they are computed with (`keep_freed_memory`).

Always true:
- a block is used again only when no array in it is alive;
- at most two blocks are kept, each at most twice as large as it was last needed; small ones are left to malloc.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

SMALL_BYTES = 1 << 20
MOST_BLOCKS = 2  # steps that are collated at the same time, by default
_PROBE: list[Any] = [object()]
_ALONE = sys.getrefcount(_PROBE[0])  # of what only a list holds


class ReusedMemory:
    """See the module. Safe in threads."""

    def __init__(self, small_bytes: int = SMALL_BYTES) -> None:
        self._small_bytes = small_bytes
        self._kept: list[npt.NDArray[np.uint8]] = []  # guarded by the lock
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [num_bytes], with anything in it."""
        if num_bytes < self._small_bytes:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            free = [place for place in range(len(self._kept)) if sys.getrefcount(self._kept[place]) == _ALONE]
            for place in free:
                if num_bytes <= len(self._kept[place]) <= 2 * num_bytes:
                    return self._kept[place][:num_bytes]
            for place in reversed(free):
                del self._kept[place]
            fresh = np.empty(num_bytes, np.uint8)
            if len(self._kept) < MOST_BLOCKS:
                self._kept.append(fresh)
            return fresh[:num_bytes]  # every array in it holds `fresh` as its base

    def forget(self) -> None:
        """Keep none; what is in use stays with those who use it."""
        with self._lock:
            self._kept.clear()


MEMORY = ReusedMemory()
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory(limit_bytes: int = 256 << 20) -> None:
    """Have malloc keep up to `limit_bytes` that were freed at the end of a heap, in this process; nothing where it is not glibc's.

    By itself glibc gives back what is free beyond twice the largest block, so a step's temporaries are new pages each time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(
            _M_MMAP_THRESHOLD, 32 << 20
        )  # the most that glibc takes; larger ones are not temporaries
        libc.mallopt(_M_TRIM_THRESHOLD, limit_bytes)


def give_back_freed_memory() -> None:
    """Return what is free to the system, whatever `keep_freed_memory` said."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
