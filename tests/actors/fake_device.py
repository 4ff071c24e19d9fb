"""A device whose time is a number: copies and kernels take as long as they are told, and memory changes when they run.

A copy writes rubbish into its target when it starts and the bytes of its source, as they are then, when it ends. A
kernel looks at its memory when it starts and when it ends. Whoever forgets to wait for an event sees wrong bytes.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence

import torch

RUBBISH = 0xEE


class FakeDevice:
    """Two streams, `copy` and `compute`; an event is the time at which it happens. Two threads may use it."""

    def __init__(self, copy_s: float = 1.0) -> None:
        self.copy_s = copy_s
        self.now = 0.0
        self.compute_free = 0.0
        self._copy_free = 0.0
        self._effects: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self.buffers = 0
        self._lock = (
            threading.RLock()
        )  # an effect that one thread has taken out has happened when another looks

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.full((nbytes,), RUBBISH, dtype=torch.uint8)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        return torch.full_like(host, RUBBISH)

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[float]) -> float:
        with self._lock:
            start = max(self.now, self._copy_free, *after)
            self._copy_free = start + self.copy_s
            self._at(start, lambda: target.fill_(RUBBISH))
            self._at(self._copy_free, lambda: target.copy_(source))
            return self._copy_free

    def kernel(self, seconds: float, look: Callable[[], None]) -> None:
        """Ask compute for a kernel that looks at its memory."""
        start = max(self.now, self.compute_free)
        self.compute_free = start + seconds
        self._at(start, look)
        self._at(self.compute_free, look)

    def consumed(self) -> float:
        return max(self.now, self.compute_free)

    def wait_on_compute(self, event: float) -> None:
        self.compute_free = max(self.compute_free, event)

    def wait_on_host(self, event: float) -> None:
        self.advance(event)

    def synchronize(self) -> None:
        self.advance(max(self.now, self.compute_free, self._copy_free))

    def advance(self, until: float) -> None:
        """Let time pass; what happens until then happens in order."""
        with self._lock:
            while self._effects and self._effects[0][0] <= until:
                heapq.heappop(self._effects)[2]()
            self.now = max(self.now, until)

    def _at(self, time: float, effect: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._effects, (time, self._count, effect))


class ForgetsConsumed(FakeDevice):
    """Copies into memory that compute still reads."""

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[float]) -> float:
        return super().upload(source, target, [0.0])


class ForgetsCopied(FakeDevice):
    """Computes on memory that is still being copied."""

    def wait_on_compute(self, event: float) -> None:
        pass


class ForgetsHost(FakeDevice):
    """Writes into host memory that a copy still reads."""

    def wait_on_host(self, event: float) -> None:
        pass
