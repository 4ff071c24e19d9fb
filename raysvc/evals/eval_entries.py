"""The rows of a job's evals.

Always true:
- a mistake in an eval is told under its own key (`evals.NAME.source…`);
- what is wrong with the source of an eval is found before any row of the job is tokenized, but that of a Ray Dataset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.cache.store.open import default_root, open_store
from raysvc.errors import keys_under
from raysvc.evals.held_rows import evaluated_rows
from raysvc.progress import silent
from raysvc.scoring.job_columns import added_columns

if TYPE_CHECKING:
    from raysvc.actors.server.spec import EvalSpec
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig


def _eval_entry(job: JobConfig, name: str) -> CacheEntry:
    """The entry of one of the job's evals, tokenized like the training rows.

    Raises:
        UserMistake: as `raysvc.tokenize`.
    """
    from raysvc.builds.find_or_build import find_or_build

    with keys_under(f"evals.{name}"):
        return find_or_build(job_of_eval(job, name), None, silent)


def keys_of_evals(job: JobConfig) -> dict[str, str]:
    """Eval -> key of its entry, for those with a source of their own.

    Raises:
        UserMistake: as `raysvc.tokenize`.
    """
    return {name: _eval_entry(job, name).key for name, its in job.evals.items() if its.source is not None}


def check_evals(job: JobConfig) -> None:
    """Look at the sources of all evals; nothing is tokenized.

    Raises:
        UserMistake: one of them cannot be read.
    """
    from raysvc.builds.build_plan import plan_build

    if not job.evals:
        return
    store = open_store(default_root(job.cache.root), job.cache.storage_options, job.cache.unsafe_store)
    for name, each in job.evals.items():
        if each.source is not None and each.source.ray is None:  # which is looked at in the cluster
            with keys_under(f"evals.{name}"):
                plan_build(job_of_eval(job, name), store)


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
        without=tuple(sorted(added_columns(entry))),  # for losses, and an eval counts tokens
    )
