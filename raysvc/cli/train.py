"""`raysvc train`: run a whole job."""

from __future__ import annotations

from typing import Any

from raysvc.cli.common import Address, AsJson, Job, Overrides, Verbose, edge, emit
from raysvc.cli.view import View, print_table


@edge
def train(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    address: Address = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Tokenize, serve and train a job; goes on from the last checkpoint when there is one.

    Example: raysvc train -c job.yaml trainer.max_steps=100
    """
    from raysvc import trainer
    from raysvc.jobfile import load_job

    job = load_job(config, overrides or ())
    with View() as view:
        summary = trainer.train(job, address=address, progress=view)
    show_summary(job.run_dir, summary, as_json)


def show_summary(run_dir: str, summary: dict[str, Any], as_json: bool) -> None:
    """The end of a run, for a person or a machine."""
    if as_json:
        emit(summary)
        return
    cache = summary["cache"]
    stalls = summary["stalls"]
    rows = {name: value for name, value in summary.items() if name not in ("cache", "stalls")}
    rows |= {f"stalled: {cause} s": seconds for cause, seconds in stalls["by_cause"].items()}
    rows["cache"] = f"{'hit' if cache['hit'] else 'miss'} {cache['key'][:16]} ({cache['reason']})"
    print_table(f"Run {run_dir}", rows)
    print(*stalls["last"][-3:], f"summary: {run_dir}/summary.json", sep="\n")
