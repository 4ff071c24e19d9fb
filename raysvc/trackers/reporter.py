"""Hands what happens in a run to its trackers, in a thread of its own.

Always true:
- the caller never waits, whatever a tracker does, but at the end, and there at most `CLOSE_TIMEOUT_S`;
- calls arrive in order, each at every tracker;
- a tracker that raises is told nothing more, is warned of once, and is named in `outcome`; training goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from raysvc.trackers.known_trackers import check_installed, first_line, open_tracker
from raysvc.trackers.tracker import TrackedRun, Tracker

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 60.0


class Reporter:
    """See the module.

    Args:
        trackers: by the name that is shown; none: every call does nothing.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)  # only the thread takes one out
        self._outcome = dict.fromkeys(trackers, "ok")  # written by the thread, read when it has ended
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._closed = not trackers
        self._thread = threading.Thread(target=self._run, name="raysvc-trackers", daemon=True)
        if trackers:
            self._thread.start()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is trained; `step` counts those trained so far."""
        self._call("on_step", step, dict(metrics))

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """An eval is over; its metrics begin with `eval_`."""
        self._call("on_eval", step, dict(metrics))

    def on_checkpoint(self, step: int, folder: str) -> None:
        """A checkpoint is complete."""
        self._call("on_checkpoint", step, folder)

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        """Nothing more comes; waits until all is handed over. Later calls do nothing."""
        if self._closed:
            return
        self._call("on_end", dict(metrics), finished)
        self._closed = True
        self._calls.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            names = ", ".join(self._trackers)
            log.warning(
                "trackers=%s did not end in %.0f s: what they had not sent is lost", names, CLOSE_TIMEOUT_S
            )
            self._outcome |= dict.fromkeys(self._trackers, f"did not end in {CLOSE_TIMEOUT_S:.0f} s")

    def leave(self) -> None:
        """Tell nobody anything more, not even the end: another process goes on in the same runs."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def outcome(self) -> dict[str, str]:
        """Tracker -> "ok", or where and why it ended; complete after `on_end`."""
        return dict(self._outcome)

    def _call(self, name: str, *arguments: Any) -> None:
        if not self._closed:
            self._calls.put((name, arguments))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            name, arguments = call
            for who in list(self._trackers):
                try:
                    getattr(self._trackers[who], name)(*arguments)
                except Exception as error:  # noqa: BLE001  a tracker's fault is not the training's
                    del self._trackers[who]
                    self._outcome[who] = f"failed in {name}{_at(arguments)}: {first_line(error)}"
                    log.warning("tracker=%s %s; the training goes on without it", who, self._outcome[who])


def _at(arguments: tuple[Any, ...]) -> str:
    return f" after step {arguments[0]}" if isinstance(arguments[0], int) else ""


def open_reporter(
    trackers: Sequence[str | Tracker], run: TrackedRun, where: str = "trainer.report_to"
) -> Reporter:
    """A reporter of trackers by name, and of those that are there already.

    Raises:
        ConfigError: one of them is unknown, not installed, or cannot be opened.
    """
    check_installed([each for each in trackers if isinstance(each, str)], where)
    opened: dict[str, Tracker] = {}
    try:
        for each in trackers:
            name = each if isinstance(each, str) else type(each).__name__
            opened[name] = open_tracker(each, run, where) if isinstance(each, str) else each
    except BaseException:
        Reporter(opened).on_end({}, finished=False)
        raise
    return Reporter(opened)


NO_TRACKERS = Reporter({})
