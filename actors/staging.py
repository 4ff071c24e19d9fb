"""Shards inside a worker: put by one thread before the step, taken by another when it trains.

Always true:
- `take(key)` returns the shard that was put under that key, once, and waits for it when it is late;
- a shard is copied out of the object store's shared pages when it is put, and the page is let go;
- a wait has a bound, and its error names the key and what is there instead.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace

from raysvc.collate.shard import Shard
from raysvc.errors import WorkerFailed

log = logging.getLogger(__name__)
REPORT_EVERY_S = 10.0
Key = tuple[int, int]  # (step, mini-batch)


@dataclass(frozen=True)
class StagedShard:
    """A shard on the worker's device.

    Attributes:
        shard: as it was sent, its arrays now tensors of the same shapes.
        copy_s: seconds the copy took.
    """

    shard: Shard
    copy_s: float


class Staging:
    """Hand-over between the thread that receives shards and the thread that trains."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank = rank
        self._device = device
        self._changed = threading.Condition()
        self._staged: dict[Key, StagedShard | BaseException] = {}  # guarded by self._changed

    def put(self, key: Key, shard: Shard) -> int:
        """Copy a shard to the device and offer it; returns its bytes. A failure is raised by `take` too."""
        try:
            self._offer(key, self._copy(shard))
        except Exception as error:
            self._offer(key, error)
            raise
        log.debug("staged rank=%d step=%d mini=%d bytes=%d", self._rank, *key, shard.nbytes)
        return shard.nbytes

    def take(self, key: Key, timeout_s: float) -> tuple[StagedShard, float]:
        """The shard under `key`, and the seconds that were waited for it.

        Raises:
            WorkerFailed: it did not come within `timeout_s`, or could not be copied.
        """
        begin = time.perf_counter()
        with self._changed:
            while key not in self._staged:
                waited_s = time.perf_counter() - begin
                if waited_s >= timeout_s:
                    cause = f"no shard for (step, mini) {key} after {waited_s:.0f} s, staged are {sorted(self._staged)}"
                    raise WorkerFailed(self._rank, "take", cause)
                if not self._changed.wait(min(REPORT_EVERY_S, timeout_s - waited_s)):
                    log.warning("waiting rank=%d step=%d mini=%d for=%.0fs", self._rank, *key, waited_s)
            staged = self._staged.pop(key)
        if isinstance(staged, BaseException):
            raise WorkerFailed(self._rank, "stage", f"{type(staged).__name__}: {staged}") from staged
        return staged, time.perf_counter() - begin

    def clear(self) -> None:
        """Forget what was staged and not taken (after a rewind)."""
        with self._changed:
            self._staged.clear()

    def _offer(self, key: Key, staged: StagedShard | BaseException) -> None:
        with self._changed:
            self._staged[key] = staged
            self._changed.notify_all()

    def _copy(self, shard: Shard) -> StagedShard:
        import torch

        begin = time.perf_counter()
        tensors = {name: torch.tensor(array, device=self._device) for name, array in shard.arrays.items()}
        return StagedShard(replace(shard, arrays=tensors), time.perf_counter() - begin)
