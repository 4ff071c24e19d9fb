"""The verbs that make something: `tokenize` a source into a cache entry, `enrich` it with columns, `serve` an entry.

Always true:
- `tokenize` and `enrich` return a finished entry; when one with the same key is there, nothing is built;
- a build that was killed goes on from its finished slices;
- `serve` returns when the server answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.job_plan import plan_config
from raysvc.cache.store.open import absolute, default_root
from raysvc.client.arguments import flag, optional_text
from raysvc.errors import RaysvcError
from raysvc.job.config import JobConfig, cpus_held
from raysvc.job.job_file import load_job
from raysvc.progress import Progress, silent

if TYPE_CHECKING:
    from raysvc.builds.build_beside import BuildBeside
    from raysvc.job.config import PoolConfig
    from raysvc.plan.schedule import Schedule


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerHandle:
    """A running server.

    Attributes:
        name: to attach by.
        namespace: Ray namespace of the actor.
        num_rows: rows that it serves.
        schedule: steps, epochs and mini-batches.
        actor: Ray handle; a server that is not detached ends when the last handle is gone.
        build: of the entry that is served, where it goes on in this process; None: the entry is finished.
    """

    name: str
    namespace: str
    num_rows: int
    schedule: Schedule
    actor: Any
    build: BuildBeside | None = None


def tokenize(
    config: str | Path | Mapping[str, Any] | JobConfig | None = None,
    *,
    address: str | None = None,
    progress: Progress = silent,
    **overrides: Any,
) -> CacheEntry:
    """Tokenize a job's source into the cache, or find it there.

    Args:
        config: path of a `job.yaml`, a mapping or a config; None: everything comes from keyword arguments.
        address: Ray cluster to use; default RAY_ADDRESS, else a local Ray (only when something must be built).
        progress: called with the progress of each phase.
        overrides: sections merged over `config`, e.g. `source={"path": ...}`, `cache={"root": ...}`.

    Raises:
        UserMistake: files, columns, tokenizer, template or cache root that cannot be used.
    """
    from raysvc.builds.find_or_build import find_or_build

    return find_or_build(load_job(config, **overrides), address, progress)


def enrich(
    config: str | Path | Mapping[str, Any] | JobConfig | None = None,
    *,
    address: str | None = None,
    progress: Progress = silent,
    **overrides: Any,
) -> CacheEntry:
    """Compute the columns of a job's section `enrich`, or find them; tokenizes first when needed.

    An objective that needs a reference (dpo, ipo, kto) wants `ref_logprobs` by itself, also of its evals. A job that wants no columns gets
    its entry as it is.

    Args:
        config: as in `tokenize`.
        address: as in `tokenize`.
        progress: as in `tokenize`.
        overrides: as in `tokenize`.

    Raises:
        UserMistake: what `tokenize` raises, or a model that cannot score the rows.
    """
    from raysvc.builds.find_or_build import find_or_build
    from raysvc.evals.eval_entries import score_evals
    from raysvc.scoring.before_rows import check_before_rows
    from raysvc.scoring.job_columns import refuse_followed, with_columns

    job = load_job(config, **overrides)
    what = "raysvc enrich computes columns of all rows"
    refuse_followed(job, what, "run raysvc train or raysvc serve with trainer.device: cpu")
    before = partial(check_before_rows, address=address, progress=progress)
    entry = find_or_build(job, address, progress, before=before)
    entry = with_columns(job, entry, address, progress)
    score_evals(job, address, progress)
    return entry


def serve(
    config: str | Path | Mapping[str, Any] | JobConfig | None = None,
    *,
    address: str | None = None,
    detached: bool = True,
    progress: Progress = silent,
    **overrides: Any,
) -> ServerHandle:
    """Start the job's server, tokenizing and enriching first when needed.

    With `plan.shuffle: window` the server does not wait for the build, which goes on in a thread of this process
    (`ServerHandle.build`): steps wait for their own rows. If the process ends first, the next call goes on with it.

    Args:
        detached: the server outlives this process; False: it ends with it.

    Raises:
        ServerError: the name is served with another spec.
    """
    flag("serve(detached)", detached)
    optional_text("serve(address)", address)
    from raysvc.cluster import connect, starts_own
    from raysvc.nodes.job_nodes import ready_to_serve

    job = load_job(config, **overrides)
    if not starts_own(address):
        connect(address)
        ready_to_serve(job)  # before its rows are tokenized
    entry, build = entry_or_build(job, address, progress)
    if build is None:
        return serve_entry(job, entry, address=address, detached=detached)
    with building(build):
        build.make_first(job, 0)
        start_build(job, build, 0, address, progress)
        handle = serve_entry(job, entry, address=address, detached=detached)
    return replace(handle, build=build)


def entry_or_build(
    job: JobConfig, address: str | None, progress: Progress
) -> tuple[CacheEntry, BuildBeside | None]:
    """A job's entry; where it is to grow while it is read, also its build, which nobody has started.

    Raises:
        UserMistake: as `enrich`.
    """
    from raysvc.builds.build_beside import find_or_begin, known_at_the_end
    from raysvc.evals.eval_entries import check_evals, score_evals
    from raysvc.scoring.before_rows import check_before_rows
    from raysvc.scoring.columns_beside import ColumnsBeside, columns_wait
    from raysvc.scoring.job_columns import refuse_followed, wanted_of, with_columns

    check_evals(job)  # before a row is tokenized
    with_them = partial(ColumnsBeside, address=address, progress=progress)
    made = with_them if any(wanted for _, wanted in wanted_of(job).values()) else None
    if waits := known_at_the_end(job) or columns_wait(job):
        refuse_followed(job, waits, "give trainer.device: cpu, or leave the columns out")
    before = partial(check_before_rows, address=address, progress=progress)
    entry, build = find_or_begin(job, columns_wait(job), address, progress, made, before)
    if build is None:
        entry = with_columns(job, entry, address, progress)
    score_evals(job, address, progress)
    return entry, build


def start_build(
    job: JobConfig, build: BuildBeside, step: int, address: str | None, progress: Progress
) -> None:
    """Start the build of a job that is served meanwhile, for its steps from `step` on.

    It gets the processors that the job leaves; where these are less than one, it shares one with the job.
    """
    import ray

    from raysvc.actors.launch import find_server, server_names, tell_server, wait_for
    from raysvc.cluster import connect

    connect(address, need_cpus=cpus_held(job))
    name = job.server.name
    if name in server_names():  # it may have been told that an earlier build failed
        control = find_server(name).end_build.options(concurrency_group="control")
        wait_for(control.remote(""), f"server {name!r}")
    workers: PoolConfig | None = job.workers
    if not job.trainer.wait_for_nodes:
        total, free = (
            resources.get("CPU", 0.0) for resources in (ray.cluster_resources(), ray.available_resources())
        )
        spare = int(min(total - cpus_held(job), free))
        most = min(spare, job.workers.max or spare)
        workers = (
            job.workers.model_copy(update={"max": most, "min": min(job.workers.min, most)})
            if most > 0
            else None
        )
    build.start(job, step, workers, progress, lambda why: tell_server(name, "end_build", why))


@contextmanager
def building(build: BuildBeside | None) -> Iterator[None]:
    """Raises what goes wrong in it because the build failed as what the build raised; whatever goes wrong stops the build."""
    try:
        yield
    except BaseException as error:
        if build is not None:
            build.stop()
            if isinstance(error, RaysvcError):
                build.check()
        raise


def serve_entry(
    job: JobConfig,
    entry: CacheEntry,
    *,
    address: str | None = None,
    detached: bool,
    trainer_node: Callable[[], str] | None = None,
) -> ServerHandle:
    """Start the server of a job on an entry that is there.

    Args:
        trainer_node: id of the node of the trainer's rank 0; None: it is this process.
    """
    from raysvc.actors.launch import start_server, wait_for
    from raysvc.builds.mixed_job import never_trained
    from raysvc.cluster import connect, node_for
    from raysvc.plan.schedule import Schedule
    from raysvc.team import ray_namespace

    connect(address, need_cpus=cpus_held(job))
    spec = serve_spec(job, entry)
    for name in never_trained(job, spec.mixture.stages if spec.mixture else ()):
        what = "its share of an epoch is less than half a row; give it a larger share, or 0"
        log.warning("source %r of the mixture is never trained: %s", name, what)
    node_id = node_for(job.server.placement, entry.uri, trainer_node)
    actor = start_server(spec, detached=detached, node_id=node_id, may_grow=job.trainer.wait_for_nodes)
    facts = wait_for(actor.describe.remote(), f"server {job.server.name!r} to start")
    return ServerHandle(
        job.server.name, ray_namespace(), entry.num_rows, Schedule.from_json(facts["schedule"]), actor
    )


def serve_spec(job: JobConfig, entry: CacheEntry, evals: Collection[str] | None = None) -> Any:
    """The spec of a job's server.

    Args:
        evals: that it serves; what others hold out is not trained either. None: all.
    """
    from raysvc.actors.server.spec import ServeSpec, SourceSpec
    from raysvc.builds.mixed_job import mixture_spec
    from raysvc.evals.eval_entries import eval_spec

    mixture = mixture_spec(job, entry.entries)
    return ServeSpec(
        name=job.server.name,
        sources=tuple(
            SourceSpec.model_validate({"uri": one.uri, "coming": one.coming}) for one in entry.entries
        ),
        mixture=mixture,
        plan=plan_config(job, entry),
        pad_token_id=int(entry.report["pad_token_id"]),
        journal=f"{absolute(job.run_dir)}/server",
        storage_options=job.cache.storage_options,
        evals={name: eval_spec(job, name, entry) for name in (job.evals if evals is None else evals)},
        processor=_processor_of(job, entry),
        share=job.server.share,
        share_bytes=job.server.share_mb << 20,
        lease_ttl_s=job.server.lease_ttl_s,
        orphan_ttl_s=job.server.orphan_ttl_s,
        reap=job.server.reap,
        collate_threads=job.server.collate_threads,
        collators=job.server.collators,
        num_cpus=job.server.num_cpus,
    )


def _processor_of(job: JobConfig, entry: CacheEntry) -> Any:
    """Returns where the processor of the rows' media is loaded from; None: they have none."""
    from raysvc.cache.store.open import absolute
    from raysvc.media.processor_spec import ProcessorSpec
    from raysvc.plan.sliced.sliced_rows import has_media

    if not any(has_media(one) for one in entry.entries):
        return None
    name = job.tokenizer.name
    return ProcessorSpec(
        name=absolute(name) if Path(name).is_dir() else name,
        revision=job.tokenizer.revision,
        trust_remote_code=job.tokenizer.trust_remote_code,
    )


def cache_root(job: JobConfig) -> str:
    """Returns where the entries of a job live; absolute when local."""
    return default_root(job.cache.root)
