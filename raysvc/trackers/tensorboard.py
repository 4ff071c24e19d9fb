"""TensorBoard: event files in `<folder>/tensorboard`.

Always true:
- a run that goes on at step k replaces what an earlier process wrote of the steps from k on.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysvc.trackers.tracker import TrackedRun, under_headings

FOLDER = "tensorboard"


class TensorBoardTracker:
    """One writer."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.steps_done + 1 if run.steps_done else None
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=purge_step)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in under_headings(metrics).items():
            self._writer.add_scalar(name, value, step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.on_step(step, metrics)
        self._writer.flush()

    def on_checkpoint(self, step: int, folder: str) -> None:
        self._writer.add_text("checkpoint", folder, step)

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        self._writer.close()
