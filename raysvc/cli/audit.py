"""`raysvc audit`: what is wrong with the rows of a job, without training on them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysvc.cli.common import AsJson, Job, Overrides, edge, emit
from raysvc.cli.view import View, printable
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.audit.findings import AuditReport

Ids = Annotated[
    Path | None,
    typer.Option(
        help="Write the ids of rows with errors and warnings here, as plan.rows.exclude takes them."
    ),
]


@edge
def audit(
    config: Job = "job.yaml", overrides: Overrides = None, ids: Ids = None, as_json: AsJson = False
) -> None:
    """Look for rows that teach nothing, or what nobody meant.

    Every row is tokenized as a build does it; nothing is written or trained. Exit code 1 when a finding is an error. Without a
    job file, source and tokenizer are enough; a source may be the folder of an entry, whose rows are then numbered again.

    Example: raysvc audit source.path=rows.jsonl tokenizer=Qwen/Qwen2.5-0.5B

    Example: raysvc audit job.yaml evals.test.source.path=test.jsonl --ids odd.txt
    """
    from raysvc.audit.audit import audit as audited
    from raysvc.job.job_file import load_job
    from raysvc.row_ids import written

    given = None if config == "job.yaml" and overrides and not Path(config).exists() else config
    job = load_job(given, overrides or ())
    with View() as view:
        report = audited(job, view)
    if ids is not None:
        ids.write_text("".join(f"{written(one)}\n" for one in report.odd_ids))
    if as_json:
        found = asdict(report)
        found["odd_ids"] = [written(one) for one in report.odd_ids]
        emit(found)
    else:
        _print(report, config if isinstance(config, str) else "job.yaml")
    if any(finding.severity == "error" for finding in report.findings):
        raise typer.Exit(1)


def _print(report: AuditReport, job: str) -> None:
    rows = ", ".join(f"{count} of {name or 'source'}" for name, count in report.rows.items())
    print(f"rows: {rows}, in {report.seconds:.1f} s: {how_many(len(report.findings), 'defect')}")
    for one in report.findings:
        print(f"[{one.severity}] {one.defect}: {how_many(one.rows, 'row')} {one.what}")
        for where, text in one.examples:
            print(printable(f"    {where}  {text}"))
        print(f"    -> {one.remedy.format(job=job)}")
    for name, why in report.skipped.items():
        print(f"[skip] {name}: {why}")
