"""Charts as data: what uPlot draws in the browser, small enough for a page of one file.

Axes: N points of a chart, K series.
Always true:
- a point that is a series' smallest or largest of its stretch is kept, however long the run: peaks and dips stay;
- the first and the last point stay; no value is averaged or invented;
- what is not finite is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
STRETCHES = 1000  # of a long chart; about as many as a screen has columns of pixels
BINS = 40


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        unit: of x.
        x: [N], rising.
        series: name -> [N], None or NaN: no value there.
        dots: names of series that are drawn as points alone.
        steps: each value holds up to the next x: a histogram.
    """

    title: str
    unit: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    dots: tuple[str, ...] = ()
    steps: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, thinned."""
        values = [
            np.array([math.nan if v is None else v for v in each], float) for each in self.series.values()
        ]
        keep = kept(values, len(self.x))
        return {
            "title": self.title,
            "unit": self.unit,
            "steps": self.steps,
            "x": [_plain(float(self.x[index])) for index in keep],
            "series": [
                {"name": name, "dots": name in self.dots, "values": [_plain(float(v)) for v in each[keep]]}
                for name, each in zip(self.series, values, strict=True)
            ],
        }


def kept(series: Sequence[Floats], num_points: int, stretches: int = STRETCHES) -> npt.NDArray[np.int64]:
    """Indices of the points that stay: of each stretch and series the smallest and the largest, and both ends."""
    if num_points <= 2 * stretches:
        return np.arange(num_points)
    bounds = np.linspace(0, num_points, stretches + 1).astype(np.int64)
    stay = {0, num_points - 1}
    for values in series:
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            part = values[low:high]
            if np.isfinite(part).any():
                part = np.where(np.isfinite(part), part, np.nan)
                stay |= {low + int(np.nanargmin(part)), low + int(np.nanargmax(part))}
    return np.array(sorted(stay), np.int64)


def histogram(title: str, unit: str, groups: Mapping[str, Sequence[float]], bins: int = BINS) -> Chart:
    """Counts how many values of each group fall into bins of equal width, the same for all groups."""
    together = np.concatenate([np.asarray(values, float) for values in groups.values()] or [np.zeros(0)])
    low, high = (float(together.min()), float(together.max())) if len(together) else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    series: dict[str, Sequence[float | None]] = {}
    for name, values in groups.items():
        counts, _ = np.histogram(np.asarray(values, float), edges)
        series[name] = [*counts.tolist(), int(counts[-1])]  # the last bin holds up to its right edge
    return Chart(title, unit, edges.tolist(), series, steps=True)


def bars(title: str, unit: str, rows: Sequence[tuple[float, float, float]], name: str) -> Chart:
    """Bars from (left, right, height), one after the other."""
    x = [left for left, _, _ in rows] + [rows[-1][1]]
    return Chart(title, unit, x, {name: [height for _, _, height in rows] + [rows[-1][2]]}, steps=True)


def with_dots(chart: Chart, dots: Mapping[str, Mapping[float, float]]) -> Chart:
    """The chart, and series of a few points (x -> value) of their own."""
    if not dots:
        return chart
    x = sorted({*chart.x, *(at for points in dots.values() for at in points)})
    series: dict[str, Sequence[float | None]] = {}
    for name, values in chart.series.items():
        known = dict(zip(chart.x, values, strict=True))
        series[name] = [known.get(at) for at in x]
    for name, points in dots.items():
        series[name] = [points.get(at) for at in x]
    return Chart(chart.title, chart.unit, x, series, tuple(dots))


def short(value: float) -> str:
    """A figure for a table."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.6g}")
