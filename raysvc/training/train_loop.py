"""A run from its first to its last step: it starts the server and the workers, trains, saves, and ends what it started."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.api import ServerHandle, building, entry_or_build, serve_entry, serve_spec, start_build
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.serve_log import read_served
from raysvc.chat.tokens.token_bytes import count_bytes
from raysvc.client.batch_client import BatchClient, Step, attach
from raysvc.errors import FolderLost, LeaseHeld, StateMismatch, TokenizerError
from raysvc.evals.eval_decisions import EvalDecisions, refuse_another_best
from raysvc.evals.eval_entries import keys_of_evals
from raysvc.inspect.left_out import left_out
from raysvc.job.config import JobConfig, cpus_held, held_beside
from raysvc.progress import Progress, Tick, how_many
from raysvc.trackers.reporter import NO_TRACKERS, Reporter, open_reporter
from raysvc.trackers.stalls import StallBook
from raysvc.trackers.tracker import tracked_run
from raysvc.training.adapting import MixtureAdapter
from raysvc.training.evaluation import Evals, HeldBack
from raysvc.training.export import best_checkpoint, export, from_checkpoint, tokenizer_beside, write_model
from raysvc.training.loss_shares import LossShares
from raysvc.training.model_entries import check_entries
from raysvc.training.model_name import check_layout, check_scaling, vision_of, warn_of_scaling
from raysvc.training.objective import OF_A_CRITIC, mean_of, objective_of, unit_of
from raysvc.training.run_folder import Checkpoint, RunFolder, goal
from raysvc.training.run_identity import claim, identity_of
from raysvc.training.run_job import keep_job
from raysvc.training.run_log import RunLog, observe_step, write_summary

if TYPE_CHECKING:
    from raysvc.actors.dispatch.dispatch import RunningStep, WorkerGroup
    from raysvc.actors.dispatch.worker_group import Setup
    from raysvc.actors.worker.lr_schedule import LearningRate
    from raysvc.actors.worker.torch_worker import ModelSpec
    from raysvc.actors.worker.worker import MiniResult
    from raysvc.builds.build_beside import BuildBeside
    from raysvc.plan.schedule import Schedule

log = logging.getLogger(__name__)
GROUP = "policy"


def run_job(
    job: JobConfig,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    address: str | None,
    ray_there: Future[str] | None,
    progress: Progress,
    should_stop: Callable[[], bool],
    begin: float,
) -> dict[str, Any]:
    """The summary of a run that goes on from `checkpoint`.

    Args:
        ray_there: Ray, which is starting; None: the checkpoint is the end of the job.
        begin: of the command, by `time.perf_counter`.
    """
    if ray_there is None:
        entry, build = entry_or_build(job, address, progress)
    else:
        step = 0 if checkpoint is None else checkpoint.step
        entry, build = _entry_beside_ray(job, address, progress, step, ray_there)
    with building(build), folder.held():
        _refuse_if_trained_meanwhile(folder, checkpoint)
        if checkpoint is not None and ray_there is None:
            refuse_another_best(job.trainer, checkpoint.state, str(folder.path))
        claim(
            folder.path,
            identity_of(job, entry),
            has_checkpoint=checkpoint is not None,
            changed=job.trainer.resume == "changed",
        )
        keep_job(folder.path, job)
        if checkpoint is None or ray_there is not None:
            return _Run(job, folder, entry, build, checkpoint, progress, begin, should_stop).run(address)
        if build is not None:
            build.stop()
        decisions = EvalDecisions.of(job.trainer, checkpoint.state)
        already = "stopped early" if decisions.stops else "complete"
        progress(Tick("train", checkpoint.step, checkpoint.step, "steps", {"already": already}, final=True))
        known = folder.summary()
        told = known if known and known["steps"] == checkpoint.step and known.get("model") else None
        if told is None or not folder.model.exists():
            shutil.rmtree(folder.model, ignore_errors=True)  # of an end before this one
            export(job, folder.model)
        if told is None:  # it was killed, or asked to stop, before it wrote another
            left = left_out(job, entry, folder)
            return write_summary(
                folder, entry, left, checkpoint.step, checkpoint.step, 0.0, decisions=decisions
            )
        return {
            **told,
            "cache": entry.facts,
            "left_out": left_out(job, entry, folder),
            "resumed_from": checkpoint.step,
        }


def _refuse_if_trained_meanwhile(folder: RunFolder, checkpoint: Checkpoint | None) -> None:
    newest = folder.newest()
    if (newest and newest.folder) != (checkpoint and checkpoint.folder):
        what = "another process trained in it since this one looked for a checkpoint"
        raise StateMismatch(str(folder.path), what, "run the same command again")


def _entry_beside_ray(
    job: JobConfig, address: str | None, progress: Progress, step: int, ray_there: Future[str]
) -> tuple[CacheEntry, BuildBeside | None]:
    """Does what `entry_or_build` does; the first slice is made, and what workers need is imported, while Ray starts."""
    try:
        check_layout(job, ray_there)
        found = entry_or_build(job, address, progress)
        if found[1] is None:
            check_entries(job, found[0])
            check_scaling(job, found[0])
        else:
            warn_of_scaling(job)
            found[1].make_first(job, step)
        import_module("raysvc.actors.dispatch.dispatch")
    finally:
        if not ray_there.done():
            progress(Tick("start", 0, None, "", waiting="starting Ray"))
        wait([ray_there])
    ray_there.result()
    return found


@dataclass(frozen=True)
class _Started:
    """A step that the workers were asked for."""

    step: Step
    running: RunningStep
    waited_s: float
    begin: float = field(default_factory=time.perf_counter)


@dataclass
class _Run:
    """One process's share of a run."""

    job: JobConfig
    folder: RunFolder
    entry: CacheEntry
    build: BuildBeside | None  # of the entry, where it grows
    checkpoint: Checkpoint | None
    progress: Progress
    begin: float
    should_stop: Callable[[], bool]
    stalls: StallBook = field(default_factory=StallBook)
    last_end: float = 0.0
    reporter: Reporter = NO_TRACKERS
    adapting: MixtureAdapter = field(init=False)  # known once the rows are
    decisions: EvalDecisions = field(init=False)  # of the evals so far
    save_tokenizer: Callable[[Path], None] | None = (
        None  # loaded since the first step, for the model at the end
    )

    def __post_init__(self) -> None:
        state = {} if self.checkpoint is None else self.checkpoint.state
        self.decisions = EvalDecisions.of(self.job.trainer, state)

    def run(self, address: str | None) -> dict[str, Any]:
        """Open the trackers, train, and say how it went."""
        if names := self.job.trainer.report_to:
            done = 0 if self.checkpoint is None else self.checkpoint.step
            config = self.job.model_dump(mode="json")
            self.reporter = open_reporter(
                names, tracked_run(self.folder.path, config=config, steps_done=done)
            )
        try:
            return self._run(address)
        except FolderLost:
            self.reporter.leave()
            raise
        finally:
            self.reporter.on_end({}, finished=False)  # nothing more after the summary

    def _run(self, address: str | None) -> dict[str, Any]:
        from raysvc.actors.dispatch.dispatch import WorkerGroup
        from raysvc.actors.launch import server_names, stop_server
        from raysvc.cluster import connect

        job = self.job
        connect(address, need_cpus=cpus_held(job))
        self.progress(Tick("start", 0, None, "", waiting=_what_starts(job)))
        was_there = job.server.name in server_names()
        group = WorkerGroup.start(
            model_spec(job, self.entry), job.trainer.dp_size, job.trainer.device, job.trainer.cpus_per_worker,
            job.trainer.gpus_per_worker, may_grow=job.trainer.wait_for_nodes, beside=held_beside(job),
        )  # fmt: skip
        setup = group.start_setup()  # the workers import and build while the server opens the entry
        try:
            if self.build is not None:
                step = 0 if self.checkpoint is None else self.checkpoint.step
                start_build(job, self.build, step, address, self.progress)
            # a server that is not detached lives as long as its handle
            server = serve_entry(
                job, self.entry, address=address, detached=job.server.detached, trainer_node=group.node_id
            )
            nodes = group.node_ids() if job.server.collators else None
            with _attach_when_free(job, server, nodes) as client:
                return self._train(client, group, setup)
        finally:
            if self.build is not None:
                self.build.stop()
            group.stop()
            if not was_there and not job.server.detached and job.server.name in server_names():
                stop_server(job.server.name)

    def _train(self, client: BatchClient, group: WorkerGroup, setup: Setup) -> dict[str, Any]:
        import ray

        if self.checkpoint is not None:
            client.load_state_dict(self.checkpoint.state["data"])
        else:
            client.rewind(0)
        group.wait_for_setup(setup)
        where = {"cluster": ray.get_runtime_context().gcs_address}
        self.progress(Tick("start", 0, None, "", where, final=True))
        if self.checkpoint is not None:
            found = {"checkpoint": self.checkpoint.folder.name}
            self.progress(
                Tick("resume", self.checkpoint.step, None, "steps trained before", found, final=True)
            )
            group.load_checkpoint(str(self.checkpoint.folder))
            self._forget_other_evals(self.checkpoint.state)
        else:
            if self.folder.rows.is_file() and self.folder.rows.stat().st_size:
                kept = "steps: no checkpoint was made, so what was trained before is trained again"
                self.progress(Tick("resume", 0, None, kept, final=True))
            self.decisions = EvalDecisions.of(self.job.trainer, {}, keys_of_evals(self.job))
        start = client.next_step
        stop = min(client.schedule.num_steps, self.job.trainer.max_steps or client.schedule.num_steps)
        group.gather(
            "set_schedule", group.call("set_schedule", _learning_rate(self.job, client.schedule, stop))
        )
        per_epoch = client.schedule.steps_per_epoch
        entry = self.entry
        alone = self.job.server.share == "none"
        shares, self.adapting = LossShares(entry), MixtureAdapter(self.job.mixture, entry, alone=alone)
        books = RunLog(
            self.folder,
            self.checkpoint,
            stop,
            self.progress,
            self.reporter,
            per_epoch,
            shares,
            mean_of(self.job.trainer),
            unit_of(self.job.trainer),
        )
        loop_begin = time.perf_counter()
        try:
            self._write_served(start, books)
            self._loop(client, group, stop, books)
        finally:
            books.close()
        loop_s = time.perf_counter() - loop_begin
        resumed = start if self.checkpoint is not None else None
        finished = client.next_step == stop or self.decisions.stops
        if self.build is not None and client.next_step >= per_epoch:
            self.build.wait()  # all slices are there; what is left is the manifest
        return write_summary(
            self.folder,
            self.entry,
            left_out(self.job, self.entry, self.folder),
            client.next_step,
            resumed,
            loop_s,
            self.stalls,
            books.tokens,
            finished,
            self.reporter,
            self.decisions,
        )

    def _forget_other_evals(self, state: dict[str, Any]) -> None:
        """Forget the best model by rows that an eval does not have any more."""
        known = self.decisions.best_steps
        self.decisions = EvalDecisions.of(self.job.trainer, state, keys_of_evals(self.job))
        if known is not None and self.decisions.best_steps is None:
            log.warning(
                "evals: the rows changed, so the best model, of %d steps, is not known any more", known
            )

    def _write_served(self, start: int, books: RunLog) -> None:
        """Say how the steps from here on are made."""
        from raysvc.actors.server.kept.served_records import served_line

        spec = serve_spec(self.job, self.entry, evals=())
        before = read_served(str(self.folder.path), start - 1)
        if before is not None and before.spec.plan.skip_rows != spec.plan.skip_rows:
            counts = len(before.spec.plan.skip_rows), len(spec.plan.skip_rows)
            log.warning("plan.skip_rows changed at step %d: it had %d rows and has %d", start, *counts)
        books.served(served_line(start, self.job.trainer.dp_size, spec))

    def _loop(self, client: BatchClient, group: WorkerGroup, stop: int, books: RunLog) -> None:
        """Start each step before waiting for the one before it, so that the workers never wait for the driver."""
        from raysvc.actors.dispatch.dispatch import WorkerDispatch

        every, evals = self.job.trainer.checkpoint_every_steps, self._evals(group, stop)
        stage = HeldBack(group.stage, evals.next_after(client.next_step))
        before: _Started | None = None
        client.meter.told_by_workers = True
        for step in client.steps(on_fetch=stage, stop=stop):
            started = _Started(step, group.start_step(step), client.stats().last_wait_s)
            if before is not None:
                self._finish(client, group, before, books)
            before, done, asked = started, step.index + 1, self.should_stop()
            evaluating = evals.due(done)
            saving = asked or done == stop or bool(every and done % every == 0)
            if evaluating or saving or client.schedule.is_endless:  # the next step may be long in coming
                self._finish(client, group, started, books)
                before = None
            if evaluating:
                lines = evals.run(client, WorkerDispatch({GROUP: group}), GROUP, self.progress)
                self.decisions = self.decisions.after(done, books.evals(step.index, lines))
                stage.go_on(evals.next_after(done))
            stops, is_best = self.decisions.stops, self.decisions.best_steps == done
            if saving or stops or is_best:
                self._save(client, group, stop, books)
            if asked or stops:
                return

    def _evals(self, group: WorkerGroup, stop: int) -> Evals:
        """The job's evals; the workers are told the bytes of every token."""
        evals = Evals.of(self.job, stop)
        if not evals.names:
            return evals
        try:
            counts = count_bytes(self.entry.tokenizer)
        except TokenizerError as error:  # all rows may come from the cache
            log.warning("evals have no bits per byte: %s", error)
            return evals
        if counts is not None:
            group.gather("set_token_bytes", group.call("set_token_bytes", counts))
        return evals

    def _finish(self, client: BatchClient, group: WorkerGroup, started: _Started, books: RunLog) -> None:
        results = group.finish_step(started.running)
        if self.build is not None:
            self.build.check()
        step_s = time.perf_counter() - max(started.begin, self.last_end)
        self.last_end = time.perf_counter()
        stall_s = max(_stall_s(rank, started.waited_s) for rank in results)
        times = observe_step(self.entry.uri, client, started.step, results, stall_s)
        verdict = self.stalls.add(times)
        if verdict is not None:
            log.info("stalled server=%s %s", self.job.server.name, verdict)
        books.step(started.step, results, step_s, times)
        step = started.step
        self.adapting.report(client, step.index, len(step.mini_batches), results)
        client.commit(step.index)
        self.adapting.decide(client, step.index + 1)
        if self.save_tokenizer is None:
            self.save_tokenizer = tokenizer_beside(self.job.tokenizer)

    def _save(self, client: BatchClient, group: WorkerGroup, stop: int, books: RunLog) -> None:
        logs, state = books.to_state(), client.state_dict()
        folder = self.folder.new_checkpoint(state["frontier"])
        group.save_checkpoint(str(folder))
        done = {"done_for": goal(self.job)} if state["frontier"] == stop else {}
        self.folder.publish(folder, {"data": state, **logs, **self.decisions.to_state(), **done})
        books.checkpoint(state["frontier"], folder)
        self.folder.prune(self.job.trainer.keep_checkpoints)
        if done or self.decisions.stops:
            write_model(
                self.job,
                self.folder.model,
                partial(self._save_model, group, state["frontier"]),
                self.save_tokenizer,
            )

    def _save_model(self, group: WorkerGroup, steps: int, folder: Path) -> None:
        """Let the workers write the model, or write the best one, into a folder that takes the place of an older one, if this run
        still owns that.
        """
        best = self.decisions.best_steps
        if best is None or best == steps:
            group.save_hf_model(str(folder))
        else:
            from_checkpoint(best_checkpoint(self.folder, best), folder)
        self.folder.check_owner()


