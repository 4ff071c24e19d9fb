"""Memory for staged shards: a few slots that are used in turn. One shard trains, one is ready, one arrives.

1. A shard larger than all slots may be together is refused.
2. As long as another slot may be made, one of the shard's size is.
3. Else the slot that was given back first is used again, if it is large enough.
4. Else slots that nobody uses go, the oldest first, until a new one fits.
5. Else every slot is in use, and the shard waits (back-pressure).

Always true:
- slots together never have more than `ring_bytes`, or are never more than three. Only when the caller says that a shard
  cannot wait does it go beside them, and is counted;
- events belong to a slot, not to who uses it: nothing is copied over a shard before compute is done with it, nor into host
  memory that a copy still reads, whatever fails in between.
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
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import dtype_name

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
REPORT_EVERY_S = 10.0
NUM_SLOTS = 3  # one trains, one is ready, one arrives
LINE = 64  # arrays begin at multiples of it, so every dtype may lie there
Key = tuple[int, int]  # (step, mini-batch)


@dataclass(frozen=True)
class StagingOptions:
    """Says how shards are staged.

    Attributes:
        prefetch: copy when a shard arrives; False: when it is taken.
        copy_stream: False: copies queue behind compute.
        pin_memory: False: plain host memory.
        ring_bytes: of all slots; None: three slots of the largest shard.
        timing: measure each part by itself: no overlap, and the caller waits for every copy.
        timing_every_steps: with `timing`: only in steps whose number is a multiple of this.
    """

    prefetch: bool = True
    copy_stream: bool = True
    pin_memory: bool = True
    ring_bytes: int | None = None
    timing: bool = False
    timing_every_steps: int = 1

    def timed(self, key: Key) -> bool:
        """Returns whether the parts of this mini-batch are measured."""
        return self.timing and key[0] % self.timing_every_steps == 0


class StagingStats(NamedTuple):
    """Holds what the slots did so far."""

    staged: int  # shards copied
    bytes: int  # of them
    ring_bytes: int  # of all slots now, on the host; the same again on a GPU
    allocations: int  # slots made
    beside: int  # shards that went beside the slots
    blocked_s: float  # puts waited for a slot


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


@dataclass(eq=False)
class Slot:
    """Host and device side of memory for one shard, and what may still use it.

    Attributes:
        copied: the last copy out of the host side.
        consumed: the last compute on the device side.
        beside: it is no slot of the ring, and goes when its shard goes.
    """

    host: torch.Tensor
    device: torch.Tensor
    copied: Event = None
    consumed: Event = None
    beside: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one side."""
        return int(self.host.numel())


class NoFreeSlot(NamedTuple):
    """Tells a caller that no slot is free now."""

    in_use: int
    ring_bytes: int


@dataclass(frozen=True)
class Lot:
    """A staged shard and its slot; compute waits for `copied` before it reads."""

    staged: StagedShard
    slot: Slot
    copied: Event


