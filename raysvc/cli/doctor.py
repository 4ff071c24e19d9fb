"""`raysvc doctor`: what would make a run fail later."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from raysvc.cli.common import Address, AsJson, Overrides, edge, emit

OptionalJob = Annotated[
    str | None, typer.Option("-c", "--config", help="Check this job too.", metavar="JOB.YAML")
]


@edge
def doctor(
    config: OptionalJob = None,
    overrides: Overrides = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, a job, and every node of the cluster.

    Here: Ray, authentication, store, tokenizer, plan. On each node: packages, memory, GPUs, clocks, folders.
    Each finding names its remedy. Exit code 1 when a check failed.

    Example: raysvc doctor job.yaml --address auto
    """
    from raysvc.inspect.examine import examine
    from raysvc.job.job_file import load_job

    job = load_job(config, overrides or ()) if config is not None else None
    findings = examine(job, address)
    if as_json:
        emit({"findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            print(f"[{finding.state:4}] {finding.check}: {finding.what}{remedy}")
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)
