"""The groups that were trained and forgotten: a digest of each, for one that is put again must still be known.

Always true:
- what was added is in it for good;
- another group is in it with a chance of one in 2^128 for each that was added;
- a key takes 16 bytes, and some 90 until it is packed: of n keys the newest n / 16, or 1,024.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

Key = tuple[str, int]  # uid and attempt of a group
LEAST_PACKED = 1024


class ForgottenKeys:
    """See the module."""

    def __init__(self) -> None:
        self._packed = np.array([], "S16")  # ascending
        self._newest: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._packed) + len(self._newest)

    def __contains__(self, key: Key) -> bool:
        digest = _digest(key)
        if digest in self._newest:
            return True
        at = int(np.searchsorted(self._packed, digest))
        return at < len(self._packed) and bool(self._packed[at] == digest)

    def add(self, keys: Iterable[Key]) -> None:
        """These were forgotten, none of them before."""
        self._newest.update(map(_digest, keys))
        if len(self._newest) > max(LEAST_PACKED, len(self._packed) // 16):
            fresh = np.array(sorted(self._newest), "S16")
            # two ascending runs, which a stable sort merges
            self._packed = np.sort(np.concatenate([self._packed, fresh]), kind="stable")
            self._newest = set()


def _digest(key: Key) -> bytes:
    uid, attempt = key
    return xxhash.xxh3_128_digest(f"{attempt}/{uid}".encode()).rstrip(b"\0")  # as numpy gives it back
