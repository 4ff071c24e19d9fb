"""Refuses columns that cannot be computed before the rows that they are for are tokenized.

1. Look at the models: whether they are there, and have the tokenizer of the rows.
2. Where a cluster tokenizes the rows, or the job trains on CUDA, ask its nodes for room and for what they see.

Always true:
- what is refused here would be refused after the last row too, unless nodes come meanwhile;
- rows that are there are asked nothing, so a hit needs no cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from raysvc.progress import Progress, Tick
from raysvc.scoring.enrich_plan import EnrichPlan, check_models, plan_columns
from raysvc.scoring.wanted import wanted_columns

if TYPE_CHECKING:
    from raysvc.builds.lookup import Lookup
    from raysvc.job.config import JobConfig
    from raysvc.nodes.room import RoomWatch
    from raysvc.pipelines.slice_graph import WorkerPool


class ColumnWorkers(NamedTuple):
    """Workers of a cluster that compute columns.

    Attributes:
        watch: has to be called while the first result is waited for.
    """

    device: str
    workers: WorkerPool
    watch: RoomWatch


def check_before_rows(found: Lookup, large: bool, address: str | None, progress: Progress) -> None:
    """Refuse columns of a source whose rows are to be tokenized.

    Args:
        found: the lookup that did not find the rows.
        large: a cluster tokenizes them, so it computes their columns too.
        address: of the cluster.

    Raises:
        ConfigError: a model cannot score the rows, or no node can hold a worker, and none may come.
        NodeError: a node does not see what it needs.
    """

    def say(what: str) -> None:
        progress(Tick("enrich", 0, None, "rows", waiting=what))

    job, tokenizer, recipe = found.job, found.plan.tokenizer, found.plan.recipe
    for wanted in wanted_columns(job, found.name):
        plan = plan_columns(job, wanted, recipe, len(tokenizer.hf), found.store)
        check_models(plan, len(tokenizer.hf), tokenizer.content())  # 1
        recipe = dict(plan.recipe)
        if large or job.trainer.device == "cuda":  # 2
            join_pool(job, found.store.url, plan, address, say)


def join_pool(
    job: JobConfig, root: str, plan: EnrichPlan, address: str | None, say: Callable[[str], None]
) -> ColumnWorkers:
    """Join the cluster, and look for nodes for the job's own workers: its ranks where it trains on GPUs, else what tokenizes.

    Args:
        root: of the entry.
        say: is told what is waited for.

    Raises:
        ConfigError: no node can hold a worker, and none may come.
        NodeError: a node does not see what it needs.
    """
    from raysvc.actors.placement import pick_device
    from raysvc.cluster import connect
    from raysvc.nodes.job_nodes import ready_to_enrich
    from raysvc.pipelines.slice_graph import WorkerPool

    say("starting Ray")
    connect(address)
    say("starting workers")
    trainer = job.trainer
    gpus = 1.0 if trainer.gpus_per_worker is None else trainer.gpus_per_worker
    device = pick_device(trainer.device, trainer.dp_size, trainer.gpus_per_worker)
    where, pool = "workers", WorkerPool.of(job.workers)
    if device != "cpu":
        where, pool = "trainer.device", WorkerPool(1, trainer.dp_size, trainer.cpus_per_worker, gpus)
    return ColumnWorkers(
        device, pool, ready_to_enrich(job, root, where, list(plan.models.values()), pool, say)
    )
