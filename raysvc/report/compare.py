"""Runs side by side: what they trained, what differs between their jobs, and their curves in one chart each.

Axes: R runs.
Always true:
- all is read from the run folders; no entry is opened, and nothing is tokenized;
- row ids are compared only between runs of the same entries: elsewhere the same id is another row;
- a figure that a run does not have is a gap.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.job.objectives.units import Count, count_of
from raysvc.report.charts import Chart, with_dots
from raysvc.report.page import Figures, charts_over_steps, records, whole_page
from raysvc.report.run_charts import Line, eval_points
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_identity import identity_in
from raysvc.training.run_job import differences, job_of_run

ENTRIES = "plan.entry_keys"


@dataclass(frozen=True)
class RunFacts:
    """Holds what one run left.

    Attributes:
        name: that no other run has.
        job: that it had when it started or went on last.
        entry_keys: of its rows; None where that is not known.
        steps: lines of its metrics.
        evals: lines of its evals.
        rows: ids of the rows of each optimizer step.
        summary: None before its end.
    """

    name: str
    job: JobConfig
    entry_keys: Any
    steps: Sequence[Line]
    evals: Sequence[Line]
    rows: Sequence[Sequence[str]]
    summary: Line | None


def read_runs(folders: Sequence[str]) -> list[RunFacts]:
    """Returns what the runs in some folders left.

    Raises:
        ConfigError: one has trained nothing, or the same is named twice.
    """
    paths = [Path(folder).absolute() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError("report", "the same run is named twice", "name two runs")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read(name, path) for name, path in zip(names, paths, strict=True)]


def _read(name: str, path: Path) -> RunFacts:
    folder = RunFolder(path)
    steps = list(folder.lines(folder.metrics))
    if not steps:
        raise ConfigError(str(path), "has trained no step", "name the folder of a run that has")
    rows = [line["row_ids"] for line in folder.lines(folder.rows)]
    keys = (identity_in(path) or {}).get(ENTRIES)
    evals = list(folder.lines(folder.evals))
    return RunFacts(name, job_of_run(path), keys, steps, evals, rows, folder.summary())


def figures_of(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Lines of a table: a figure's name under "", its value under the name of each run."""
    evals = dict.fromkeys(line["eval"] for run in runs for line in run.evals)
    units = dict.fromkeys(_trained(run).unit for run in runs)
    of: dict[str, Callable[[RunFacts], object]] = {
        "steps": lambda run: f"{len(run.steps):,}{_how_it_ended(run)}",
        " or ".join(units): lambda run: _trained(run) if len(units) > 1 else f"{_trained(run).number:,}",
        "trained tokens": lambda run: f"{sum(line['tokens'] for line in run.steps):,}",
        "loss first": lambda run: f"{run.steps[0]['loss']:.4g}",
        "loss last": lambda run: f"{run.steps[-1]['loss']:.4g}",
        "loss best": lambda run: _lowest(run.steps),
        **{f"eval {name} last": _eval(name, last=True) for name in evals},
        **{f"eval {name} best": _eval(name, last=False) for name in evals},
        "trained tokens/s (median)": lambda run: f"{statistics.median(map(_rate, run.steps)):,.0f}",
        "waited for data": lambda run: f"{_stall_share(run):.1%} of the time",
    }
    return [{"": name, **{run.name: value(run) for run in runs}} for name, value in of.items()]


