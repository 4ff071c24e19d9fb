"""Answers that are on their way, and the twins of calls that wait for them.

Always true:
- a call is written once, as `*_async`; its waiting twin is made from it;
- an answer is waited for once, and is the same one every time it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

T = TypeVar("T")
Owner = TypeVar("Owner")
P = ParamSpec("P")


class Pending(Generic[T]):
    """An answer that is on its way.

    Args:
        wait: waits for it; called once.
    """

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._value: T

    def result(self) -> T:
        """Wait for the answer; the same one every time.

        Raises:
            WorkerFailed: a rank died, or raised.
        """
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value


def waiting(call: Callable[Concatenate[Owner, P], Pending[T]]) -> Callable[Concatenate[Owner, P], T]:
    """The twin of an `*_async` method that waits for its answer."""

    def twin(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return call(owner, *args, **kwargs).result()

    named: Any = update_wrapper(twin, call)
    for name in ("__name__", "__qualname__"):
        setattr(named, name, getattr(call, name).removesuffix("_async"))
    return twin
