"""The charts of a run, from the lines of its logs.

Axes: N steps.
Always true:
- a figure that a line does not have (an older run) is a gap, and a chart without any figure is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysvc.report.charts import Chart, with_dots

Line = Mapping[str, Any]
CAUSES = {
    "read": "reading rows",
    "collate": "collation",
    "copy": "copy to the worker",
    "other": "queue or network",
}
OF_PAIRS = {
    "Share of pairs whose chosen reward is higher": ("rewards/accuracies", "accuracy"),
    "Rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins", "margin"),
    "Log-probabilities": ("logps/chosen", "logps/rejected"),
}
OF_EVALS = ("rewards/accuracies", "accuracy", "rewards/margins", "margin")  # all of them would hide the lines


def run_charts(steps: Sequence[Line], evals: Sequence[Line]) -> list[Chart]:
    """All charts of a run."""
    charts = [
        with_dots(_chart("Loss", steps, {"train": lambda line: line["loss"]}), eval_points(evals)),
        *(_named(title, steps, evals, names) for title, names in OF_PAIRS.items()),
        _chart("Learning rate", steps, {"learning rate": lambda line: line.get("lr")}),
        _chart("Gradient norm", steps, {"before clipping": lambda line: line["grad_norm"]}),
        _chart("Trained tokens per second", steps, {"tokens/s": _rate}),
        _chart("Waited for data, ms, and what for", steps, {"waited": _waited, **_causes()}),
        _chart("Cells without a token of a row (padding and gaps of packing)", steps, {"share": _padding}),
        _shares("Loss by source", steps, "by_source", str),
        _shares("Loss by length of the row", steps, "by_length", lambda name: f"up to {int(name):,} tokens"),
    ]
    return [chart for chart in charts if _has_values(chart)]


def eval_points(
    evals: Sequence[Line], metric: str = "loss", suffix: str = ""
) -> dict[str, dict[float, float]]:
    """Eval (and `suffix`) -> step -> metric; an eval that does not have it, such as one without a target, has none."""
    found: dict[str, dict[float, float]] = {}
    for line in evals:
        if line.get(metric) is not None:
            found.setdefault(f"eval {line['eval']}{suffix}", {})[float(line["step"])] = float(line[metric])
    return found


def _chart(title: str, steps: Sequence[Line], series: Mapping[str, Callable[[Line], float | None]]) -> Chart:
    values = {name: [of(line) for line in steps] for name, of in series.items()}
    return Chart(title, "step", [line["step"] for line in steps], values)


def _named(title: str, steps: Sequence[Line], evals: Sequence[Line], names: Sequence[str]) -> Chart:
    """Metrics of an objective; names that no step has are left out."""
    there = [name for name in names if any(name in line for line in steps)]
    shown = {name: name.rpartition("/")[2] for name in there}
    values = {shown[name]: [line.get(name) for line in steps] for name in there}
    dots = [eval_points(evals, name, f" {shown[name]}") for name in there if name in OF_EVALS]
    chart = Chart(title, "step", [line["step"] for line in steps], values)
    return with_dots(chart, {name: points for one in dots for name, points in one.items()})


def _shares(title: str, steps: Sequence[Line], key: str, label: Callable[[str], str]) -> Chart:
    """One series for each name that a step has sums of."""
    names = dict.fromkeys(name for line in steps for name in line.get(key, {}))
    ordered = sorted(names, key=lambda name: (len(name), name)) if key == "by_length" else list(names)

    def mean_of(name: str) -> Callable[[Line], float | None]:
        def mean(line: Line) -> float | None:
            nats, targets = line.get(key, {}).get(name, (0.0, 0))
            return nats / targets if targets else None

        return mean

    return _chart(title, steps, {label(name): mean_of(name) for name in ordered})


def _causes() -> dict[str, Callable[[Line], float | None]]:
    def of(part: str) -> Callable[[Line], float | None]:
        return lambda line: float(line.get("stall_by", {}).get(part, 0.0)) * 1e3

    return {CAUSES[part]: of(part) for part in CAUSES}


def _rate(line: Line) -> float:
    return float(line["tokens"] / max(line["step_s"], 1e-9))


def _waited(line: Line) -> float:
    return float(line["stall_s"]) * 1e3


def _padding(line: Line) -> float | None:
    return 1.0 - line["input_tokens"] / line["cells"] if line.get("cells") else None


def _has_values(chart: Chart) -> bool:
    return any(value is not None for values in chart.series.values() for value in values)
