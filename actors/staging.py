"""Shards inside a worker: put by one thread before the step, taken by another when it trains.

A shard is copied once, out of the object store's shared pages into a ring of memory that is allocated once and used
again; on a GPU the ring is pinned and a copy stream brings the shard to the device while compute runs.

Always true:
- `take(key)` returns the shard that was put under that key, once, and waits for it when it is late;
- it is valid until the next `take` or `release`, and nothing is copied over it before compute is done with it;
- shards in the ring never take more than its bytes: a put waits for room (back-pressure). Only while the training
  thread waits for a shard that others in the ring keep out does a put go beside the ring, and is counted;
- `prefetch`, `copy_stream` and `pin_memory` decide when bytes move, never which;
- a wait has a bound or a report every few seconds, and says what is there instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.actors.device import Device, Event, open_device
from raysvc.actors.ring import LINE, Ring, Room, aligned
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError, WorkerFailed

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
REPORT_EVERY_S = 10.0
SHARDS_IN_RING = 3  # one trains, one is ready, one arrives
Key = tuple[int, int]  # (step, mini-batch)


@dataclass(frozen=True)
class StagingOptions:
    """How shards are staged.

    Attributes:
        prefetch: copy when a shard arrives; False: when it is taken.
        copy_stream: False: copies queue behind compute.
        pin_memory: False: plain host memory.
        ring_bytes: of the ring; None: three times the largest shard.
        timing: measure each part by itself: no overlap, and the caller waits for every copy.
    """

    prefetch: bool = True
    copy_stream: bool = True
    pin_memory: bool = True
    ring_bytes: int | None = None
    timing: bool = False


class StagingStats(NamedTuple):
    """What the ring did so far."""

    staged: int  # shards copied
    bytes: int  # of them
    ring_bytes: int  # allocated now, on the host; the same again on a GPU
    rings: int  # allocations of a ring
    beside: int  # shards that went beside the ring
    blocked_s: float  # puts waited for room


@dataclass(frozen=True)
class StagedShard:
    """A shard on the worker's device.

    Attributes:
        shard: as it was sent, its arrays now tensors of the same shapes.
        copy_s: seconds of the copy out of the object store.
        fetch_s: seconds until the object was on this node, where that is measured (`timing`).
        h2d_s: seconds of the copy to the device, where that is measured (`timing`).
        nbytes: bytes of the shard.
    """

    shard: Shard
    copy_s: float
    fetch_s: float = 0.0
    h2d_s: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True)
class _Source:
    """A shard, or a list of one ref to it, and what to make of it before it is copied."""

    shard: Shard | list[Any]
    prepare: Callable[[Shard], Shard] | None


@dataclass(frozen=True)
class _Memory:
    """Host and device side of one allocation; `ring` is None for one beside the ring."""

    host: torch.Tensor
    device: torch.Tensor
    ring: Ring | None


@dataclass(frozen=True)
class _Lot:
    """A staged shard and the bytes it lies in."""

    staged: StagedShard
    memory: _Memory
    room: Room
    copied: Event


class Staging:
    """Hand-over between the thread that receives shards and the thread that trains.

    Args:
        rank: named in errors and logs.
        device: torch device string, or a device.
        options: how.
    """

    def __init__(self, rank: int, device: str | Device, options: StagingOptions | None = None) -> None:
        self._rank = rank
        self._name = device
        self._options = options or StagingOptions()
        self._device: Device | None = None if isinstance(device, str) else device
        self._changed = threading.Condition()  # guards everything below
        self._staged: dict[Key, _Lot | _Source | BaseException] = {}
        self._held: _Lot | None = None  # taken last; compute may still use it
        self._wanted: Key | None = None  # the training thread waits for it
        self._ring: _Memory | None = None
        self._stats = StagingStats(0, 0, 0, 0, 0, 0.0)

    def put(self, key: Key, shard: Shard | list[Any], prepare: Callable[[Shard], Shard] | None = None) -> int:
        """Take in a shard, or a list of one ref to it; returns its bytes (0 for what is opened when taken).

        `prepare` is what to make of a shard before it is copied. A failure is raised by `take` too.
        """
        source = _Source(shard, prepare)
        lazy = self._options.timing or not self._options.prefetch
        try:
            lot = source if lazy else self._load(key, source)
        except Exception as error:
            self._offer(key, error)
            raise
        self._offer(key, lot)
        nbytes = shard.nbytes if isinstance(shard, Shard) else 0
        log.debug("staged rank=%d step=%d mini=%d bytes=%d", self._rank, *key, nbytes)
        return nbytes

    def take(self, key: Key, timeout_s: float) -> tuple[StagedShard, float]:
        """The shard under `key`, and the seconds that were waited for it. Called by the training thread.

        Raises:
            WorkerFailed: it did not come within `timeout_s`, or could not be copied.
        """
        begin = time.perf_counter()
        self.release()
        found = self._wait_for(key, timeout_s, begin)
        wait_s = time.perf_counter() - begin
        if isinstance(found, BaseException):
            raise WorkerFailed(self._rank, "stage", f"{type(found).__name__}: {found}") from found
        lot = found if isinstance(found, _Lot) else self._load(key, found)
        self._opened().wait_on_compute(lot.copied)
        with self._changed:
            self._held = lot
        return lot.staged, wait_s

    def release(self) -> None:
        """The shard taken last may be overwritten as soon as what compute was asked for up to now is done."""
        with self._changed:
            if self._held is not None:
                self._give_back(self._held)
            self._held = None
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget what was staged and not taken (after a rewind)."""
        with self._changed:
            for lot in self._staged.values():
                if isinstance(lot, _Lot):
                    self._give_back(lot)
            self._staged.clear()
            self._changed.notify_all()

    def stats(self) -> StagingStats:
        """Counters since the start."""
        with self._changed:
            return self._stats

    def _offer(self, key: Key, lot: _Lot | _Source | BaseException) -> None:
        with self._changed:
            before = self._staged.get(key)
            if isinstance(before, _Lot):
                self._give_back(before)
            self._staged[key] = lot
            self._changed.notify_all()

    def _wait_for(self, key: Key, timeout_s: float, begin: float) -> _Lot | _Source | BaseException:
        with self._changed:
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
            return self._staged.pop(key)

    def _load(self, key: Key, source: _Source) -> _Lot:
        """Bring a shard to the device; returns while the copy to it may still run."""
        shard, fetch_s = _opened_shard(source)
        memory, room = self._room(key, sum(aligned(array.nbytes) for array in shard.arrays.values()))
        device = self._opened()
        try:
            for event in room.copied:
                device.wait_on_host(event)
            begin = time.perf_counter()
            tensors = _copy(shard, memory, room)
            copy_s = time.perf_counter() - begin
            copied = device.upload(
                memory.host[room.start : room.stop], memory.device[room.start : room.stop], room.consumed
            )
            if self._options.timing:
                device.synchronize()
            h2d_s = time.perf_counter() - begin - copy_s
        except BaseException:
            with self._changed:
                self._return(memory, room, None, None)
            raise
        self._count(staged=1, bytes=shard.nbytes)
        return _Lot(StagedShard(replace(shard, arrays=tensors), copy_s, fetch_s, h2d_s), memory, room, copied)

    def _room(self, key: Key, nbytes: int) -> tuple[_Memory, Room]:
        """Room for `nbytes`; waits until there is some."""
        begin = time.perf_counter()
        with self._changed:
            while True:
                memory = self._grown(nbytes)
                room = memory.ring.take(nbytes) if memory is not None and memory.ring else None
                if memory is not None and room is not None:
                    self._count(blocked_s=time.perf_counter() - begin)
                    return memory, room
                if self._wanted is not None and self._wanted not in self._staged:
                    self._count(beside=1)
                    return self._allocate(nbytes, None), Room(0, aligned(nbytes))
                if not self._changed.wait(REPORT_EVERY_S):
                    waited_s = time.perf_counter() - begin
                    log.info("ring full rank=%d step=%d mini=%d for=%.0fs", self._rank, *key, waited_s)

    def _grown(self, nbytes: int) -> _Memory | None:
        """The ring, large enough for `nbytes`; None while a smaller one is in use. Under the lock."""
        limit = self._options.ring_bytes
        if limit is not None and aligned(nbytes) > limit:
            remedy = "raise it, or lower the tokens of a mini-batch"
            raise ConfigError("ring_bytes", f"a ring of {limit} bytes holds no shard of {nbytes}", remedy)
        ring = self._ring.ring if self._ring else None
        if ring is not None and ring.nbytes >= aligned(nbytes):
            return self._ring
        if ring is not None:
            if ring.used:
                return None
            self._opened().synchronize()
            self._ring = None  # the old one goes before the new one comes
        size = max(limit // LINE * LINE if limit is not None else SHARDS_IN_RING * aligned(nbytes), LINE)
        self._ring = self._allocate(size, Ring(size))
        self._stats = self._stats._replace(ring_bytes=size)
        self._count(rings=1)
        log.info("allocated ring rank=%d bytes=%d", self._rank, size)
        return self._ring

    def _allocate(self, nbytes: int, ring: Ring | None) -> _Memory:
        host = self._opened().host_buffer(aligned(nbytes))
        return _Memory(host, self._opened().device_buffer(host), ring)

    def _give_back(self, lot: _Lot) -> None:
        """Under the lock, in the training thread: what it asked of compute may use the shard."""
        self._return(lot.memory, lot.room, lot.copied, self._opened().consumed())

    def _return(self, memory: _Memory, room: Room, copied: Event, consumed: Event) -> None:
        if memory.ring is not None:
            memory.ring.give_back(room, copied, consumed)
        elif consumed is not None:
            self._opened().wait_on_host(consumed)  # rare; then its memory may go
        self._changed.notify_all()

    def _opened(self) -> Device:
        if self._device is None:
            options = self._options
            stream = options.copy_stream and not options.timing
            self._device = open_device(str(self._name), stream, options.pin_memory)
        return self._device

    def _count(self, **more: float) -> None:
        with self._changed:
            old = self._stats._asdict()
            self._stats = self._stats._replace(**{name: old[name] + value for name, value in more.items()})


def _opened_shard(source: _Source) -> tuple[Shard, float]:
    begin = time.perf_counter()
    shard = source.shard
    if not isinstance(shard, Shard):
        import ray

        shard = ray.get(shard[0])
        assert isinstance(shard, Shard)
    fetch_s = time.perf_counter() - begin
    return (shard if source.prepare is None else source.prepare(shard)), fetch_s


def _copy(shard: Shard, memory: _Memory, room: Room) -> dict[str, Any]:
    """Copy the arrays of a shard into a room's host side; tensors of the same shapes on its device side."""
    import torch

    host = memory.host.numpy()
    tensors: dict[str, Any] = {}
    start = room.start
    for name, array in shard.arrays.items():
        stop = start + array.nbytes
        np.copyto(host[start:stop].view(array.dtype).reshape(array.shape), array)
        dtype = getattr(torch, array.dtype.name)
        tensors[name] = memory.device[start:stop].view(dtype).view(array.shape)
        start += aligned(array.nbytes)
    return tensors
