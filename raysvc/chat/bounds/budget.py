"""A budget of processor time and memory for what a chat template does, whatever it is.

A template comes with a model and is not trusted: it may loop, call itself and keep texts until the process is killed. One thread
looks at what runs, some times a second, and raises an exception in a thread whose work takes too much. What Python does in a
single step cannot be interrupted so; `sizes` refuses such steps before they begin.

1. Whoever runs a template counts: odd while it runs, even between. Two additions are all that it costs.
2. The watching thread sees the same odd number again and again, and how much processor time this thread spent since, and
   how much memory the process took.
3. When that is too much it condemns the number and raises `RenderTooCostly` in that thread.
4. What ends looks whether it was condemned. If so it waits for the watching thread, and for an exception that was not raised yet.

Always true:
- a run that ends within its budget is not interrupted, nor is anything that comes after it;
- time is that of the thread's processor: a machine that is busy, stopped or swapping costs nobody a row;
- a run that is condemned ends in `OverBudget`, unless it ended before the exception came.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

from raysvc.chat.bounds.sizes import RenderTooCostly
from raysvc.chat.row_errors import RowFault

MAX_SECONDS = 10.0  # of the thread's processor time; a render of 100,000 messages takes one to five
MAX_GROWTH = 1 << 30  # bytes of the process's private memory
PERIOD_S = 0.05
IDLE_PERIODS = 100  # without a run, before the watching thread sleeps
LEAST_S = 0.1  # of processor time, before memory is held against a run: others grow too
AGAIN_S = 1.0  # of processor time, before it is raised once more: somebody may have caught it
TOO_COSTLY = "the template takes more than a render may"
_MEMORY = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")

Made = TypeVar("Made")


class OverBudget(RowFault):
    """A template took more than it may."""


class _Run:
    """Holds what runs in one thread.

    Attributes:
        count: odd while a template runs.
        condemned: the count of a run that is to end, 0 when there is none.
        why: it is to end.
        seen, first_s, first_bytes, next_s: of the watching thread: the count that it saw last, what thread and process had taken
            when it first saw it, and when it raises the exception once more.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "condemned",
        "count",
        "first_bytes",
        "first_s",
        "next_s",
        "seen",
        "thread",
        "why",
    )

    def __init__(self) -> None:
        self.count = self.condemned = self.seen = self.first_bytes = 0
        self.first_s = self.next_s = 0.0
        self.why = ""
        self.thread = threading.get_ident()
        of_thread = getattr(time, "pthread_getcpuclockid", None)  # macOS has none
        self._clock: int = of_thread(self.thread) if of_thread else time.CLOCK_MONOTONIC

    def spent_s(self) -> float:
        """Processor time of the thread.

        Raises:
            OSError: it has ended.
        """
        return time.clock_gettime(self._clock)


class _ThreadLocals(threading.local):
    def __init__(self) -> None:
        self.run = _Run()
        _watch.look_at(self.run)


class _Watch:
    """The thread that looks.

    Attributes:
        is_asleep: nothing ran for a while; who runs something wakes it.
    """

    def __init__(self) -> None:
        self._runs: WeakSet[_Run] = WeakSet()
        self.is_asleep = True
        self._lock, self._woken = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def look_at(self, run: _Run) -> None:
        """Watches a run from now on."""
        with self._lock:
            self._runs.add(run)

    def wake(self) -> None:
        """Look again."""
        with self._lock:
            self.is_asleep = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="raysvc-render-budget", daemon=True)
                self._thread.start()
            self._woken.set()

    def end(self, run: _Run) -> None:
        """Ends the watch of a run; after it nothing is raised in its thread.

        What may still be under way is replaced by an exception of our own, which is waited for. To take it back (None) would
        leave CPython 3.11 looking for it at every step, and without end while a profiler or a debugger watches.
        """
        while True:
            try:
                run.count = (run.count + 1) & ~1
                if not run.condemned:
                    return
                with self._lock:  # who condemned this run has raised it, and nobody does any more
                    run.condemned = 0
                while _raise_in(run.thread):
                    pass
                return
            except RenderTooCostly:
                continue

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(PERIOD_S)
            idle = 0 if sum(map(self._judge, self._all())) else idle + 1
            if idle < IDLE_PERIODS:
                continue
            self._woken.clear()
            self.is_asleep = True
            if not any(run.count & 1 for run in self._all()):  # who begins now sees that we sleep
                self._woken.wait()
            self.is_asleep, idle = False, 0

    def _all(self) -> list[_Run]:
        with self._lock:
            return list(self._runs)

    def _judge(self, run: _Run) -> bool:
        """Returns whether anything ran since the last look; what takes too much is condemned."""
        count, is_new = run.count, run.count != run.seen
        if not count & 1:
            run.seen = count
            return is_new
        try:
            spent_s, taken = run.spent_s(), _private_bytes()
        except OSError:  # its thread has ended
            return False
        if is_new:
            run.seen, run.first_s, run.first_bytes, run.next_s = count, spent_s, taken, 0.0
            return True
        spent_s, grown = spent_s - run.first_s, taken - run.first_bytes
        if spent_s > MAX_SECONDS:
            run.why = f"it takes more than {MAX_SECONDS:g} s of processor time"
        elif grown > MAX_GROWTH and spent_s > LEAST_S:
            run.why = f"it takes more than {MAX_GROWTH >> 20} MiB of memory"
        else:
            return True
        if spent_s >= run.next_s:
            run.next_s = spent_s + AGAIN_S
            self._condemn(run, count)
        return True

    def _condemn(self, run: _Run, count: int) -> None:
        with self._lock:
            run.condemned = count
            if run.count == count:  # else it ended, and either saw that it is condemned or did not have to
                _raise_in(run.thread)


def within_budget(run: Callable[..., Made], *args: Any) -> Made:
    """`run(*args)`, which runs a template and nothing else.

    Raises:
        OverBudget: it took more time or memory than it may, or wanted to make something too large.
    """
    own = _own.run
    try:
        try:
            own.count += 1
            if _watch.is_asleep:
                _watch.wake()
            return run(*args)
        finally:
            own.count = (
                own.count + 1
            ) & ~1  # nothing is decided against it from here on, and one exception may be under way
            if own.condemned:
                _watch.end(own)
    except RenderTooCostly as why:
        try:
            _watch.end(own)
        except RenderTooCostly:  # that one, at the first step of the call
            _watch.end(own)
        raise OverBudget(TOO_COSTLY, (str(why) or own.why) + _place(why.__traceback__)) from None


def _place(trace: TracebackType | None) -> str:
    """The innermost line of a template in which it was raised; "" where none was running."""
    place = ""
    while trace is not None:
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            place = f", in line {template.get_corresponding_lineno(trace.tb_lineno)} of the template"
        trace = trace.tb_next
    return place


def _raise_in(thread: int) -> bool:
    """Raise at the next step of a thread, instead of what is to be raised there already; whether there is such a thread."""
    error = ctypes.py_object(RenderTooCostly)
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error))


def _private_bytes() -> int:
    """Memory of the process that it shares with no other; 0 where nobody says."""
    if not _MEMORY.exists():
        return 0
    _, resident, shared, *_ = map(int, _MEMORY.read_text().split())
    return (resident - shared) * _PAGE


def _begin() -> None:
    global _watch, _own
    _watch = _Watch()
    _own = _ThreadLocals()


_watch: _Watch
_own: _ThreadLocals
_begin()
os.register_at_fork(after_in_child=_begin)  # it has none of our threads
