"""Shards copied into memory that is allocated once: room for each, the copy, the upload, and giving room back.

Always true:
- shards in the ring never take more than its bytes: a shard waits for room (back-pressure). Only when the caller says
  that this one cannot wait does it go beside the ring, and is counted;
- without a limit the ring is three of the largest shard; a larger one comes when the smaller one is empty;
- nothing is copied over a shard before compute is done with it, nor into host memory that a copy still reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.actors.staging.device import Device, Event, open_device
from raysvc.actors.staging.ring import LINE, Ring, Room, aligned
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError

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
class Memory:
    """Host and device side of one allocation; `ring` is None for one beside the ring."""

    host: torch.Tensor
    device: torch.Tensor
    ring: Ring | None


@dataclass(frozen=True)
class Lot:
    """A staged shard, the bytes it lies in, and the event that it is there."""

    staged: StagedShard
    memory: Memory
    room: Room
    copied: Event


class RingMemory:
    """The memory of one worker's staged shards.

    Args:
        rank: named in logs.
        device: torch device string, or a device.
        options: how.
        changed: guards the memory; told when room is given back.
        cannot_wait: whether a shard without room must go on now; asked with `changed` held.
    """

    def __init__(
        self,
        rank: int,
        device: str | Device,
        options: StagingOptions,
        changed: threading.Condition,
        cannot_wait: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._name = device
        self._options = options
        self._device: Device | None = None if isinstance(device, str) else device
        self._cannot_wait = cannot_wait
        self._changed = changed  # guards everything below
        self._ring: Memory | None = None
        self._stats = StagingStats(0, 0, 0, 0, 0, 0.0)

    @property
    def device(self) -> Device:
        """Opened when it is needed first: a worker chooses its GPU before."""
        if self._device is None:
            options = self._options
            stream = options.copy_stream and not options.timing
            self._device = open_device(str(self._name), stream, options.pin_memory)
        return self._device

    @property
    def stats(self) -> StagingStats:
        """Counters since the start; with `changed` held."""
        return self._stats

    def load(self, key: Key, shard: Shard, fetch_s: float = 0.0) -> Lot:
        """Bring a shard to the device; waits for room, returns while the copy to the device may still run.

        Raises:
            ConfigError: the shard is larger than the ring may be.
        """
        memory, room = self._room(key, sum(aligned(array.nbytes) for array in shard.arrays.values()))
        try:
            for event in room.copied:
                self.device.wait_on_host(event)
            begin = time.perf_counter()
            tensors = _copy(shard, memory, room)
            copy_s = time.perf_counter() - begin
            here = slice(room.start, room.stop)
            copied = self.device.upload(memory.host[here], memory.device[here], room.consumed)
            if self._options.timing:
                self.device.synchronize()
            h2d_s = time.perf_counter() - begin - copy_s
        except BaseException:
            with self._changed:
                self._return(memory, room, None, None)
            raise
        self._count(staged=1, bytes=shard.nbytes)
        staged = StagedShard(replace(shard, arrays=tensors), copy_s, fetch_s, h2d_s, shard.nbytes)
        return Lot(staged, memory, room, copied)

    def give_back(self, lot: Lot) -> None:
        """With `changed` held, in the training thread: what it asked of compute may still use the shard."""
        self._return(lot.memory, lot.room, lot.copied, self.device.consumed())

    def _room(self, key: Key, nbytes: int) -> tuple[Memory, Room]:
        """Room for `nbytes`; waits until there is some."""
        begin = time.perf_counter()
        with self._changed:
            while True:
                memory = self._grown(nbytes)
                room = memory.ring.take(nbytes) if memory is not None and memory.ring else None
                if memory is not None and room is not None:
                    self._count(blocked_s=time.perf_counter() - begin)
                    return memory, room
                if self._cannot_wait():
                    self._count(beside=1)
                    return self._allocate(nbytes, None), Room(0, aligned(nbytes))
                if not self._changed.wait(REPORT_EVERY_S):
                    waited_s = time.perf_counter() - begin
                    log.info("ring full rank=%d step=%d mini=%d for=%.0fs", self._rank, *key, waited_s)

    def _grown(self, nbytes: int) -> Memory | None:
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
            self.device.synchronize()
            self._ring = None  # the old one goes before the new one comes
        size = max(limit // LINE * LINE if limit is not None else SHARDS_IN_RING * aligned(nbytes), LINE)
        self._ring = self._allocate(size, Ring(size))
        self._stats = self._stats._replace(ring_bytes=size)
        self._count(rings=1)
        log.info("allocated ring rank=%d bytes=%d", self._rank, size)
        return self._ring

    def _allocate(self, nbytes: int, ring: Ring | None) -> Memory:
        host = self.device.host_buffer(aligned(nbytes))
        return Memory(host, self.device.device_buffer(host), ring)

    def _return(self, memory: Memory, room: Room, copied: Event, consumed: Event) -> None:
        if memory.ring is not None:
            memory.ring.give_back(room, copied, consumed)
        elif consumed is not None:
            self.device.wait_on_host(consumed)  # rare; then its memory may go
        self._changed.notify_all()

    def _count(self, **more: float) -> None:
        with self._changed:
            old = self._stats._asdict()
            self._stats = self._stats._replace(**{name: old[name] + value for name, value in more.items()})


def _copy(shard: Shard, memory: Memory, room: Room) -> dict[str, Any]:
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