def _what_starts(job: JobConfig) -> str:
    """Returns what a run waits for before its first step."""
    import ray

    workers = job.trainer.dp_size
    text = f"starting {how_many(workers, 'worker')} and the server"
    need, free = cpus_held(job), float(ray.available_resources().get("CPU", 0))
    return text if free >= need else f"{text}; waiting for {need:g} CPUs, {free:g} are free"


def model_spec(job: JobConfig, entry: CacheEntry) -> ModelSpec:
    """Returns what the workers of a job build.

    Raises:
        ConfigError: the objective or the model does not fit the rows.
    """
    from raysvc.actors.staging.staging import StagingOptions
    from raysvc.actors.worker.torch_worker import ModelSpec

    trainer, staging = job.trainer, job.trainer.staging
    own_loss = objective_of(job, entry)
    return ModelSpec(
        own_loss=own_loss,
        role="critic" if trainer.objective in OF_A_CRITIC else "policy",
        model=trainer.model,
        vocab_size=int(entry.report["vocab_size"]),
        strategy=trainer.strategy,
        precision=trainer.precision,
        gradient_checkpointing=trainer.gradient_checkpointing,
        vision=vision_of(job, entry),
        layouts=(job.plan.layout,),
        staging=StagingOptions(
            prefetch=staging.prefetch,
            copy_stream=staging.copy_stream,
            pin_memory=staging.pin_memory,
            ring_bytes=None if staging.ring_mb is None else int(staging.ring_mb * 1e6),
            timing=trainer.timing,
            timing_every_steps=staging.timing_every_steps,
        ),
        learning_rate=trainer.learning_rate,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        loss=trainer.loss,
        loss_constant=trainer.loss_constant,
        seed=trainer.seed,
    )


