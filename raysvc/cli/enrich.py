"""`raysvc enrich`: compute the columns that a job's models give, or say that they are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.tokenize import cache_line
from raysvc.cli.view import View, print_table
from raysvc.progress import Progress

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig


@edge
def enrich(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Compute reference log-probabilities and teacher entries for a job's rows.

    Tokenizes first where the cache has no entry. The new entry shares the parts of the old one. A killed command
    resumes from its finished slices.

    Example: raysvc enrich job.yaml enrich.teacher.top_k=32
    """
    from raysvc import api
    from raysvc.errors import ConfigError
    from raysvc.job.job_file import load_job
    from raysvc.scoring.job_columns import added_columns, added_reports, wanted_of

    job = load_job(config, overrides or ())
    if not any(wanted for _, wanted in wanted_of(job).values()):
        remedy = "give enrich: {ref_logprobs: {}} or enrich: {teacher: {model: ...}}"
        raise ConfigError("enrich", "this job wants no columns", remedy)
    with View() as view:
        entry = api.enrich(job, address=address, progress=view)
    print(cache_line(entry), file=sys.stderr)
    reports = added_reports(entry)
    if as_json:
        emit({"cache": entry.facts, "columns": sorted(added_columns(entry)), "added": reports})
        return
    for report in reports:
        print_table(f"Added {', '.join(report['columns'])}", _rows(report))


def _rows(report: Mapping[str, Any]) -> dict[str, Any]:
    models = report["models"]
    named = {"model": models[""]} if "" in models else {f"model of {key}": models[key] for key in models}
    rest = {
        name.replace("_", " "): value for name, value in report.items() if name not in ("columns", "models")
    }
    return {**named, **rest}


def as_far_as_there(job: JobConfig, entry: CacheEntry, progress: Progress) -> CacheEntry:
    """An entry with the job's computed columns where they are there; says what is not."""
    from raysvc.errors import ConfigError
    from raysvc.scoring.job_columns import with_found_columns

    try:
        found, missing = with_found_columns(job, entry, progress)
    except ConfigError as error:  # a model is not here; rows and plan can be looked at all the same
        found, missing = entry, [str(error)]
    if missing:
        print(
            f"note: without computed columns ({', '.join(missing)}); raysvc enrich computes them",
            file=sys.stderr,
        )
    return found
