"""`raysvc train`: tokenize, serve, attach, and train the built-in worker; goes on where it stopped.

Always true:
- after a kill at any moment, the same call ends with the row log and weights of a run that was never stopped;
- what this run started (server, workers) ends with it; a server that was there before stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.api import CacheEntry, ServerHandle, absolute, cpus_held, serve_entry, serve_spec, tokenize
from raysvc.client import BatchClient, Step, attach
from raysvc.config import JobConfig
from raysvc.errors import ConfigError, LeaseHeld
from raysvc.jobfile import load_job
from raysvc.observe import observe_step
from raysvc.progress import Progress, Tick, silent
from raysvc.runfolder import Checkpoint, RunFolder, StepLog
from raysvc.served import read_served, served_line
from raysvc.stall import StallBook

if TYPE_CHECKING:
    from raysvc.actors.dispatch import Running, WorkerGroup
    from raysvc.actors.torch_worker import ModelSpec
    from raysvc.actors.worker import MiniResult

log = logging.getLogger(__name__)


def _never() -> bool:
    return False


def train(
    config: str | Path | Mapping[str, Any] | JobConfig | None = None,
    *,
    address: str | None = None,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = _never,
    **overrides: Any,
) -> dict[str, Any]:
    """Run a whole job; returns the summary that is also written to `<run_dir>/summary.json`.

    Args:
        should_stop: asked after every step; True ends the run there, with a checkpoint.

    Raises:
        UserMistake: something in the job that the user can mend.
        WorkerFailed: a worker died; the same call goes on from the last checkpoint.
    """
    begin = time.perf_counter()
    job = load_job(config, **overrides)
    folder = RunFolder(absolute(job.run_dir))
    if not job.trainer.resume:
        moved = folder.set_aside()
        if moved is not None:
            log.warning("trainer.resume is false: the earlier run is now in %s", moved)
    entry = tokenize(job, address=address, progress=progress)
    checkpoint = folder.newest()
    if checkpoint is not None and checkpoint.state.get("done_for") == _goal(job):
        progress(
            Tick("train", checkpoint.step, checkpoint.step, "steps", {"already": "complete"}, final=True)
        )
        return _summary(folder, entry, checkpoint.step, checkpoint.step, 0.0)
    progress(Tick("start", 0, None, "", {}))
    run = _Run(job, folder, entry, checkpoint, progress, begin, should_stop)
    return run.run(address)


def _goal(job: JobConfig) -> dict[str, Any]:
    """What makes a finished run the one that was asked for."""
    return {"max_steps": job.trainer.max_steps, "epochs": job.plan.epochs}


@dataclass(frozen=True)
class _Started:
    """A step that the workers were asked for."""

    step: Step
    running: Running
    waited_s: float
    begin: float = field(default_factory=time.perf_counter)


@dataclass
class _Run:
    """One process's share of a run: from its first to its last step."""

    job: JobConfig
    folder: RunFolder
    entry: CacheEntry
    checkpoint: Checkpoint | None
    progress: Progress
    begin: float
    should_stop: Callable[[], bool]
    stalls: StallBook = field(default_factory=StallBook)
    tokens: int = 0
    last_end: float = 0.0

    def run(self, address: str | None) -> dict[str, Any]:
        from raysvc.actors.dispatch import WorkerGroup
        from raysvc.actors.launch import server_names, stop_server
        from raysvc.cluster import connect, require_cpus

        job = self.job
        connect(address, need_cpus=cpus_held(job))
        require_cpus(cpus_held(job))
        was_there = job.server.name in server_names()
        group = WorkerGroup.start(
            model_spec(job, self.entry), job.trainer.dp_size, job.trainer.device, job.trainer.cpus_per_worker
        )
        try:
            # a server that is not detached lives as long as its handle
            server = serve_entry(job, self.entry, address=address, detached=job.server.detached)
            with _attach_when_free(job, server) as client:
                return self._train(client, group)
        finally:
            group.stop()
            if not was_there and not job.server.detached and job.server.name in server_names():
                stop_server(job.server.name)

    def _train(self, client: BatchClient, group: WorkerGroup) -> dict[str, Any]:
        if self.checkpoint is not None:
            client.load_state_dict(self.checkpoint.state["data"])
        else:
            client.rewind(0)
        group.setup()
        if self.checkpoint is not None:
            group.load_checkpoint(str(self.checkpoint.folder))
        start = client.frontier
        stop = min(client.schedule.num_steps, self.job.trainer.max_steps or client.schedule.num_steps)
        rows, metrics = StepLog(self.folder.rows, start), StepLog(self.folder.metrics, start)
        self._write_served(start)
        loop_begin = time.perf_counter()
        try:
            self._loop(client, group, stop, rows, metrics)
        finally:
            rows.close()
            metrics.close()
        loop_s = time.perf_counter() - loop_begin
        resumed = start if self.checkpoint is not None else None
        return _summary(self.folder, self.entry, client.frontier, resumed, loop_s, self.stalls, self.tokens)

    def _write_served(self, start: int) -> None:
        """Say how the steps from here on are made."""
        spec = serve_spec(self.job.model_copy(update={"evals": {}}), self.entry)
        before = read_served(str(self.folder.path), start - 1)
        if before is not None and before.spec.plan.skip_rows != spec.plan.skip_rows:
            counts = len(before.spec.plan.skip_rows), len(spec.plan.skip_rows)
            log.warning("plan.skip_rows changed at step %d: it had %d rows and has %d", start, *counts)
        served = StepLog(self.folder.served, start)
        served.append(served_line(start, self.job.trainer.dp_size, spec))
        served.sync()
        served.close()

    def _loop(
        self, client: BatchClient, group: WorkerGroup, stop: int, rows: StepLog, metrics: StepLog
    ) -> None:
        """Start each step before waiting for the one before it, so that the workers never wait for the driver."""
        every = self.job.trainer.checkpoint_every_steps
        before: _Started | None = None
        for step in client.steps(on_fetch=group.stage, stop=stop):
            started = _Started(
                step, group.start_step(step, self.job.trainer.learning_rate), client.stats().last_wait_s
            )
            if before is not None:
                self._finish(client, group, before, rows, metrics)
            before = started
            asked = self.should_stop()
            if asked or step.index + 1 == stop or (every and (step.index + 1) % every == 0):
                self._finish(client, group, started, rows, metrics)
                self._save(client, group, stop, rows, metrics)
                before = None
            if asked:
                return

    def _finish(
        self, client: BatchClient, group: WorkerGroup, started: _Started, rows: StepLog, metrics: StepLog
    ) -> None:
        results = group.finish_step(started.running)
        step_s = time.perf_counter() - max(started.begin, self.last_end)
        self.last_end = time.perf_counter()
        stall_s = max(_stall_s(rank, started.waited_s) for rank in results)
        times = observe_step(self.entry.uri, client, started.step, results, step_s, stall_s)
        verdict = self.stalls.add(times)
        if verdict is not None:
            log.info("stalled server=%s %s", self.job.server.name, verdict)
        self._log_step(started.step, results, rows, metrics, step_s, stall_s)
        client.commit(started.step.index)

    def _log_step(
        self,
        step: Step,
        results: list[list[MiniResult]],
        rows: StepLog,
        metrics: StepLog,
        step_s: float,
        stall_s: float,
    ) -> None:
        from raysvc.actors.results import reduce_timing

        losses = [sum(rank[mini].loss for rank in results) for mini in range(len(step.mini_batches))]
        infos = [mini.info for mini in step.mini_batches if mini.info is not None]
        for index, info in enumerate(infos):
            line = {"step": step.index, "mini": index, "epoch": step.epoch, "row_ids": info.row_ids.tolist()}
            rows.append(line)
        tokens = sum(info.denominators.tokens for info in infos)
        self.tokens += tokens
        loss = sum(losses) / len(losses)
        counts = {"rows": sum(len(info.row_ids) for info in infos), "tokens": tokens, "minis": len(infos)}
        times = {"step_s": round(step_s, 6), "stall_s": round(stall_s, 6)}
        grad_norm = results[0][-1].grad_norm
        parts = [reduce_timing([rank[mini].timing for rank in results]) for mini in range(len(losses))]
        timing = {"timing": parts} if any(parts) else {}
        metrics.append(
            {"step": step.index, "loss": loss, "grad_norm": grad_norm, **counts, **times, **timing}
        )
        facts = {
            "loss": round(loss, 4),
            "tokens/s": round(tokens / max(step_s, 1e-9)),
            "stall ms": round(stall_s * 1e3, 1),
        }
        self.progress(Tick("train", step.index + 1, None, "steps", facts))

    def _save(
        self, client: BatchClient, group: WorkerGroup, stop: int, rows: StepLog, metrics: StepLog
    ) -> None:
        rows.sync()
        metrics.sync()
        state = client.state_dict()
        folder = self.folder.new_checkpoint(state["frontier"])
        group.save_checkpoint(str(folder))
        done = {"done_for": _goal(self.job)} if state["frontier"] == stop else {}
        self.folder.publish(folder, {"data": state, **done})
        self.folder.prune(self.job.trainer.keep_checkpoints)