def fields_that_differ(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Lines of a table: a key of the job, and its value in each run; "" where a run does not give it."""
    first, *others = runs
    differ = [differences(first.job, other.job) for other in others]
    keys = dict.fromkeys(key for one in differ for key in one)
    told = []
    for key in keys:
        own = next(one[key][0] for one in differ if key in one)
        values = [own, *(one[key][1] if key in one else own for one in differ)]
        shown = ["" if value is None else str(value) for value in values]
        told.append({"": key, **dict(zip((run.name for run in runs), shown, strict=True))})
    return told


def rows_in_words(runs: Sequence[RunFacts]) -> str:
    """Says whether the runs trained the same rows in the same steps."""
    if unknown := [run.name for run in runs if run.entry_keys is None]:
        what = f"of which entries the rows of {unknown[0]} are, since its run.json is missing or damaged"
        return f"It is not known {what}, so rows cannot be compared by id."
    if any(run.entry_keys != runs[0].entry_keys for run in runs):
        return "The runs are of different entries, so their rows cannot be compared by id."
    if without := [run.name for run in runs if not run.rows]:
        return f"{without[0]} has no row log (rows.jsonl), so rows cannot be compared."
    apart = next((step for step, ids in enumerate(zip(*(run.rows for run in runs))) if _differ(ids)), None)  # noqa: B905 - as far as both go
    both = min(len(run.rows) for run in runs)
    if apart is None:
        return f"The rows of the first {both:,} optimizer steps are the same in all runs."
    trained = [{row for ids in run.rows for row in ids} for run in runs]
    common = len(set.intersection(*trained))
    alone = ", ".join(f"{len(ids) - common:,} of {run.name}" for run, ids in zip(runs, trained, strict=True))
    return f"The rows differ from optimizer step {apart} on. All runs trained {common:,} rows; not in all: {alone}."


def charts_of(runs: Sequence[RunFacts]) -> list[Chart]:
    """One curve a run in each chart."""
    charts = [
        _chart("Loss", runs, lambda line: float(line["loss"])),
        _chart("Trained tokens per second", runs, _rate),
        _chart("Waited for data, ms", runs, lambda line: float(line["stall_s"]) * 1e3),
    ]
    points = {
        f"{name} of {run.name}": values for run in runs for name, values in eval_points(run.evals).items()
    }
    evals = with_dots(Chart("Loss of evals", "step", [], {}), points)
    return [charts[0], *([evals] if points else []), *charts[1:]]


def render_comparison(runs: Sequence[RunFacts]) -> str:
    """The whole page."""
    figures = Figures()
    names = ("", *(run.name for run in runs))
    differ = fields_that_differ(runs)
    fields = records(differ, names) if differ else "<p>The jobs are the same.</p>"
    sections = [
        f"<div class='card'>{records(figures_of(runs), names)}</div><p>{escape(rows_in_words(runs))}</p>",
        f"<h2>Fields that differ</h2><div class='card'>{fields}</div>",
        f"<h2>Curves</h2>{charts_over_steps(figures, charts_of(runs))}",
    ]
    return whole_page(" and ".join(run.name for run in runs), sections, figures)


def _chart(title: str, runs: Sequence[RunFacts], value: Callable[[Line], float]) -> Chart:
    x = sorted({float(line["step"]) for run in runs for line in run.steps})
    series: dict[str, Sequence[float | None]] = {}
    for run in runs:
        known = {float(line["step"]): value(line) for line in run.steps}
        series[run.name] = [known.get(at) for at in x]
    return Chart(title, "step", x, series)


def _how_it_ended(run: RunFacts) -> str:
    if run.summary is None:
        return ", not ended"
    return ", stopped early" if run.summary.get("stopped_early") else ""


def _trained(run: RunFacts) -> Count:
    counts = [count_of(line) for line in run.steps]
    return Count(sum(one.number for one in counts), counts[0].unit)


def _lowest(lines: Sequence[Line]) -> str:
    best = min(lines, key=lambda line: float(line["loss"]))
    return f"{best['loss']:.4g} (step {best['step']})"


def _eval(name: str, *, last: bool) -> Callable[[RunFacts], str]:
    def of(run: RunFacts) -> str:
        lines = [line for line in run.evals if line["eval"] == name and line["loss"] is not None]
        return _lowest(lines[-1:] if last else lines) if lines else "–"

    return of


def _rate(line: Mapping[str, Any]) -> float:
    return float(line["tokens"] / max(line["step_s"], 1e-9))


def _stall_share(run: RunFacts) -> float:
    took = sum(float(line["step_s"]) for line in run.steps)
    return sum(float(line["stall_s"]) for line in run.steps) / max(took, 1e-9)


def _differ(ids: Sequence[Sequence[str]]) -> bool:
    return any(one != ids[0] for one in ids[1:])
