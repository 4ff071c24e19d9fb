"""`raysvc plan`: what a run will look like, from lengths alone."""

from __future__ import annotations

import bisect
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.named_entry import named_entry
from raysvc.cli.named_run import job_as_it_is
from raysvc.cli.view import View, print_rows, print_table
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.plan.plan import Plan

StepNumber = Annotated[int | None, typer.Option(help="Show the rows of this step.", min=0)]
BAR = 30


@edge
def plan(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    step: StepNumber = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show steps, padding, packing, balance and bytes before a run.

    Tokenizes first where the cache has no entry.

    Example: raysvc plan job.yaml plan.layout=packed plan.micro_batch_tokens=8192
    """
    from raysvc.builds.job_plan import plan_of, report_of
    from raysvc.collate.plan_report import in_words, rows_of_step
    from raysvc.errors import PlanError
    from raysvc.row_ids import written

    named = job_as_it_is(config, overrides)
    job = named.job
    with View() as view:
        entry = named_entry(named, address, view)
    steps = plan_of(job, entry)
    if any(one.listings for one in entry.entries):
        there = _steps_there(steps, entry)
        if step is None or step >= there:
            what = f"has no end; {there} steps of it are there by now"
            raise PlanError("source.follow", what, "give --step, a number below that, or plan without follow")
    dp_size = job.trainer.dp_size
    if step is not None:
        if step >= steps.schedule.num_steps:
            raise PlanError(
                "--step", f"{step} is not below the {steps.schedule.num_steps} steps", "give a smaller one"
            )
        rows = [row._asdict() for row in rows_of_step(steps, step, dp_size)]
        origins = entry.origins([row["row_id"] for row in rows])
        rows = [
            {
                **row,
                "row_id": written(row["row_id"]),
                **({"source": source} if job.mixture else {}),
                "source_row": number,
            }
            for row, (source, number) in zip(rows, origins, strict=True)
        ]
        if as_json:
            emit({"step": step, "epoch": steps.schedule.epoch_of(step), "rows": rows})
        else:
            print_rows(f"Step {step}, epoch {steps.schedule.epoch_of(step)}", rows)
        return
    report = report_of(job, entry)
    if as_json:
        emit({"dp_size": dp_size, **asdict(report)})
        return
    print_table(f"Plan for {how_many(dp_size, 'rank')}", in_words(report))
    for start, stop, count in report.histogram:
        bar = "█" * round(BAR * count / max(n for _, _, n in report.histogram))
        print(f"{start:>10,} – {stop:>10,} tokens {bar} {count}")


def _steps_there(plan: Plan, entry: CacheEntry) -> int:
    """Steps whose rows are listed by now."""

    def are_listed(steps: int) -> bool:
        ends = plan.rows_known_by(steps - 1, len(entry.entries))
        return all(one.knows(end) for one, end in zip(entry.entries, ends, strict=True))

    every = range(1, plan.schedule.num_steps + 1)
    return bisect.bisect_right(every, False, key=lambda steps: not are_listed(steps))