def model_spec(job: JobConfig, entry: CacheEntry) -> ModelSpec:
    """What the workers of a job build."""
    from raysvc.actors.staging import StagingOptions
    from raysvc.actors.torch_worker import ModelSpec

    trainer = job.trainer
    return ModelSpec(
        model=trainer.model,
        vocab_size=int(entry.report["vocab_size"]),
        strategy=trainer.strategy,
        precision=trainer.precision,
        staging=StagingOptions(timing=trainer.timing),
        learning_rate=trainer.learning_rate,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        loss=trainer.loss,
        seed=trainer.seed,
    )


def _attach_when_free(job: JobConfig, server: ServerHandle) -> BatchClient:
    """Attach; a lease that a killed trainer left behind is waited for until it runs out.

    Raises:
        LeaseHeld: the holder lives.
    """
    until = time.monotonic() + job.server.lease_ttl_s + 1.0
    while True:
        try:
            return attach(server.name, job.trainer.dp_size, look_ahead_steps=job.server.look_ahead_steps)
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


def _summary(
    folder: RunFolder,
    entry: CacheEntry,
    steps: int,
    resumed_from: int | None,
    loop_s: float,
    stalls: StallBook | None = None,
    tokens: int = 0,
) -> dict[str, Any]:
    """What a run says at its end; losses, rows and tokens are of the whole run, rates of this process."""
    lines = list(folder.lines(folder.metrics))
    if not lines:
        raise ConfigError("trainer.run_dir", f"{folder.path} has no metrics.jsonl", "use another run_dir")
    summary = {
        "steps": steps,
        "optimizer_steps": sum(line["minis"] for line in lines),
        "rows": sum(line["rows"] for line in lines),
        "tokens_trained": sum(line["tokens"] for line in lines),
        "loss_first": lines[0]["loss"],
        "loss_last": lines[-1]["loss"],
        "tokens_per_s": round(tokens / loop_s, 1) if loop_s else 0.0,
        "stall_fraction": round(stalls.total_s / loop_s, 4) if loop_s and stalls else 0.0,
        "stalls": dict((stalls or StallBook()).summary()),
        "cache": {"key": entry.key, "hit": entry.hit, "reason": entry.reason, "uri": entry.uri},
        "resumed_from": resumed_from,
    }
    folder.write_summary(summary)
    return summary
