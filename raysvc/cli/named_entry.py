"""Opens the entry of the job that a command is about.

Always true:
- of a run it is the one that the run was served last, whatever its source holds by now;
- where that is gone, or grows yet, it is that of the run's job, found or tokenized, as for any other job.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from raysvc.cli.enrich import as_far_as_there
from raysvc.errors import EntryError

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.cli.named_run import NamedJob
    from raysvc.job.config import JobConfig
    from raysvc.progress import Progress


def named_entry(named: NamedJob, address: str | None, progress: Progress) -> CacheEntry:
    """The entry of a job or of its run, with the job's computed columns where they are there."""
    from raysvc import api

    found = _served_entry(named.job) if named.ran else None
    return found or as_far_as_there(
        named.job, api.tokenize(named.job, address=address, progress=progress), progress
    )


def _served_entry(job: JobConfig) -> CacheEntry | None:
    """What the run of a job was served last; None where nobody wrote that down, or it is not there, finished."""
    from raysvc.builds.cache_entry import open_served
    from raysvc.builds.mixed_job import paths_of
    from raysvc.builds.serve_log import read_served
    from raysvc.cache.store.open import absolute

    options = job.cache.storage_options
    served = read_served(absolute(job.run_dir), sys.maxsize, options)
    if served is None or not served.spec.sources:
        return None
    try:
        entry = open_served(served.spec)
    except EntryError:
        return None
    finished = all("row_counts" in one.report for one in entry.entries)
    return replace(entry, paths=paths_of(job)) if finished else None
