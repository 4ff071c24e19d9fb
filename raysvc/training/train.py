"""`raysvc train`: tokenize, enrich, serve, attach, and train the built-in worker; goes on where it stopped.

Always true:
- after a kill at any moment, the same call ends with the row log and weights of a run that was never stopped;
- a newest checkpoint that is damaged is named in a warning and put away, and the one before it is taken; the last one is refused;
- what this run started (server, workers) ends with it; a server that was there before stays.

A run waits longest for Ray, so this module imports little and starts it; what a run needs is imported meanwhile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysvc.cache.store.open import absolute
from raysvc.cluster import starting, starts_own
from raysvc.errors import CheckpointDamaged, ConfigError
from raysvc.job.config import JobConfig, cpus_held, idle_ranks
from raysvc.job.job_file import load_job
from raysvc.nodes.job_nodes import ready_to_train
from raysvc.progress import Progress, silent
from raysvc.trackers.known_trackers import check_installed
from raysvc.training.model_entries import check_entries, may_lack_entries
from raysvc.training.model_name import check_layout, check_model
from raysvc.training.run_folder import RunFolder, is_over, steps_of

log = logging.getLogger(__name__)
LEAST_CPUS = 2  # so that the two ranks of the demo run on any machine


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        global_step: steps that are trained.
        metrics: what `<path>/summary.json` holds: losses, evals, rows trained and left out, speed, stalls.
        path: run folder.
        model: folder of the trained model; None: the run did not come to its end.
    """

    global_step: int
    metrics: Mapping[str, Any]
    path: Path
    model: Path | None


def _never() -> bool:
    return False


def train(
    config: str | Path | Mapping[str, Any] | JobConfig | None = None,
    *,
    address: str | None = None,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = _never,
    **overrides: Any,
) -> TrainResult:
    """Run a whole job; goes on where an earlier call of it stopped.

    Args:
        should_stop: asked after every step; True ends the run there, with a checkpoint.

    Raises:
        UserMistake: something in the job that the user can fix.
        StateMismatch: the folder belongs to another job, or another process trains in it.
        WorkerFailed: a worker died; the same call resumes from the last checkpoint.
    """
    begin = time.perf_counter()
    job = load_job(config, **overrides)
    check_installed(job.trainer.report_to)
    _check_cpus(job, address)
    _check_columns(job)
    if job.is_endless and job.trainer.max_steps is None:
        what = "a source that is followed has no end, so the run would have none"
        raise ConfigError("trainer.max_steps", what, "say how many steps to train")
    folder = RunFolder(absolute(job.run_dir))
    if not job.trainer.resume:
        moved = folder.set_aside()
        if moved is not None:
            log.warning("trainer.resume is false: the earlier run is now in %s", moved)
    ray_there: Future[str] | None = None
    while True:
        try:
            checkpoint = folder.newest()
            complete = checkpoint is not None and is_over(checkpoint.state, job)
            if not complete and ray_there is None:
                joins = not starts_own(address)
                _check_files(job)
                check_model(job.trainer.model, alone=not joins)
                _warn_of_idle_ranks(job)
                if may_lack_entries(job):
                    check_layout(job, None)  # before a row is read; all other jobs ask while Ray starts
                    _look_at_rows(job, address, progress)
                ray_there = starting(address, need_cpus=cpus_held(job))
                if joins:
                    ray_there.result()
                    ready_to_train(job)  # before its rows are tokenized

            from raysvc.training.train_loop import run_job

            there = None if complete else ray_there
            metrics = run_job(job, folder, checkpoint, address, there, progress, should_stop, begin)
            model = folder.model if metrics["model"] else None
            return TrainResult(metrics["steps"], metrics, folder.path, model)
        except CheckpointDamaged as error:
            _step_back(folder, error)


def _step_back(folder: RunFolder, error: CheckpointDamaged) -> None:
    """Put a damaged checkpoint away, if there is an earlier one: the run then trains the steps between once more, with the same rows.

    Raises:
        CheckpointDamaged: there is none, and a run that begins again from its first step is the user's decision; or it is not the
            newest, but the best, and no other one is.
    """
    damaged = Path(error.where).parent
    there = folder.complete()
    if there and damaged != there[-1]:  # the best one, which the model at the end is made of
        remedy = f"restore it, or take the newest: raysvc export {folder.path} --step {steps_of(there[-1])}"
        raise CheckpointDamaged(error.where, error.what, remedy) from error
    earlier = folder.before(damaged)
    if earlier is None:
        raise error
    aside = folder.put_away(damaged)
    what = "DAMAGED CHECKPOINT: %s %s; the run goes on from the checkpoint of step %d, and the damaged one is now %s"
    log.warning(what, error.where, error.what, earlier, aside)


def _look_at_rows(job: JobConfig, address: str | None, progress: Progress) -> None:
    """Tokenize before Ray starts, and look whether the model has all that the rows use; a build that goes on beside the run
    shows its rows to the worker alone."""
    from raysvc.api import entry_or_build

    entry, build = entry_or_build(job, address, progress)
    if build is None:
        check_entries(job, entry)


def _check_cpus(job: JobConfig, address: str | None) -> None:
    """A Ray of this process has as many CPUs as a job asks for, and no autoscaler: nothing else bounds them."""
    count, cpus = job.server.collators, os.cpu_count() or 1
    if count > cpus and starts_own(address):
        what = f"{count} processes of one CPU each, and this machine has {cpus}"
        raise ConfigError("server.collators", what, f"at most {cpus}, or a cluster: --address HOST:PORT")
    held, ranks = cpus_held(job) - count, job.trainer.dp_size
    if held > max(cpus, LEAST_CPUS) and starts_own(address):
        what = f"{ranks} ranks and the server hold {held:g} CPUs, and this machine has {cpus}"
        remedy = "give fewer, or a lower trainer.cpus_per_worker, or a cluster: --address HOST:PORT"
        raise ConfigError("trainer.dp_size", what, remedy)


def _warn_of_idle_ranks(job: JobConfig) -> None:
    if idle := idle_ranks(job):
        size = "plan.mini_batch_size" if job.plan.mini_batch_size else "plan.batch_size"
        rows = job.plan.mini_batch_size or job.plan.batch_size
        what = (
            "of trainer.dp_size = %d ranks %d would train nothing: %s is %d; give fewer ranks, or more rows"
        )
        log.warning(what, job.trainer.dp_size, idle, size, rows)


def _check_files(job: JobConfig) -> None:
    """Files that are not there, and evals of other rows, are refused before anything starts, which costs a start the time of this import."""
    from raysvc.evals.eval_entries import check_all_files, check_evals

    check_all_files(job)
    check_evals(job)


def _check_columns(job: JobConfig) -> None:
    """The model reads these arrays, and the loss labels."""
    need = ["input_ids", "position_ids", "labels"]
    if job.plan.layout.startswith("padded"):
        need.append("attention_mask")
    if missing := [name for name in need if name not in job.plan.columns]:
        what = f"lacks {', '.join(missing)}, and the trainer of raysvc needs {', '.join(need)}"
        raise ConfigError("plan.columns", what, "add them, or leave the key out")
