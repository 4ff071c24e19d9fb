"""Stops Python's cycle collector while objects are made by the hundred thousand that stay.

Always true:
- afterwards the collector runs if it ran before, also when threads paused it beside each other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cycle collector.

    Rows hold no cycles, and what an import makes stays: the collector would look through all of it again and again.
    That is a third of the time of tokenizing, and of importing torch and `transformers`.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
