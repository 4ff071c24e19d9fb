"""Ctrl-C: once to end in order, twice to leave at once. SIGTERM, which clusters send before they take a node, the same.

Always true:
- the first one asks a loop that listens to stop after its step; where none listens it is a KeyboardInterrupt;
- SIGTERM means this to a loop that listens; elsewhere it ends the process, as ever;
- where it went to the whole process group, and so to the local Ray, a loop that listens cannot end its step: the process ends at
  once, and what is after the last checkpoint is trained once more;
- while a module is imported it ends the process: libraries swallow the exception, or turn it into one of theirs;
- the second one ends the process, whatever it is doing; what was saved stays saved.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LOOK_S = 0.5


class _State:
    presses = 0
    listening = False
    signal: int = signal.SIGINT  # the last one


_state = _State()


@contextmanager
def twice() -> Iterator[None]:
    """Within it Ctrl-C means what the module says."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    _state.presses, _state.listening = 0, False
    before = signal.signal(signal.SIGINT, _pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if _state.listening:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _state.listening = False


def asked_to_stop() -> bool:
    """Returns whether to stop now; a loop that asks after every step is one that listens."""
    if not _state.listening and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _pressed)  # in place of Ray's, which prints its stack and dies
    _state.listening = True
    return _state.presses > 0


def exit_code() -> int:
    """Returns the exit code of a process that was interrupted."""
    return 128 + _state.signal


def leave(number: int, frame: FrameType | None) -> None:
    """End the process here; what was saved stays saved."""
    os.write(2, b"\nexited immediately\n" if _state.presses > 1 else b"\ninterrupted\n")
    os._exit(128 + number)


def _pressed(number: int, frame: FrameType | None) -> None:
    _state.presses += 1
    _state.signal = number
    if _state.presses > 1 or (not _state.listening and _importing(frame)):
        leave(number, frame)
    if not _state.listening:
        raise KeyboardInterrupt
    os.write(2, b"\nstopping after this step, with everything saved; once more leaves at once\n")
    threading.Thread(target=_leave_with_ray, name="raysvc-leave", daemon=True).start()


def _leave_with_ray() -> None:
    """End the process when its local Ray is gone, which Ray itself would wait a minute for."""
    from raysvc.cluster import was_ended

    while not was_ended():
        time.sleep(LOOK_S)
    os.write(2, b"interrupted: Ray was ended too; the same command goes on from the last checkpoint\n")
    os._exit(exit_code())


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
