"""Measures what a perfect loader would give: the same steps once through the real loader, once from shards that are there already.

Always true:
- nothing of the job's run is touched: the server is a private one without a journal, and neither row log, metrics,
  checkpoints nor summary are opened for writing; the weights that these steps make are dropped with the workers;
- both halves train the same rows on the same workers, after all of them were trained once without being counted: the
  first sight of a shape costs a GPU memory and kernels, whichever loader brings it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.api import enrich, serve_spec
from raysvc.builds.cache_entry import CacheEntry
from raysvc.cache.store.open import absolute
from raysvc.client.batch_client import BatchClient, attach
from raysvc.errors import PlanError
from raysvc.job.config import JobConfig, cpus_held, held_beside
from raysvc.job.job_file import load_job
from raysvc.progress import Progress, Tick, how_many, silent
from raysvc.training.run_folder import Checkpoint, RunFolder
from raysvc.training.train_loop import model_spec

if TYPE_CHECKING:
    from raysvc.actors.dispatch.worker_group import WorkerGroup
    from raysvc.client.steps import Step

log = logging.getLogger(__name__)
WARM_STEPS = 2  # of each half: the pipeline fills
WORTH = 0.02  # a difference below this is noise of ten steps
STAGE_TIMEOUT_S = 300.0
LEARNING_RATE = 1e-9  # the weights are dropped; they should not run away meanwhile


@dataclass(frozen=True)
class Headroom:
    """Both halves.

    Attributes:
        first_step: of those that were counted.
        steps: counted.
        tokens: with loss, in them.
        real_s: through the loader.
        perfect_s: from shards on the workers.
        perfect_wait_s: a worker waited for a shard in that half all the same; 0, or the measurement is void.
    """

    first_step: int
    steps: int
    tokens: int
    real_s: float
    perfect_s: float
    perfect_wait_s: float = 0.0

    @property
    def share_lost(self) -> float:
        """Share of the real time that a perfect loader would save, 0 to 1."""
        return max(0.0, 1.0 - self.perfect_s / self.real_s)

    def verdict(self) -> str:
        """One line."""
        real, perfect = self.tokens / self.real_s, self.tokens / self.perfect_s
        rates = f"{perfect:,.0f} tokens/s with a perfect loader, {real:,.0f} with the real one"
        if self.share_lost < WORTH:
            return f"data is not the limit: {rates}"
        return f"data costs {self.share_lost:.1%} of the time: {rates}; `stalls` of a run says what waits"

    def to_json(self) -> dict[str, Any]:
        """Rates of both halves."""
        halves = {"real": self.real_s, "perfect": self.perfect_s}
        rates = {
            name: {"seconds": round(seconds, 4), "steps_per_s": round(self.steps / seconds, 3),
                   "tokens_per_s": round(self.tokens / seconds, 1)}
            for name, seconds in halves.items()
        }  # fmt: skip
        counts: dict[str, float] = {"first_step": self.first_step, "steps": self.steps, "tokens": self.tokens}
        counts["perfect_wait_s"] = round(self.perfect_wait_s, 4)
        return {**counts, **rates, "share_lost": round(self.share_lost, 4), "verdict": self.verdict()}


def measure(
    config: str | Path | JobConfig, steps: int, *, address: str | None = None, progress: Progress = silent
) -> Headroom:
    """Measure `steps` steps from the run's newest checkpoint on (or the last ones of the plan).

    Raises:
        PlanError: the plan has too few steps.
        ConfigError: the cluster cannot hold workers and server together.
    """
    from raysvc.actors.launch import start_server, stop_server
    from raysvc.cluster import connect

    job = load_job(config)
    entry = enrich(job, address=address, progress=progress)
    connect(address, need_cpus=cpus_held(job))
    name = f"{job.server.name[:60]}.headroom-{os.getpid()}"
    private: dict[str, Any] = {"name": name, "journal": None, "evals": {}, "reap": True}
    spec = serve_spec(job, entry).model_copy(update=private)
    server = start_server(spec, detached=False, may_grow=job.trainer.wait_for_nodes)
    try:
        with attach(name, job.trainer.dp_size, look_ahead_steps=job.server.look_ahead_steps) as client:
            return _measure(job, entry, client, steps, progress)
    finally:
        stop_server(name)
        del server  # it lives as long as its handle


def _measure(
    job: JobConfig, entry: CacheEntry, client: BatchClient, steps: int, progress: Progress
) -> Headroom:
    count, total = steps + WARM_STEPS, client.schedule.num_steps
    if count > total:
        what = f"{how_many(steps, 'step')} and {WARM_STEPS} to warm up are more than the {total} of the plan"
        raise PlanError("--headroom", what, "give fewer, or raise plan.epochs")
    checkpoint = RunFolder(absolute(job.run_dir)).newest()
    first = min(checkpoint.step if checkpoint else 0, total - count)
    group = _workers(job, entry, checkpoint, _ring_bytes(client, first, first + count))
    try:
        _through_the_loader(client, group, first, first + count, progress, "not counted")
        real_s, held = _through_the_loader(client, group, first, first + count, progress, "real loader")
        perfect_s, wait_s = _from_the_workers(group, held, progress)
    finally:
        group.stop()
    infos = [mini.info for step in held[WARM_STEPS:] for mini in step.mini_batches if mini.info]
    tokens = sum(info.denominators.tokens for info in infos)
    return Headroom(first + WARM_STEPS, steps, tokens, real_s, perfect_s, wait_s)


def _workers(
    job: JobConfig, entry: CacheEntry, checkpoint: Checkpoint | None, ring_bytes: int
) -> WorkerGroup:
    from raysvc.actors.dispatch.worker_group import WorkerGroup

    trainer = job.trainer
    spec = model_spec(job, entry)
    staging = replace(spec.staging, ring_bytes=ring_bytes, timing=False)
    spec = spec.model_copy(update={"staging": staging})
    group = WorkerGroup.start(
        spec, trainer.dp_size, trainer.device, trainer.cpus_per_worker, trainer.gpus_per_worker,
        may_grow=trainer.wait_for_nodes, beside=held_beside(job),
    )  # fmt: skip
    group.setup()
    if checkpoint is not None:
        group.load_checkpoint(str(checkpoint.folder))
    return group


def _ring_bytes(client: BatchClient, first: int, stop: int) -> int:
    """Room on a worker for all shards of the steps: twice, since weights of the loss come to them, and one more."""
    minis = [mini for step in range(first, stop) for mini in client.outline(step).mini_batches]
    largest = max(max(mini.rank_bytes) for mini in minis) + 4096
    return 2 * sum(max(mini.rank_bytes) + 4096 for mini in minis) + 2 * largest


def _through_the_loader(
    client: BatchClient, group: WorkerGroup, first: int, stop: int, progress: Progress, title: str
) -> tuple[float, list[Step]]:
    """Train as `raysvc train` does; seconds of the counted steps, and the steps with their shards."""
    client.rewind(first)
    ends: list[float] = []
    held: list[Step] = []
    before = None
    for step in client.steps(on_fetch=group.stage, stop=stop):
        started = group.start_step(step, LEARNING_RATE)
        if before is not None:
            group.finish_step(before)
            ends.append(time.perf_counter())
        before = started
        held.append(step)
        progress(Tick(title, len(held), stop - first, "steps"))
    assert before is not None, "there is a step"
    group.finish_step(before)
    ends.append(time.perf_counter())
    return ends[-1] - ends[WARM_STEPS - 1], held


def _from_the_workers(group: WorkerGroup, steps: Sequence[Step], progress: Progress) -> tuple[float, float]:
    """Train the steps once more when all their shards lie on the workers; seconds of the counted ones, and of waits."""
    there = _num_staged(group)
    for step in steps:
        group.stage(step)
    needed = [count + sum(len(step.mini_batches) for step in steps) for count in there]
    begin = time.monotonic()
    while any(have < need for have, need in zip(_num_staged(group), needed, strict=True)):
        if time.monotonic() - begin > STAGE_TIMEOUT_S:
            raise TimeoutError(f"shards of {len(steps)} steps did not reach the workers; measure fewer")
        time.sleep(0.02)
    ends: list[float] = []
    wait_s = 0.0
    for running in [group.start_step(step, LEARNING_RATE) for step in steps]:
        ranks = group.finish_step(running)
        wait_s += max(sum(mini.wait_s for mini in rank) for rank in ranks)
        ends.append(time.perf_counter())
        progress(Tick("perfect loader", len(ends), len(steps), "steps"))
    return ends[-1] - ends[WARM_STEPS - 1], wait_s


def _num_staged(group: WorkerGroup) -> list[int]:
    return [stats.staged for stats in group.gather("staging_stats", group.call("staging_stats"))]
