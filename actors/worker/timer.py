"""Measures where the time of an optimizer step goes; does nothing when it is off.

Always true:
- off, a span costs one call and measures nothing;
- on, the device is waited for at both ends of a span, so that a figure is the work's own and not that of the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

PARTS = ("wait", "fetch", "copy", "h2d", "forward", "backward", "clip", "optimizer", "eval")
_NOTHING = nullcontext()


class Timer:
    """Seconds by part, since they were asked for last.

    Args:
        synchronize: waits for the device; None: off.
    """

    def __init__(self, synchronize: Callable[[], object] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self.on = synchronize is not None  # may be switched from step to step

    def span(self, part: str) -> AbstractContextManager[None]:
        """Measures what runs inside it as `part`."""
        return self._measured(part) if self.on else _NOTHING

    def add(self, part: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        if self.on:
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds of every part, and start again; empty when off."""
        if not self.on:
            return {}
        taken = {part: self._seconds.get(part, 0.0) for part in PARTS}
        self._seconds = {}
        return taken

    @contextmanager
    def _measured(self, part: str) -> Iterator[None]:
        assert self._synchronize is not None
        self._synchronize()
        begin = time.perf_counter()
        yield
        self._synchronize()
        self.add(part, time.perf_counter() - begin)
