"""`raysvc report`: one HTML page about a job's entry, plan and run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit, served_run
from raysvc.cli.enrich import as_far_as_there
from raysvc.cli.replay import Tokenizer, decoder
from raysvc.cli.view import View

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig

Html = Annotated[Path, typer.Option("--out", help="File to write.")]


def _as_it_ran(job: JobConfig) -> JobConfig:
    """The job that the run in its run folder had, where there is one; what differs is said."""
    from raysvc.cache.store.open import absolute
    from raysvc.training.run_job import differences, has_job, job_of_run, with_credentials

    folder = absolute(job.run_dir)
    if not has_job(folder):
        return job
    ran = job_of_run(folder)
    if differ := differences(job, ran):
        told = "; ".join(f"{key} was {theirs!r} and is {ours!r}" for key, (ours, theirs) in differ.items())
        print(f"the run in {folder} had another job, which is reported: {told}", file=sys.stderr)
    return with_credentials(ran, job)


@edge
def report(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    html: Html = Path("report.html"),
    tokenizer: Tokenizer = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Write a report of data, plan and run as one HTML page.

    Lengths, masks, row counts and plan; after a run, its curves too; of a run of rollouts, rewards, staleness and turns. The page needs no
    other file.

    Example: raysvc report job.yaml --out report.html

    Example: raysvc report runs/grpo-1
    """
    from raysvc import api
    from raysvc.errors import ConfigError
    from raysvc.job.job_file import load_job
    from raysvc.report.facts import gather
    from raysvc.report.page import render

    run = served_run(config, overrides)
    if run is None and tokenizer is not None:
        raise ConfigError("--tokenizer", "is for runs of rollouts, and a job names its own", "leave it out")
    job = None if run is not None else _as_it_ran(load_job(config, overrides or ()))
    html.parent.mkdir(parents=True, exist_ok=True)
    html.open("a").close()  # what cannot be written is said before the rows are read
    if job is None:
        from raysvc.inspect.rollout_run import open_run
        from raysvc.report.rollouts_page import render_rollouts

        html.write_text(render_rollouts(open_run(str(run)), decoder(tokenizer)))
    else:
        with View() as view:
            entry = as_far_as_there(job, api.tokenize(job, address=address, progress=view), view)
        html.write_text(render(gather(job, entry)))
    if as_json:
        emit({"html": str(html)})
    else:
        print(f"report: {html}")