def _learning_rate(job: JobConfig, schedule: Schedule, stop: int) -> LearningRate:
    """The rates of a run of `stop` steps."""
    from raysvc.actors.worker.lr_schedule import LearningRate

    minis = sum(schedule.mini_batches_at(step) for step in range(stop))
    return LearningRate(
        peak=job.trainer.learning_rate,
        warmup_steps=job.trainer.warmup_steps,
        total_steps=minis * schedule.update_epochs,
        decay=job.trainer.lr_schedule,
    )


def _attach_when_free(job: JobConfig, server: ServerHandle, nodes: Sequence[str] | None) -> BatchClient:
    """Attach; a lease that a killed trainer left behind is waited for until it runs out.

    Raises:
        LeaseHeld: the holder lives.
    """
    until = time.monotonic() + job.server.lease_ttl_s + 1.0
    while True:
        try:
            return attach(
                server.name,
                job.trainer.dp_size,
                locality_hints=nodes,
                look_ahead_steps=job.server.look_ahead_steps,
            )
        except LeaseHeld as error:
            if time.monotonic() > until:
                raise
            log.warning("waiting for the lease of %s to run out", error.holder)
            time.sleep(min(2.0, job.server.lease_ttl_s / 4))


def _stall_s(minis: list[MiniResult], driver_waited_s: float) -> float:
    """Seconds in which one rank computed nothing because data was late.

    The driver's wait for the step overlaps the step before; it counts as far as the rank was idle too.
    """
    waited_s = driver_waited_s + sum(mini.wait_s for mini in minis)
    return min(
        waited_s, sum(mini.idle_s for mini in minis) if minis[0].idle_s > minis[0].wait_s else waited_s
    )
