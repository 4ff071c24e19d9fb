"""`raysvc train`: run a whole job."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.interrupt import asked_to_stop
from raysvc.cli.view import View, print_table
from raysvc.errors import WorkerFailed

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig

Headroom = Annotated[
    int | None,
    typer.Option(
        help="Time this many steps with the real loader and with a perfect one; the weights are discarded.",
        min=1,
    ),
]


@edge
def train(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    headroom: Headroom = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Train a job; resumes from its last checkpoint.

    Tokenizes where the cache has no entry, starts the server and the workers, and trains.

    Example: raysvc train -c job.yaml trainer.max_steps=100

    Example: raysvc train -c job.yaml --headroom 10
    """
    from raysvc.job.job_file import load_job
    from raysvc.training.train import train as run_job

    job = load_job(config, overrides or ())
    if headroom is not None:
        _measure(job, headroom, address, as_json)
        return
    try:
        with View() as view:
            summary = run_job(job, address=address, progress=view, should_stop=asked_to_stop)
    except WorkerFailed as error:
        again = shlex.join(["raysvc", *sys.argv[1:]])
        raise WorkerFailed(error.rank, error.call, error.cause, again) from error
    show_summary(job.run_dir, summary, as_json)
    say_if_stopped(summary["steps"])


def _measure(job: JobConfig, steps: int, address: str | None, as_json: bool) -> None:
    from raysvc.training.headroom import measure

    with View() as view:
        found = measure(job, steps, address=address, progress=view)
    if as_json:
        emit(found.to_json())
        return
    facts = found.to_json()
    rows = {
        f"{half} loader: {name}": facts[half][name] for half in ("real", "perfect") for name in facts[half]
    }
    print_table(f"{found.steps} steps from step {found.first_step} on", rows)
    print(found.verdict())


def say_if_stopped(step: int) -> None:
    """End a run that Ctrl-C ended, in words and exit code.

    Raises:
        KeyboardInterrupt: it was pressed.
    """
    if asked_to_stop():
        raise KeyboardInterrupt(f"{step} steps are trained and saved; the same command goes on there")


def show_summary(run_dir: str, summary: dict[str, Any], as_json: bool) -> None:
    """The end of a run, for a person or a machine."""
    if as_json:
        emit(summary)
        return
    cache = summary["cache"]
    stalls = summary["stalls"]
    rows = {name: value for name, value in summary.items() if name not in ("cache", "stalls") and value != {}}
    rows |= {f"stalled: {cause} s": seconds for cause, seconds in stalls["by_cause"].items()}
    rows["cache"] = f"{'hit' if cache['hit'] else 'miss'} {cache['key'][:16]} ({cache['reason']})"
    print_table(f"Run {run_dir}", rows)
    print(*stalls["last"][-3:], f"summary: {run_dir}/summary.json", sep="\n")
