"""Refuses columns that cannot be computed before any row of any source is tokenized.

1. Look at the models: whether they are there, have the tokenizer of the rows, and can score those that are there.
2. Where a cluster tokenizes the rows or computes their columns, or the job trains on CUDA, ask its nodes for room and for what they see.

Always true:
- what is refused here would be refused after the last row too, unless nodes come meanwhile;
- of columns that are there nothing is asked, so a hit needs no cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from raysvc.cache.find import find_entry
from raysvc.pipelines.local_build import CLUSTER_S, fits_one_process
from raysvc.progress import Progress, Tick
from raysvc.scoring.enrich_plan import EnrichPlan, check_columns, check_models, plan_columns, refuse_media
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


def check_before_rows(found: Lookup, grows: bool, address: str | None, progress: Progress) -> None:
    """Refuse columns of a source.

    Args:
        grows: its rows are read while they are tokenized; the run that reads them has asked for its nodes.
        address: of the cluster.

    Raises:
        ConfigError: a model cannot score the rows, or no node can hold a worker, and none may come.
        NodeError: a node does not see what it needs.
    """

    def say(what: str) -> None:
        progress(Tick("enrich", 0, None, "rows", waiting=what))

    job, rows, tokenizer, recipe = found.job, found.entry, found.plan.tokenizer, found.plan.recipe
    for wanted in wanted_columns(job, found.name):
        plan = plan_columns(job, wanted, recipe, len(tokenizer.hf), found.store)
        recipe = dict(plan.recipe)
        if rows is None:
            check_models(plan, len(tokenizer.hf), tokenizer.content())  # 1
        elif find_entry(rows.store, plan.key) is not None:
            continue
        else:
            refuse_media(wanted, rows)
            check_columns(plan, rows)  # 1
        if not grows and (job.trainer.device == "cuda" or _is_large(found, plan)):  # 2
            join_pool(job, found.store.url, plan, address, say)


def _is_large(found: Lookup, plan: EnrichPlan) -> bool:
    """Returns whether a cluster tokenizes the rows, or computes the columns of those that are there."""
    workers, source = found.job.workers, found.plan.source
    if found.entry is not None:
        return workers.min > 1 or plan.alone_s(found.entry.num_tokens) >= CLUSTER_S
    sliced = found.job.source.ray is None
    return sliced and not fits_one_process(source.num_bytes, len(source.slices), workers)


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
