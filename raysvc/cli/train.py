"""`raysvc train`: run a whole job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.interrupt import asked_to_stop
from raysvc.cli.view import View, number, print_table
from raysvc.errors import WorkerFailed
from raysvc.job.objectives.eval_metrics import SHOWN
from raysvc.job.objectives.units import count_of, untrained_text
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig
    from raysvc.progress import Tick

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

    Example: raysvc train job.yaml trainer.max_steps=100

    Example: raysvc train job.yaml --headroom 10
    """
    from raysvc.job.job_file import load_job
    from raysvc.training.train import train as run_job

    job = load_job(config, overrides or ())
    if headroom is not None:
        _measure(job, headroom, address, as_json)
        return
    try:
        with View() as view:
            watched = partial(_show, view, job.run_dir, address)
            result = run_job(job, address=address, progress=watched, should_stop=asked_to_stop)
    except WorkerFailed as error:
        again = shlex.join(["raysvc", *sys.argv[1:]])
        raise WorkerFailed(error.rank, error.call, error.cause, again) from error
    show_summary(job.run_dir, result.metrics, as_json)
    say_if_stopped(result.global_step)


def _show(view: View, run_dir: str, address: str | None, tick: Tick) -> None:
    """Show a tick; when the run begins, how to look at it too."""
    view(tick)
    if tick.phase == "start" and tick.final:
        where, run = f" --address {address}" if address else "", shlex.quote(run_dir)
        view.say(f"watch it: raysvc top{where}; as a page: raysvc top --web{where}")
        view.say(f"look at it, also while it runs: raysvc report {run}; raysvc show {run} --step 0")


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
    print_table(f"{how_many(found.steps, 'step')} from step {found.first_step} on", rows)
    print(found.verdict())


def say_if_stopped(step: int) -> None:
    """End a run that Ctrl-C ended, in words and exit code.

    Raises:
        KeyboardInterrupt: it was pressed.
    """
    if asked_to_stop():
        raise KeyboardInterrupt(f"{step} steps are trained and saved; the same command goes on there")


def show_summary(run_dir: str, summary: Mapping[str, Any], as_json: bool) -> None:
    """The end of a run, for a person or a machine."""
    if as_json:
        emit(summary)
        return
    try:
        rows = dict(_facts(run_dir, summary))
    except (KeyError, TypeError, ValueError, AttributeError):  # read back from a file that carries no digest
        rows = {"summary": f"{run_dir}/summary.json is damaged; nothing but this table needs it"}
    print_table(f"Run {run_dir}", rows)


def _facts(run_dir: str, summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    steps, begin = summary["steps"], summary["resumed_from"]
    goes_on = f", of which {steps - begin:,} now: resumed from the checkpoint of {begin:,}" if begin else ""
    trained = f"{how_many(summary['tokens_trained'], 'trained token')} in {how_many(steps, 'step')}"
    yield "trained", f"{count_of(summary)} with {trained}{goes_on}"
    yield "left out", _left_out(summary["left_out"])
    lowest = f"{number(summary['loss_best'])} best (step {summary['loss_best_step']})"
    yield "loss", f"{number(summary['loss_first'])} first, {number(summary['loss_last'])} last, {lowest}"
    for name, line in summary["evals"].items():
        told = ", ".join(f"{metric} {number(line[metric])}" for metric in SHOWN if metric in line)
        yield f"eval {name}", f"{told} on {count_of(line)}"
    best, stopped = summary.get("best"), summary.get("stopped_early")
    if stopped:
        yield (
            "stopped",
            f"early: {how_many(stopped['without'], 'eval')} without progress since eval {_lowest(stopped)}",
        )
    if best:
        yield "best", f"eval {_lowest(best)}"
    if summary["tokens_per_s"]:
        waited = f"{summary['stall_fraction']:.1%} of the time waiting for data"
        yield "speed", f"{number(summary['tokens_per_s'])} trained tokens/s, {waited}"
    causes = {name: seconds for name, seconds in summary["stalls"]["by_cause"].items() if seconds >= 0.05}
    if causes:
        yield "waited for", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in causes.items())
    cache = summary["cache"]
    how = "tokens were in the cache" if cache["hit"] else f"tokenized for this run: {cache['reason']}"
    yield "entry", f"{cache['key'][:16]}, {how}"
    for name, outcome in summary.get("report_to", {}).items():
        yield f"tracker {name}", str(outcome)
    if summary["model"]:
        of_best = f" (the best: of {how_many(best['steps'], 'step')})" if best else ""
        yield "model", f"{summary['model']}{of_best}"
    yield "next", f"raysvc report {run_dir}"


def _lowest(found: Mapping[str, Any]) -> str:
    value = f"{found['metric']} {number(found['value'])}" if found["value"] is not None else "no number"
    return f"{found['eval']}: {value} after {how_many(found['steps'], 'step')}"


def _left_out(found: Mapping[str, Any]) -> str:
    """Rows of the source that were not trained, or not whole, and why; of those that are not in the entry the reason of most."""
    if not found:
        return "not known yet: the build goes on"
    dropped, quarantined = sum(found["dropped"].values()), sum(found["quarantined"].values())
    said = []
    if dropped:
        reason, count = max(found["dropped"].items(), key=lambda one: one[1])
        said.append(f"{how_many(dropped, 'row')} dropped ({reason}{f': {count:,}' * (count < dropped)})")
    if quarantined:
        said.append(f"{quarantined:,} quarantined ({found['example']})")
    if found["truncated"]:
        said.append(f"{found['truncated']:,} truncated")
    said += untrained_text(found)
    return ", ".join(said) or "no row of the source"
