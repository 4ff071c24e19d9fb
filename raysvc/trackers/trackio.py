"""Trackio. Its own environment decides: TRACKIO_PROJECT, TRACKIO_DIR, TRACKIO_SPACE_ID."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

from raysvc.trackers.tracker import TrackedRun, under_headings


class TrackioTracker:
    """One run; a run that goes on has the same name. What the package prints goes to stderr: stdout belongs to `--json`."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            # in a context of its own: what is current there is finished again, and printed, at the end of the process
            self._run = contextvars.copy_context().run(
                trackio.init,
                project=os.environ.get("TRACKIO_PROJECT", "raysvc"),
                name=f"{run.name}-{run.id}",
                space_id=os.environ.get("TRACKIO_SPACE_ID"),
                config=dict(run.config),
                resume="allow",
                embed=False,
            )

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(under_headings(metrics), step=step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(under_headings(metrics), step=step)

    def on_checkpoint(self, step: int, folder: str) -> None:
        """It shows numbers over steps; a folder is none."""

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()
