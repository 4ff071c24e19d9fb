"""The HTML page: self-contained, safe, and it renders in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from raysvc.collate.plan_report import plan_report
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.report.charts import HEIGHT, WIDTH, bar_chart, histogram, line_chart
from raysvc.report.facts import Facts, worst_stalls
from raysvc.report.page import render

STEPS = [
    {
        "step": i,
        "loss": 5.0 / (i + 1),
        "tokens": 100,
        "step_s": 0.1,
        "stall_s": 0.05 if i == 3 else 0.0,
        "grad_norm": 1.0,
    }
    for i in range(8)
]


def facts(text: str = "hello", *, steps: bool = True) -> Facts:
    import numpy as np

    plan = Plan(PlanConfig(batch_size=4), np.arange(10, 30, dtype=np.int32))
    row_counts = {"rows_in": 22, "rows_written": 20, "dropped": {"too long": 1}, "quarantined": {text: 1}}
    tokens = {"tokens_rendered": 390, "tokens_trained": 200, "tokens_context": 190, "tokens_truncated": 0}
    return Facts(
        title=f"job {text}",
        overview={"rows": 20},
        lengths=list(range(10, 30)),
        trained=[5] * 20,
        examples={0: [(text, False), (f"answer {text}", True)]},
        row_counts={**row_counts, **tokens},
        set_aside=[{"source_row": 7, "reason": text, "detail": ""}],
        plan=plan_report(plan, 2, ColumnBytes(per_cell=13, per_row=24)),
        dp_size=2,
        steps=STEPS if steps else [],
        summary=None,
    )


def test_a_page_asks_for_nothing_and_runs_no_script() -> None:
    page = render(facts())
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)


def test_a_hostile_row_is_only_text() -> None:
    page = render(facts("<script>alert(1)</script><img src=x onerror=alert(1)>"))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_a_page_without_a_run_has_no_run_section() -> None:
    assert "<h2>Run</h2>" not in render(facts(steps=False))
    assert "<h2>Run</h2>" in render(facts())


def test_waits_have_their_verdicts() -> None:
    said = "step 3 waited 50 ms: <collation> 40 ms"
    names = ("steps", "optimizer_steps", "rows", "tokens_trained", "loss_first", "loss_last", "tokens_per_s")
    stalls = {"by_cause": {"collation on the server": 1.234}, "last": [said]}
    summary = {**dict.fromkeys(names, 1), "stall_fraction": 0.1, "stalls": stalls}
    page = render(replace(facts(), summary=summary))
    assert "step 3 waited 50 ms: &lt;collation&gt; 40 ms" in page
    assert "<td>collation on the server</td><td class='n'>1.23 s</td>" in page


def test_the_longest_waits_come_first_and_short_ones_not_at_all() -> None:
    assert [step["step"] for step in worst_stalls(STEPS)] == [3]


@pytest.mark.parametrize(
    "chart",
    [
        histogram("h", [1, 2, 2, 3, 100], "tokens"),
        histogram("one value", [5, 5, 5], "tokens"),
        bar_chart("b", [(0, 1, 0), (1, 2, 0)], "x"),
        line_chart("l", list(range(5000)), [float("nan"), *range(4999)], "step"),
        line_chart("one point", [3], [2.0], "step"),
    ],
    ids=["spread", "one value", "empty bars", "long line", "one point"],
)
def test_everything_that_is_drawn_lies_inside_the_picture(chart: str) -> None:
    for x, y, width, height in re.findall(
        r'<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"', chart
    ):
        assert 0 <= float(x) <= float(x) + float(width) <= WIDTH
        assert 0 <= float(y) <= float(y) + float(height) <= HEIGHT
    for points in re.findall(r'points="([^"]+)"', chart):
        pairs = [tuple(map(float, pair.split(","))) for pair in points.split()]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in pairs)
        assert len(pairs) <= 700


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_every_figure(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(facts("<b>&")))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--enable-logging=stderr",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=4000",
    ]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.count("<figure>") == 7
    assert done.stdout.count("<polyline") == 4
    assert "CONSOLE" not in done.stderr
