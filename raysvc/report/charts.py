"""Small charts as inline SVG: no script, no font, no request.

Axes of a chart: x to the right, y up; the viewBox is `WIDTH` x `HEIGHT` and scales with the page.
Always true:
- every bar and every line point is inside the plot;
- each chart has a title element, so that it can be read aloud and hovered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34


def histogram(title: str, values: Sequence[float], unit: str, bins: int = 40) -> str:
    """How often values fall into each of some bins of equal width."""
    low, high = (min(values), max(values)) if len(values) else (0.0, 1.0)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    bars = [(low + i * width, low + (i + 1) * width, float(count)) for i, count in enumerate(counts)]
    return bar_chart(title, bars, unit)


def bar_chart(title: str, bars: Sequence[tuple[float, float, float]], unit: str) -> str:
    """Bars from (left, right, height)."""
    low, high = bars[0][0], bars[-1][1] if bars[-1][1] > bars[0][0] else bars[0][0] + 1
    top = max(height for _, _, height in bars) or 1.0
    shapes = []
    for left, right, height in bars:
        x0, x1 = _x(left, low, high), _x(right, low, high)
        y = _y(height, 0, top)
        tip = f"{short(left)} – {short(right)} {unit}: {short(height)}"
        shapes.append(
            f'<rect x="{x0:.1f}" y="{y:.1f}" width="{max(x1 - x0 - 1, 0.5):.1f}" height="{HEIGHT - BOTTOM - y:.1f}">'
            f"<title>{escape(tip)}</title></rect>"
        )
    return _frame(title, "".join(shapes), (low, high), (0.0, top), unit)


def line_chart(title: str, xs: Sequence[float], ys: Sequence[float], unit: str) -> str:
    """One line; points that are not finite are left out."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if not points:
        return _frame(title, "", (0.0, 1.0), (0.0, 1.0), unit)
    low, high = points[0][0], max(points[-1][0], points[0][0] + 1)
    bottom, top = min(0.0, *(y for _, y in points)), max(y for _, y in points) or 1.0
    path = " ".join(f"{_x(x, low, high):.1f},{_y(y, bottom, top):.1f}" for x, y in _thinned(points))
    return _frame(title, f'<polyline points="{path}"/>', (low, high), (bottom, top), unit)


def short(value: float) -> str:
    """A figure for an axis."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _frame(title: str, shapes: str, xs: tuple[float, float], ys: tuple[float, float], unit: str) -> str:
    base = HEIGHT - BOTTOM
    ticks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _x(xs[0] + share * (xs[1] - xs[0]), *xs), _y(ys[0] + share * (ys[1] - ys[0]), *ys)
        ticks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        ticks.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{short(ys[0] + share * (ys[1] - ys[0]))}</text>'
        )
        ticks.append(
            f'<text x="{x:.1f}" y="{base + 16}" class="mid">{short(xs[0] + share * (xs[1] - xs[0]))}</text>'
        )
    caption = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" class="end">{escape(unit)}</text>'
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{''.join(ticks)}{shapes}{caption}</svg></figure>"
    )


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)


def _thinned(points: Sequence[tuple[float, float]], most: int = 600) -> Sequence[tuple[float, float]]:
    """At most about `most` points; the first and the last one stay."""
    stride = max(1, len(points) // most)
    return [*points[:-1:stride], points[-1]]
