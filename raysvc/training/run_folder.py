"""Keeps what a run leaves behind: checkpoints, the row log, metrics, the summary.

    <run_dir>/rows.jsonl         one line per optimizer step: which rows were applied
    <run_dir>/metrics.jsonl      one line per step: loss, tokens, times
    <run_dir>/served.jsonl       how the steps were made, from which step on; see `raysvc.builds.serve_log`
    <run_dir>/evals.jsonl        one line per eval and time it ran, with the last step trained before it
    <run_dir>/checkpoints/step-<n>.<uid>/   weights; state.json, written last, makes it count
    <run_dir>/checkpoints/damaged-step-<n>.<uid>/   one of which a file was not what was written; nobody reads or removes it
    <run_dir>/model/             the trained model, as `transformers` reads it, when the run has ended
    <run_dir>/run.json           which job this is; see `raysvc.training.run_identity`
    <run_dir>/job.json           the job, for commands that are given the folder; see `raysvc.training.run_job`
    <run_dir>/summary.json       written at the end
    <run_dir>/owners/            who trains here; see `raysvc.cache.store.claim`

Always true:
- a checkpoint without `state.json` does not exist for a reader; one whose `state.json` is not what was written is refused by name;
- after a resume the logs hold what they held when its checkpoint was made, to the byte, so they end up as if the run had never stopped;
- a checkpoint is removed only when enough newer ones are complete, and none that stays names it as the best;
- one process at a time trains in a folder, on whatever machine; one that slept while another took its place publishes, prunes and exports
  nothing there; nor does one whose folder was moved.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.builds.serve_log import FILE as SERVED
from raysvc.cache.local.sealed import opened, sealed
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.disk_failures import named_failures
from raysvc.cache.store.posix import PosixStore
from raysvc.errors import CheckpointDamaged, CheckpointTooOld, FolderLost, StateMismatch
from raysvc.evals.eval_decisions import EvalDecisions, best_of_state
from raysvc.training.step_log import Extent, lines_of

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig

STATE = "state.json"
LOGS = "logs"  # in it: file -> the extent that it had


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

    @property
    def extents(self) -> dict[str, Extent]:
        """Returns how much of each log it counts on.

        Raises:
            StateMismatch: an earlier version made it.
        """
        if LOGS not in self.state:
            what = "was made by an earlier raysvc, which kept no digests of the logs"
            remedy = "export its model with the raysvc that made it and train on from that, or give trainer.resume=false"
            raise StateMismatch(str(self.folder), what, remedy)
        return {name: Extent(*said) for name, said in self.state[LOGS].items()}


class RunFolder:
    """One run's folder on a disk that the driver and all workers see."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._claim: Claim | None = None  # while this process trains here

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
        """The file that says how steps were made."""
        return self.path / SERVED

    @property
    def evals(self) -> Path:
        """Returns what the evals said, and after which step."""
        return self.path / "evals.jsonl"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model"

    def complete(self) -> list[Path]:
        """Folders of complete checkpoints, fewest steps first."""
        return sorted((folder for folder in self._folders() if STATE in os.listdir(folder)), key=steps_of)

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        return [read_checkpoint(folder) for folder in self.complete()]

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint with the most steps.

        Raises:
            CheckpointDamaged: its `state.json` is not what was written.
        """
        there = self.complete()
        return read_checkpoint(there[-1]) if there else None

    def new_checkpoint(self, step: int) -> Path:
        """An empty folder for the ranks to write into."""
        folder = self.path / "checkpoints" / f"step-{step:08d}.{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return folder

    def before(self, damaged: Path) -> int | None:
        """Steps of the newest complete checkpoint that has fewer than this one."""
        return max((n for n in map(steps_of, self.complete()) if n < steps_of(damaged)), default=None)

    def put_away(self, damaged: Path) -> Path:
        """Rename a damaged checkpoint, so that it counts no more; nothing of it is removed.

        Raises:
            FolderHeld: another process trains here.
        """
        with self.held():
            return damaged.rename(damaged.with_name(f"damaged-{damaged.name}"))

    def publish(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Make a checkpoint count: its `state.json` appears complete, after everything else is on disk.

        Raises:
            FolderLost: another process trains here now; the checkpoint does not count.
        """
        self.check_owner()
        with named_failures(folder):
            for path in folder.iterdir():
                _sync(path)
            draft = folder / f".{STATE}.{uuid.uuid4().hex[:8]}"
            draft.write_bytes(sealed(state))
            _sync(draft)
            os.link(draft, folder / STATE)  # refuses to write over one that is there
            draft.unlink()
            _sync(folder)
        try:
            self.check_owner()
        except FolderLost:
            (folder / STATE).unlink(missing_ok=True)
            raise

    def check_owner(self) -> None:
        """Raise unless this process may write here; who never held the folder may.

        Raises:
            FolderLost: another process trains here now, or the folder was moved.
        """
        if self._claim is not None:
            self._claim.check()

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best of each, and what a killed run left unfinished.

        Raises:
            FolderLost: another process trains here now.
        """
        self.check_owner()
        complete = self.complete()
        kept = set(complete[-keep:])
        best = {_best_of(folder) for folder in kept}
        kept.update(folder for folder in complete if steps_of(folder) in best)
        for folder in self._folders():
            if folder not in kept:
                (folder / STATE).unlink(missing_ok=True)  # first stop existing, then go
                shutil.rmtree(folder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training here; makes the folder where it is missing.

        Raises:
            FolderHeld: another process trains here.
        """
        remedy = "wait until it ends, stop it, or give another trainer.run_dir"
        claim = Claim(PosixStore(str(self.path)), Owner("trainer", self.path.name), remedy=remedy)
        claim.take()
        self._claim = claim
        try:
            yield
        finally:
            self._claim = None
            claim.release()

    def set_aside(self) -> Path | None:
        """Move an earlier run out of the way; returns where it is now, None when there was none.

        Raises:
            FolderHeld: another process trains here.
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
        self.check_owner()
        with named_failures(self.path / "summary.json"):
            self.path.mkdir(parents=True, exist_ok=True)
            draft = self.path / f".summary.{uuid.uuid4().hex[:8]}"
            draft.write_text(json.dumps(summary, indent=1) + "\n")
            return draft.rename(self.path / "summary.json")

    def summary(self) -> dict[str, Any] | None:
        """Returns what `write_summary` wrote; None before a run has ended.

        Raises:
            StateMismatch: it is no summary any more.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            found = dict(json.loads(path.read_bytes()))
            shown = found["stalls"]
            if not (isinstance(shown["by_cause"], dict) and isinstance(shown["last"], list)):
                raise ValueError("stalls")
            return found
        except (ValueError, TypeError, KeyError):
            remedy = "remove it: raysvc train writes it again"
            raise StateMismatch(str(path), "is not the JSON that was written", remedy) from None

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The whole lines of a log.

        Raises:
            StateMismatch: one is damaged, or they are not those that the newest checkpoint counts on.
        """
        with suppress(CheckpointDamaged, CheckpointTooOld):
            newest = self.newest()
            if newest is not None and path.name in newest.state.get(LOGS, {}):
                return lines_of(path, newest.extents[path.name])
        return lines_of(path)

    def _folders(self) -> list[Path]:
        root = self.path / "checkpoints"
        return sorted(root.glob("step-*.*")) if root.is_dir() else []


def read_checkpoint(folder: Path) -> Checkpoint:
    """A complete checkpoint.

    Raises:
        CheckpointDamaged: its `state.json` is not what was written.
        CheckpointTooOld: an earlier version wrote it.
    """
    path = folder / STATE
    try:
        return Checkpoint(folder, steps_of(folder), opened(path.read_bytes()))
    except ValueError as error:
        if ".metadata" in os.listdir(folder):
            raise CheckpointTooOld.of(folder) from None
        raise CheckpointDamaged.of(path, str(error)) from None


def _best_of(folder: Path) -> int | None:
    """Steps of the best model that a checkpoint names; None for one that nobody can resume from."""
    try:
        return best_of_state(read_checkpoint(folder).state)
    except (CheckpointDamaged, CheckpointTooOld):
        return None


def steps_of(folder: Path) -> int:
    """Steps that are trained in a checkpoint."""
    return int(folder.name.removeprefix("step-").split(".")[0])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def goal(job: JobConfig) -> dict[str, Any]:
    """Returns what makes a finished run the one that was asked for."""
    return {"max_steps": job.trainer.max_steps, "epochs": job.plan.epochs}


def is_over(state: Mapping[str, Any], job: JobConfig) -> bool:
    """Returns whether a checkpoint with this state is the end of a job: it has all steps, or its evals stopped the run there."""
    trained, wanted = state.get("data", {}).get("frontier", 0), job.trainer.max_steps
    has_all = state.get("done_for") == goal(job) or (wanted is not None and trained >= wanted)
    return has_all or EvalDecisions.of(job.trainer, state).stops
