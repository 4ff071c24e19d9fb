"""The rows of a job's evals.

Always true:
- files that are not there, of the job and of its evals, are found before anything starts;
- a mistake in an eval is told under its own key (`evals.NAME.source…`);
- what is wrong with the source of an eval is found before any row of the job is tokenized, but that of a Ray Dataset;
- rows of an eval have the columns that the job's objective needs, from the model that gives them to the training rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.cache.store.open import default_root, open_store
from raysvc.errors import ConfigError, keys_under
from raysvc.evals.held_rows import evaluated_rows
from raysvc.progress import Progress, silent
from raysvc.scoring.job_columns import added_columns, with_columns
from raysvc.scoring.wanted import FORMAT, NEEDS

if TYPE_CHECKING:
    from raysvc.actors.server.spec import EvalSpec
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig

# what this process made for a job of an eval that finds nothing in the cache
_scored: dict[str, CacheEntry] = {}


def _eval_entry(
    job: JobConfig, name: str, address: str | None = None, progress: Progress = silent
) -> CacheEntry:
    """The entry of one of the job's evals, tokenized and scored like the training rows.

    Raises:
        UserMistake: as `raysvc.enrich`.
    """
    from raysvc.builds.find_or_build import find_or_build

    its = job_of_eval(job, name)
    if (known := _scored.get(its.model_dump_json())) is not None:
        return known
    with keys_under(f"evals.{name}"):
        entry = find_or_build(its, address, progress)
        return with_columns(its, entry, address, progress) if needed_columns(job) else entry


def score_evals(job: JobConfig, address: str | None, progress: Progress) -> None:
    """Compute the columns that the objective needs of the evals, before workers hold the devices that it may take.

    Raises:
        UserMistake: as `raysvc.enrich`.
    """
    for name, its in job.evals.items():
        if its.source is not None and needed_columns(job):
            key = job_of_eval(job, name).model_dump_json()
            _scored.pop(key, None)
            entry = _eval_entry(job, name, address, progress)
            if job.cache.force or not job.cache.enabled:
                _scored[key] = entry


def needed_columns(job: JobConfig) -> set[str]:
    """Columns that the job's objective needs of rows of training and of an eval."""
    return set(NEEDS.get(job.trainer.objective, ()))


def keys_of_evals(job: JobConfig) -> dict[str, str]:
    """Eval -> key of its entry, for those with a source of their own.

    Raises:
        UserMistake: as `raysvc.tokenize`.
    """
    return {name: _eval_entry(job, name).key for name, its in job.evals.items() if its.source is not None}


def check_all_files(job: JobConfig) -> None:
    """Look whether the files of a job and of its evals are there; none is read.

    Raises:
        SourceError: some are not, or a part of a dataset is asked of them.
    """
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.chat.row_counts import errors_of
    from raysvc.pipelines.sources.look import check_files

    for name, its in jobs_of(job).items():
        with errors_of(name):
            check_files(its.source)
    for name, each in job.evals.items():
        if each.source is not None:
            with keys_under(f"evals.{name}"):
                check_files(each.source)


def check_evals(job: JobConfig) -> None:
    """Look at the sources of all evals; nothing is tokenized.

    Raises:
        UserMistake: one of them cannot be read, or its rows are not of the kind that the objective trains.
    """
    from raysvc.builds.build_plan import plan_build
    from raysvc.builds.mixed_job import jobs_of

    if not job.evals:
        return
    store = open_store(default_root(job.cache.root), job.cache.storage_options, job.cache.unsafe_store)
    for name, each in job.evals.items():
        if each.source is not None and each.source.ray is None:  # which is looked at in the cluster
            with keys_under(f"evals.{name}"):
                plan = plan_build(job_of_eval(job, name), store)
            _check_format(job, name, str(plan.recipe["format"]))
            carried = {column for its in jobs_of(job).values() for column in its.source.carry}
            if lacks := sorted(carried & needed_columns(job) - each.source.carry.keys()):
                what = f"lacks {lacks[0]}, which the rows of training carry and trainer.objective {job.trainer.objective} needs"
                raise ConfigError(f"evals.{name}.source.carry", what, "carry it there too")


def _check_format(job: JobConfig, name: str, found: str) -> None:
    """Refuse rows that would not be trained either: a rejected answer is no example."""
    objective = job.trainer.objective
    trained = FORMAT.get(objective)
    if found != trained and (trained is not None or found in FORMAT.values()):
        what = f"has {found} rows, and trainer.objective {objective} evaluates {trained or 'examples'}"
        raise ConfigError(f"evals.{name}.source", what, "give it other rows, or choose another objective")


def job_of_eval(job: JobConfig, name: str) -> JobConfig:
    """The job that tokenizes the source of one of the evals."""
    return job.model_copy(update={"source": job.evals[name].source, "mixture": None})


def eval_spec(job: JobConfig, name: str, entry: CacheEntry) -> EvalSpec:
    """Returns what a server needs of one of the job's evals.

    Args:
        entry: of the job's own rows, some of which may be held out.

    Raises:
        UserMistake: as `raysvc.tokenize`; or nothing is held out.
    """
    from raysvc.actors.server.spec import EvalSpec, SourceSpec

    its = job.evals[name]
    held = its.source is None
    entries = (entry if held else _eval_entry(job, name)).entries
    return EvalSpec(
        sources=tuple(SourceSpec(uri=one.uri) for one in entries),
        rows=evaluated_rows(job, entries) if held else None,
        batch_size=its.batch_size or job.plan.batch_size,
        without=tuple(sorted(added_columns(entry) - needed_columns(job))),
    )