class Slots:
    """The memory of one worker's staged shards.

    Args:
        rank: named in logs.
        device: torch device string, or a device.
        options: how.
        changed: guards the slots; told when one is given back.
        cannot_wait: whether a shard without a slot must go on now; asked with `changed` held.
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
        self._free: list[Slot] = []  # given back first comes first, so that old events have happened
        self._in_use: list[Slot] = []
        self._largest = 0  # shard so far
        self._stats = StagingStats(0, 0, 0, 0, 0, 0.0)

    @property
    def device(self) -> Device:
        """Opened when it is needed first: a worker chooses its GPU before."""
        if self._device is None:
            options = self._options
            stream = options.copy_stream and not (options.timing and options.timing_every_steps == 1)
            self._device = open_device(str(self._name), stream, options.pin_memory)
        return self._device

    @property
    def stats(self) -> StagingStats:
        """Counters since the start; with `changed` held."""
        return self._stats._replace(ring_bytes=self._ring_bytes())

    def load(self, key: Key, shard: Shard, fetch_s: float = 0.0) -> Lot:
        """Bring a shard to the device; waits for a slot, returns while the copy to the device may still run.

        Raises:
            ConfigError: the shard is larger than the slots may be.
        """
        slot = self.take(key, sum(aligned(array.nbytes) for array in shard.arrays.values()))
        try:
            if slot.copied is not None:
                self.device.wait_on_host(slot.copied)
            begin = time.perf_counter()
            tensors = _copy(shard, slot)
            copy_s = time.perf_counter() - begin
            after = () if slot.consumed is None else (slot.consumed,)
            slot.copied = self.device.upload(slot.host, slot.device, after)
            if self._options.timed(key):
                self.device.synchronize()
            h2d_s = time.perf_counter() - begin - copy_s
        except BaseException:
            with self._changed:
                self.give_back(slot)  # with its events: what used it before may still run
            raise
        self._count(staged=1, bytes=shard.nbytes)
        staged = StagedShard(replace(shard, arrays=tensors), copy_s, fetch_s, h2d_s, shard.nbytes)
        return Lot(staged, slot, slot.copied)

    def release(self, lot: Lot) -> None:
        """Gives a lot back in the training thread, which holds `changed`: what it asked of compute may still use the
        shard.
        """
        lot.slot.consumed = self.device.consumed()
        self.give_back(lot.slot)

    def give_back(self, slot: Slot) -> None:
        """Gives a slot back to the free ones; the caller holds `changed`. The next user waits for the slot's events."""
        if slot.beside:
            for event in (slot.copied, slot.consumed):
                if event is not None:
                    self.device.wait_on_host(event)  # rare; then its memory may go
        else:
            self._in_use.remove(slot)
            self._free.append(slot)
        self._changed.notify_all()

    def take(self, key: Key, nbytes: int) -> Slot:
        """A slot for `nbytes`; waits until there is one, and says so."""
        begin = time.perf_counter()
        with self._changed:
            while isinstance(found := self.take_nowait(nbytes), NoFreeSlot):
                if self._cannot_wait():
                    self._count(beside=1)
                    return self._made(nbytes, beside=True)
                if not self._changed.wait(REPORT_EVERY_S):
                    waited_s = time.perf_counter() - begin
                    what = (self._rank, *key, found.in_use, found.ring_bytes, waited_s)
                    log.info("all slots in use rank=%d step=%d mini=%d slots=%d bytes=%d for=%.0fs", *what)
            self._count(blocked_s=time.perf_counter() - begin)
            return found

    def take_nowait(self, nbytes: int) -> Slot | NoFreeSlot:
        """Takes a slot for `nbytes` as the module says, if one is free now; the caller holds `changed`.

        Raises:
            ConfigError: the shard is larger than the slots may be.
        """
        size, limit = aligned(nbytes), self._options.ring_bytes
        if limit is not None and size > limit:  # 1
            remedy = "raise it, or lower the tokens of a mini-batch"
            raise ConfigError("ring_bytes", f"a ring of {limit} bytes holds no shard of {nbytes}", remedy)
        self._largest = max(self._largest, size)
        if not self._fits(size):  # else 2
            old = next((slot for slot in self._free if slot.nbytes >= size), None)
            if old is not None:  # 3
                self._free.remove(old)
                self._in_use.append(old)
                return old
            if not self._make_room(size):
                return NoFreeSlot(len(self._in_use), self._ring_bytes())  # 5
        slot = self._made(size if limit is not None else self._largest)
        self._in_use.append(slot)
        self._count(allocations=1)
        log.info("made a slot rank=%d bytes=%d", self._rank, slot.nbytes)
        return slot

    def _fits(self, size: int) -> bool:
        """Returns whether one more slot may be made."""
        if self._options.ring_bytes is None:
            return len(self._free) + len(self._in_use) < NUM_SLOTS
        return self._ring_bytes() + size <= self._options.ring_bytes

    def _make_room(self, size: int) -> bool:  # 4
        while self._free and not self._fits(size):
            self.device.synchronize()
            self._free.pop(0)
        return self._fits(size)

    def _made(self, nbytes: int, beside: bool = False) -> Slot:
        host = self.device.host_buffer(max(aligned(nbytes), LINE))
        return Slot(host, self.device.device_buffer(host), beside=beside)

    def _ring_bytes(self) -> int:
        return sum(slot.nbytes for slot in (*self._free, *self._in_use))

    def _count(self, **more: float) -> None:
        with self._changed:
            old = self._stats._asdict()
            self._stats = self._stats._replace(**{name: old[name] + value for name, value in more.items()})


def aligned(nbytes: int) -> int:
    """`nbytes` up to the next multiple of 64."""
    return -(-nbytes // LINE) * LINE


def _copy(shard: Shard, slot: Slot) -> dict[str, Any]:
    """Copy the arrays of a shard into a slot's host side; tensors of the same shapes on its device side."""
    import torch

    host = slot.host.numpy()
    tensors: dict[str, Any] = {}
    start = 0
    for name, array in shard.arrays.items():
        stop = start + array.nbytes
        if array.dtype.kind == "U":
            tensors[name] = array.copy()  # text stays on the host, as numpy has it
            continue
        np.copyto(host[start:stop].view(array.dtype).reshape(array.shape), array)
        dtype = getattr(torch, dtype_name(array.dtype))
        tensors[name] = slot.device[start:stop].view(dtype).view(array.shape)
        start += aligned(array.nbytes)
    return tensors
