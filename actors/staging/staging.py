"""Shards inside a worker: put by one thread before the step, taken by another when it trains.

A shard is copied once, out of the object store's shared pages into one of a few slots that are used in
turn; on a GPU they are pinned and a copy stream brings the shard to the device while compute runs.

Always true:
- `take(key)` returns the shard that was put under that key, once, and waits for it when it is late;
- it is valid until the next `take` or `release`, and nothing is copied over it before compute is done with it;
- a put waits for a slot, but never keeps out the shard that the training thread waits for;
- `prefetch`, `copy_stream` and `pin_memory` decide when bytes move, never which;
- a wait has a bound or a report every few seconds, and says what is there instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysvc.actors.staging.device import Device
from raysvc.actors.staging.slots import (
    REPORT_EVERY_S,
    Key,
    Lot,
    Slots,
    StagedShard,
    StagingOptions,
    StagingStats,
)
from raysvc.collate.shard import Shard, Wire, read_shard
from raysvc.errors import RaysvcError, WorkerFailed

__all__ = ["Key", "StagedShard", "Staging", "StagingOptions", "StagingStats"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """A shard as it travels, or a list of one ref to it, and what to make of it before it is copied."""

    shard: Shard | Wire | list[Any]
    prepare: Callable[[Shard], Shard] | None

    def opened(self) -> tuple[Shard, float]:
        """Returns what is to be copied, and the seconds until it was on this node."""
        begin = time.perf_counter()
        value = self.shard
        if isinstance(value, list):
            import ray

            value = ray.get(value[0])
        shard = read_shard(value)
        fetch_s = time.perf_counter() - begin
        return prepared(shard, self.prepare), fetch_s


def prepared(shard: Shard | Wire, prepare: Callable[[Shard], Shard] | None) -> Shard:
    """A shard as it travels, made into what is copied."""
    read = read_shard(shard)
    return read if prepare is None else prepare(read)


class Staging:
    """Hand-over between the thread that receives shards and the thread that trains.

    Args:
        rank: named in errors and logs.
        device: torch device string, or a device.
        options: how.
    """

    def __init__(self, rank: int, device: str | Device, options: StagingOptions | None = None) -> None:
        self._rank = rank
        self._options = options or StagingOptions()
        self._changed = threading.Condition()  # guards everything below, and the slots
        self._staged: dict[Key, Lot | _Source | BaseException] = {}
        self._held: Lot | None = None  # taken last; compute may still use it
        self._wanted: Key | None = None  # the training thread waits for it
        self._slots = Slots(rank, device, self._options, self._changed, self._is_kept_out)

    def put(
        self, key: Key, shard: Shard | Wire | list[Any], prepare: Callable[[Shard], Shard] | None = None
    ) -> int:
        """Take in a shard, or a list of one ref to it; returns its bytes (0 for what is opened when taken).

        `prepare` is what to make of a shard before it is copied. A failure is raised by `take` too.
        """
        lazy = self._options.timed(key) or not self._options.prefetch
        try:
            if not isinstance(shard, list):  # prepared here, not in the training thread
                shard, prepare = prepared(shard, prepare), None
            source = _Source(shard, prepare)
            lot = source if lazy else self._slots.load(key, *source.opened())
        except Exception as error:
            self._offer(key, error)
            raise
        self._offer(key, lot)
        nbytes = shard.nbytes if isinstance(shard, Shard) else 0
        log.debug("staged rank=%d step=%d mini=%d bytes=%d", self._rank, *key, nbytes)
        return nbytes

    def take(self, key: Key, timeout_s: float) -> tuple[StagedShard, float]:
        """The shard under `key`, and the seconds that were waited for it: 0 if it was there. Called by the training thread.

        Raises:
            WorkerFailed: it did not come within `timeout_s`, or could not be copied.
            RaysvcError: what `put` raised on purpose.
        """
        self.release()
        found, wait_s = self._wait_for(key, timeout_s)
        if isinstance(found, RaysvcError):
            raise found
        if isinstance(found, BaseException):
            raise WorkerFailed(self._rank, "stage", f"{type(found).__name__}: {found}") from found
        lot = found if isinstance(found, Lot) else self._slots.load(key, *found.opened())
        self._slots.device.wait_on_compute(lot.copied)
        with self._changed:
            self._held = lot
        return lot.staged, wait_s

    def release(self) -> None:
        """The shard taken last may be overwritten as soon as what compute was asked for up to now is done."""
        with self._changed:
            if self._held is not None:
                self._slots.release(self._held)
            self._held = None
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget what was staged and not taken (after a rewind)."""
        with self._changed:
            for lot in self._staged.values():
                if isinstance(lot, Lot):
                    self._slots.give_back(lot.slot)
            self._staged.clear()
            self._changed.notify_all()

    def stats(self) -> StagingStats:
        """Counters since the start."""
        with self._changed:
            return self._slots.stats

    def _offer(self, key: Key, lot: Lot | _Source | BaseException) -> None:
        with self._changed:
            before = self._staged.get(key)
            if isinstance(before, Lot):
                self._slots.give_back(before.slot)
            self._staged[key] = lot
            self._changed.notify_all()

    def _wait_for(self, key: Key, timeout_s: float) -> tuple[Lot | _Source | BaseException, float]:
        with self._changed:
            if key in self._staged:
                return self._staged.pop(key), 0.0
            begin = time.perf_counter()
            self._wanted = key
            self._changed.notify_all()
            try:
                while key not in self._staged:
                    waited_s = time.perf_counter() - begin
                    if waited_s >= timeout_s:
                        there = sorted(self._staged)
                        cause = f"no shard for (step, mini) {key} after {waited_s:.0f} s, staged are {there}"
                        raise WorkerFailed(self._rank, "take", cause)
                    if not self._changed.wait(min(REPORT_EVERY_S, timeout_s - waited_s)):
                        log.warning("waiting rank=%d step=%d mini=%d for=%.0fs", self._rank, *key, waited_s)
            finally:
                self._wanted = None
            return self._staged.pop(key), time.perf_counter() - begin

    def _is_kept_out(self) -> bool:
        """Returns whether the training thread waits for a shard that is not here; then whatever is put has to go on."""
        return self._wanted is not None and self._wanted not in self._staged
