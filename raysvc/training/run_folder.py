"""What a run leaves behind: checkpoints, the row log, metrics, the summary.

    <run_dir>/rows.jsonl         one line per optimizer step: which rows were applied
    <run_dir>/metrics.jsonl      one line per step: loss, tokens, times
    <run_dir>/served.jsonl       how the steps were made, from which step on; see `raysvc.build.serve_log`
    <run_dir>/evals.jsonl        one line per eval and time it ran, with the last step trained before it
    <run_dir>/checkpoints/step-<n>.<uid>/   weights; state.json, written last, makes it count
    <run_dir>/model/             the trained model, as `transformers` reads it, when the run has ended
    <run_dir>/run.json           which job this is; see `raysvc.training.run_identity`
    <run_dir>/summary.json       written at the end

Always true:
- a checkpoint without `state.json` does not exist for a reader;
- after a resume at step k the logs hold the steps below k and nothing else, so they end up as if the
  run had never stopped;
- a checkpoint is removed only when enough newer ones are complete;
- two processes of one host do not train in one folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.build.serve_log import FILE as SERVED
from raysvc.errors import StateMismatch

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig

log = logging.getLogger(__name__)

STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: steps that are trained in it; the next one to train.
        state: what was given to `publish`.
    """

    folder: Path
    step: int
    state: dict[str, Any]


class StepLog:
    """A JSON-lines file with a `step` in every line; one writer."""

    def __init__(self, path: Path, start_step: int) -> None:
        """Keep the lines of steps below `start_step`, and append from there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(_end_of_steps_below(path, start_step))

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line; it is in the file when this returns."""
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Make all lines survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunFolder:
    """One run's folder on a disk that the driver and all workers see."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()

    @property
    def rows(self) -> Path:
        """The row log."""
        return self.path / "rows.jsonl"

    @property
    def metrics(self) -> Path:
        """Loss and times per step."""
        return self.path / "metrics.jsonl"

    @property
    def served(self) -> Path:
        """How steps were made."""
        return self.path / SERVED

    @property
    def evals(self) -> Path:
        """What the evals said, and after which step."""
        return self.path / "evals.jsonl"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model"

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        found = [self._read(folder) for folder in self._folders()]
        return sorted((c for c in found if c is not None), key=lambda c: c.step)

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint with the most steps."""
        return max(self.checkpoints(), key=lambda c: c.step, default=None)

    def new_checkpoint(self, step: int) -> Path:
        """An empty folder for the ranks to write into."""
        folder = self.path / "checkpoints" / f"step-{step:08d}.{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return folder

    def publish(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Make a checkpoint count: its `state.json` appears complete, after everything else is on disk."""
        for path in folder.iterdir():
            _sync(path)
        draft = folder / f".{STATE}.{uuid.uuid4().hex[:8]}"
        draft.write_text(json.dumps(state, indent=1))
        _sync(draft)
        draft.rename(folder / STATE)
        _sync(folder)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and what a killed run left unfinished."""
        kept = {checkpoint.folder for checkpoint in self.checkpoints()[-keep:]}
        for folder in self._folders():
            if folder not in kept:
                (folder / STATE).unlink(missing_ok=True)  # first stop existing, then go
                shutil.rmtree(folder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes of this host from training here; makes the folder where it is missing.

        The lock is on the folder itself and ends with the process. Where the file system has none for folders, as on NFS, there is none.

        Raises:
            StateMismatch: another process trains here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        place = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "wait until it ends, stop it, or give another trainer.run_dir"
                raise StateMismatch(str(self.path), "another process trains in this folder", remedy) from None
            except OSError as error:
                log.debug("no lock on %s: %s", self.path, error)
            yield
        finally:
            os.close(place)

    def set_aside(self) -> Path | None:
        """Move an earlier run out of the way; returns where it is now, None when there was none.

        Raises:
            StateMismatch: another process trains here.
        """
        if not self.path.exists():
            return None
        with self.held():  # nobody writes there
            return self._moved()

    def _moved(self) -> Path:
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(target)
        return target

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Write `summary.json`."""
        self.path.mkdir(parents=True, exist_ok=True)
        draft = self.path / f".summary.{uuid.uuid4().hex[:8]}"
        draft.write_text(json.dumps(summary, indent=1) + "\n")
        return draft.rename(self.path / "summary.json")

    def summary(self) -> dict[str, Any] | None:
        """What `write_summary` wrote; None before a run has ended."""
        path = self.path / "summary.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The lines of a log."""
        if path.exists():
            with path.open("rb") as file:
                yield from (json.loads(line) for line in file)

    def _folders(self) -> list[Path]:
        root = self.path / "checkpoints"
        return sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []

    def _read(self, folder: Path) -> Checkpoint | None:
        if STATE not in os.listdir(folder):
            return None
        state = json.loads((folder / STATE).read_text())
        return Checkpoint(folder, int(folder.name.removeprefix("step-").split(".")[0]), state)


def _end_of_steps_below(path: Path, step: int) -> int:
    """Byte offset behind the last whole line of a step below `step`; a torn line ends the log."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                break
            end += len(line)
    return end


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def goal(job: JobConfig) -> dict[str, Any]:
    """What makes a finished run the one that was asked for."""
    return {"max_steps": job.trainer.max_steps, "epochs": job.plan.epochs}
