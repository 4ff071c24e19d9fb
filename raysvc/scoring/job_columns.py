"""The entry of a job with the columns that it wants computed.

Always true:
- every source of a mixture has its own entry, and its own columns;
- a job that wants none has its entry as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.lookup import explain_job
from raysvc.builds.mixed_job import jobs_of
from raysvc.cache.find import find_entry, open_finished
from raysvc.cache.key import ADDED
from raysvc.errors import ConfigError
from raysvc.progress import Progress, silent
from raysvc.scoring.explain_columns import why_not_there
from raysvc.scoring.find_or_enrich import HIT, find_or_enrich, planned
from raysvc.scoring.wanted import WantedColumns, check_rows, wanted_columns

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry
    from raysvc.job.config import JobConfig


def wanted_of(job: JobConfig) -> dict[str, tuple[JobConfig, list[WantedColumns]]]:
    """Name of a source ("" without a mixture) -> its own job, and the columns that it wants.

    Raises:
        ConfigError: columns that cannot be computed for it.
    """
    return {name: (each, wanted_columns(each, name)) for name, each in jobs_of(job).items()}


def refuse_followed(job: JobConfig, why: str, remedy: str) -> None:
    """Refuse columns of a source that has no end, for who computes them when all rows are there.

    Args:
        why: they are.

    Raises:
        ConfigError: the job wants some.
    """
    for name, (each, wanted) in wanted_of(job).items():
        if each.source.follow and wanted:
            where = f"mixture.sources.{name}.source.follow" if name else "source.follow"
            raise ConfigError(where, f"has no end, and {why}", remedy)


def with_columns(
    job: JobConfig, entry: CacheEntry, address: str | None = None, progress: Progress = silent
) -> CacheEntry:
    """A job's entry with all columns that it wants, found or computed.

    Raises:
        ConfigError: a model is not there, or cannot score the rows.
    """
    added, hits, reasons = [], entry.hit, [entry.reason]
    for its, wanted, one in _sources(job, entry):
        if wanted and job.enrich.ref_logprobs is None:  # nobody named it, the objective wants it
            check_rows(job, entry)
        for each in wanted:
            one, hit, reason = find_or_enrich(its, one, each, address, progress)
            hits = hits and hit
            reasons.append(f"{each.kind}: {reason}")
        added.append(one)
    return _entry(entry, added, hits, "; ".join(reasons))


def with_found_columns(
    job: JobConfig, entry: CacheEntry, progress: Progress = silent
) -> tuple[CacheEntry, list[str]]:
    """The same where all columns are there, else the entry as it is and what is missing; computes nothing.

    Raises:
        ConfigError: a model is not there.
    """
    added = []
    for its, wanted, one in _sources(job, entry):
        for each in wanted:
            found = find_entry(one.store, planned(its, one, each, progress).key)
            if found is None:
                return entry, list(each.columns)
            one = found
        added.append(one)
    return _entry(entry, added, entry.hit, HIT), []


def explain_columns(job: JobConfig, source: str, root: str) -> dict[str, Any]:
    """Returns what `explain_job` says of a job of one source, with `added`: the same of each of its columns.

    What would be added to rows that are not there yet is not looked at.

    Raises:
        ConfigError: a model is not there.
    """
    found = explain_job(job, root)
    added: list[dict[str, Any]] = []
    entry = open_finished(found["uri"], job.cache.storage_options) if found["hit"] else None
    for each in wanted_columns(job, source):
        if entry is None:
            break
        plan = planned(job, entry, each)
        there = find_entry(entry.store, plan.key)
        reason, differences = (HIT, []) if there else why_not_there(entry, plan)
        facts = {"columns": list(each.columns), "hit": there is not None, "key": plan.key, "reason": reason}
        added.append({**facts, "differences": [str(one) for one in differences]})
        entry = there
    return {**found, "added": added}


def added_columns(entry: CacheEntry) -> set[str]:
    """Names of the columns of an entry that were computed."""
    recipes = [one.recipe for one in entry.entries]
    return {name for recipe in recipes for each in recipe.get(ADDED, ()) for name in each["columns"]}


def added_reports(entry: CacheEntry) -> list[Mapping[str, Any]]:
    """Returns what was computed, source by source in the order in which it was added."""
    return [report for one in entry.entries for report in one.report.get("added", ())]


def _sources(job: JobConfig, entry: CacheEntry) -> Iterator[tuple[JobConfig, list[WantedColumns], Entry]]:
    for (its, wanted), one in zip(wanted_of(job).values(), entry.entries, strict=True):
        yield its, wanted, one


def _entry(base: CacheEntry, added: list[Any], hit: bool, reason: str) -> CacheEntry:
    if all(one is before for one, before in zip(added, base.entries, strict=True)):
        return base
    return replace(base, entries=tuple(added), hit=hit, reason=reason)
