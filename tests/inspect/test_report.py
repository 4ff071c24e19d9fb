"""The HTML page: self-contained, safe, and it renders in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raysvc.report.charts import STRETCHES, Chart, bars, histogram, kept, with_dots
from raysvc.report.facts import newest_rate, worst_stalls
from raysvc.report.page import render, write_page
from raysvc.report.run_charts import run_charts
from tests.inspect.pages import BROWSER, STEPS, browse_page, facts


def test_a_page_asks_for_nothing_and_its_policy_names_its_three_scripts() -> None:
    page = render(facts())
    assert not re.search(r"(src|href)=|@import|url\(", page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}\"" in page
    assert len(scripts) == 3
    assert len(page) < 100_000, "uPlot is 52 kB"


def test_a_hostile_row_is_only_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = render(facts(hostile))
    assert page.count("<script") == render(facts()).count("<script") == 6
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_a_page_without_a_run_has_no_run_section() -> None:
    assert "<h2>Run</h2>" not in render(facts(steps=False))
    assert "<h2>Run</h2>" in render(facts())


def test_a_page_of_a_run_begins_with_the_run_and_says_what_its_evals_decided() -> None:
    best = {"eval": "held", "metric": "loss", "value": 2.7951, "steps": 32}
    summary = {
        "steps": 8, "rows": 64, "tokens_trained": 15770, "loss_first": 6.2, "loss_last": 2.858, "loss_best": 2.795, "loss_best_step": 6,
        "tokens_per_s": 1413.4, "stall_fraction": 0.0018, "evals": {"held": {"loss": 2.84514, "rows": 64}}, "best": best,
        "stopped_early": {**best, "without": 3, "patience": 3},
        "left_out": {"untrained": {"held out for the eval held": 12, "not reached": 1200}},
    }  # fmt: skip
    page = render(replace(facts(), summary=summary))
    headings = re.findall(r"<h2>([^<]*)", page)
    assert headings[0] == "Run"
    assert headings.index("Run") < headings.index("Row counts")
    for said in (
        "<strong>2.795</strong>loss best (step 6)", "<strong>1,413</strong>trained tokens/s", "Eval held: loss 2.845 on 64 rows",
        "The best model is that of 32 steps: eval held had loss 2.795.", "Stopped early, after 3 evals of held without progress.",
        "Not trained: 12 rows held out for the eval held, 1,200 rows not reached.",
    ):  # fmt: skip
        assert said in page, said
    assert "<strong>1,000</strong>trained tokens/s, last 8 steps" in page
    assert "num_rows" not in page, "names of fields are no words"
    assert "<td>rows</td><td class='n'>20</td>" in page.partition("<h2>Plan")[2]


def test_the_newest_rate_is_that_of_the_last_steps_together() -> None:
    steps = [
        {"tokens": 10**6, "step_s": 0.1},
        *[{"tokens": 30, "step_s": 3.0}] * 10,
        *[{"tokens": 90, "step_s": 1.0}] * 10,
    ]
    assert newest_rate(steps) == 10 * (30 + 90) / (10 * (3.0 + 1.0))
    assert newest_rate(steps[:1]) == pytest.approx(1e7)


def test_a_page_shows_the_job_and_its_values_as_they_are() -> None:
    job = {"source.path": ["/rows/<b>.jsonl"], "trainer.learning_rate": 1e-05, "tokenizer.name": "qwen"}
    card = (
        render(replace(facts(), job=job))
        .partition("<summary>Job: the 3 fields")[2]
        .partition("</details>")[0]
    )
    cells = re.findall(r"<tr><td>(.*?)</td><td class='n'>(.*?)</td></tr>", card)
    assert cells == [
        ("source.path", "[&quot;/rows/&lt;b&gt;.jsonl&quot;]"),
        ("trainer.learning_rate", "1e-05"),
        ("tokenizer.name", "qwen"),
    ]
    assert "<summary>Job" not in render(facts())


def test_a_lone_surrogate_in_what_a_source_says_does_not_keep_a_page_from_being_written(
    tmp_path: Path,
) -> None:
    write_page(tmp_path / "page.html", render(replace(facts(), title="role \ud800")))
    assert "role ?" in (tmp_path / "page.html").read_text()


def test_decisions_of_a_run_are_listed_and_their_names_are_only_text() -> None:
    assert "<h2>Decisions" not in render(facts())
    decisions = [
        {"step": 40, "weights": {"math": 3.0, "<b>bad": 0.5}, "skip_rows": ()},
        {"step": 7, "weights": None, "skip_rows": tuple(range(5000, 6200))},
    ]
    page = render(replace(facts(), decisions=decisions))
    first, second = re.findall(
        r"<tr><td>(.*?)</td></tr>", page.partition("<h2>Decisions")[2].partition("</table>")[0]
    )
    assert first.split("</td><td>") == ["40", "math 3, &lt;b&gt;bad 0.5", ""]
    assert second.split("</td><td>") == [
        "7",
        "",
        f"1,200: {', '.join(f'0:0:{row}' for row in range(5000, 5008))}, …",
    ]


def test_a_page_of_a_source_without_an_end_has_no_plan() -> None:
    assert "<h2>Plan" in render(facts())
    assert "<h2>Plan" not in render(replace(facts(), plan=None))


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


def test_a_peak_of_one_step_in_a_million_is_never_thinned_away() -> None:
    rng = np.random.default_rng(0)
    loss = rng.normal(2.0, 0.1, 1_000_000)
    loss[[123_456, 654_321]] = (97.0, -5.0)
    flat = np.zeros(1_000_000)
    flat[777_777] = np.inf
    stay = kept([loss, flat], len(loss))
    assert {0, 123_456, 654_321, 999_999} <= set(stay.tolist())
    assert len(stay) <= 4 * STRETCHES + 2
    # as a screen of 1,000 columns shows it: smallest and largest of every column, by another computation
    columns = loss.reshape(STRETCHES, -1)
    shown = [loss[stay[(stay >= low) & (stay < low + 1000)]] for low in range(0, 1_000_000, 1000)]
    assert [part.min() for part in shown] == columns.min(1).tolist()
    assert [part.max() for part in shown] == columns.max(1).tolist()


def test_a_short_run_keeps_every_point_and_gaps_stay_gaps() -> None:
    chart = Chart("l", "step", [3, 4, 5], {"loss": [1.0, float("nan"), 0.5], "b": [None, 2.0, float("inf")]})
    told = json.loads(json.dumps(chart.to_json(), allow_nan=False))
    assert told["x"] == [3, 4, 5]
    assert [each["values"] for each in told["series"]] == [[1, None, 0.5], [None, 2, None]]


def test_histograms_of_sources_share_their_bins_and_count_every_row() -> None:
    chart = histogram("h", "tokens", {"a": [1, 2, 2, 3, 100], "b": [50], "none": []}, bins=10)
    assert (chart.x[0], chart.x[-1], len(chart.x)) == (1.0, 100.0, 11)
    assert {name: sum(values[:-1]) for name, values in chart.series.items()} == {"a": 5, "b": 1, "none": 0}
    assert histogram("one value", "tokens", {"a": [5, 5]}).series["a"][0] == 2
    assert bars("b", "x", [(0, 1, 4), (1, 2, 0)], "n").series == {"n": [4, 0, 0]}


def test_evals_stand_at_their_own_steps() -> None:
    chart = with_dots(
        Chart("Loss", "step", [0, 1, 2], {"train": [3.0, 2.0, 1.0]}), {"eval v": {1: 2.5, 4: 0.5}}
    )
    assert chart.x == [0, 1, 2, 4]
    assert chart.series == {"train": [3.0, 2.0, 1.0, None], "eval v": [None, 2.5, None, 0.5]}


def test_the_charts_of_a_run_are_the_lines_of_its_log() -> None:
    charts = {chart.title: chart.series for chart in run_charts(STEPS, facts().evals)}
    assert charts["Loss"]["eval valid"] == [None] * 4 + [1.25, None, None, 1.0]
    assert charts["Loss by source"] == {"chat": [2.5] * 8, "<b>": [0.375] * 8}
    assert list(charts["Loss by length of the row"]) == [
        "up to 32 tokens",
        "up to 64 tokens",
        "up to 128 tokens",
    ]
    assert charts["Loss by length of the row"]["up to 32 tokens"] == [None] * 8
    waits = charts["Waited for data, ms, and what for"]
    assert (waits["waited"][3], waits["collation"][3], waits["reading rows"][3]) == (50.0, 50.0, 0.0)
    (padding,) = [series["share"] for title, series in charts.items() if title.startswith("Cells")]
    assert padding == [0.25] * 8


def test_a_run_of_an_older_version_has_the_charts_that_its_lines_say() -> None:
    old = [
        {name: step[name] for name in ("step", "loss", "tokens", "step_s", "stall_s", "grad_norm")}
        for step in STEPS
    ]
    titles = [chart.title for chart in run_charts(old, [])]
    assert "Loss" in titles
    assert not {"Learning rate", "Loss by source"} & set(titles)


def test_a_run_of_pairs_has_charts_of_accuracies_rewards_and_log_probabilities() -> None:
    told = {
        "rewards/accuracies": 0.5,
        "rewards/chosen": 1.0,
        "rewards/rejected": -1.0,
        "rewards/margins": 2.0,
        "logps/chosen": -7.0,
    }
    steps = [{**STEPS[0], **told}, STEPS[1]]
    charts = {chart.title: chart.series for chart in run_charts(steps, [])}
    assert charts["Share of pairs whose chosen reward is higher"] == {"accuracies": [0.5, None]}
    assert charts["Rewards"] == {"chosen": [1.0, None], "rejected": [-1.0, None], "margins": [2.0, None]}
    assert charts["Log-probabilities"] == {"chosen": [-7.0, None]}
    assert "Rewards" not in {chart.title for chart in run_charts(STEPS, [])}
    held = {
        "step": 1,
        "eval": "held",
        "loss": 0.7,
        "rewards/accuracies": 0.25,
        "rewards/margins": 0.1,
        "logps/chosen": -9,
    }
    charts = {chart.title: chart.series for chart in run_charts(steps, [held])}
    assert charts["Loss"]["eval held"] == [None, 0.7]
    assert charts["Share of pairs whose chosen reward is higher"]["eval held accuracies"] == [None, 0.25]
    assert charts["Rewards"]["eval held margins"] == [None, 0.1]
    assert charts["Log-probabilities"] == {"chosen": [-7.0, None]}


HOVER = """<script>addEventListener("load", () => {
  const say = (name, text) => { const p = document.createElement("p"); p.id = name; p.textContent = text; document.body.append(p); };
  const chart = window.charts.find((each) => each.series[1].label === "train");
  chart.setCursor({ left: chart.valToPos(3, "x"), top: 10 });
  say("hovered", [...document.querySelectorAll("figure")].find((f) => f.textContent.startsWith("Loss")).querySelector(".u-legend").textContent);
  const peak = window.charts.find((each) => each.series[1].label === "waited");
  const at = Math.round(peak.valToPos(3, "x", true)), top = Math.round(peak.valToPos(50, "y", true));
  const cells = peak.ctx.getImageData(at - 3, top - 3, 7, 7).data;
  say("peak", [...cells].some((v) => v > 0) ? "drawn" : "missing");
  say("wide", String(document.documentElement.scrollWidth <= innerWidth));
});</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])  # 500: a headless Chromium has no smaller window
def test_a_browser_draws_every_chart_and_says_values_under_the_pointer(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    text = render(facts("<b>&"))
    own = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", HOVER)
    page.write_text(own)
    dom, said = browse_page(page, tmp_path, width)
    assert dom.count("<canvas") == dom.count("<figure") == 11
    hovered = re.search(r'id="hovered">([^<]*)<', dom)
    assert hovered is not None
    assert hovered[1].replace(" ", "").startswith("step3train1.25")  # 5 / (3 + 1)
    assert 'id="peak">drawn<' in dom
    assert 'id="wide">true<' in dom, "nothing is wider than the window"
    assert "CONSOLE" not in said


TOOLS = """<script>addEventListener("load", async () => {
  const say = (name, value) => { const p = document.createElement("p"); p.id = name; p.textContent = JSON.stringify(value); document.body.append(p); };
  const of = (label) => window.charts.find((each) => each.series[1].label === label);
  const set = async (control, name, value) => { control[name] = value; control.dispatchEvent(new Event(name === "value" ? "input" : "change")); await new Promise((go) => setTimeout(go, 50)); };
  say("gaps", averages([null, 4, null, 2], 0.5));
  await set(smooth, "value", "0.75");
  say("averaged", [of("train").series.map((each) => each.label), of("train").data]);
  await set(log, "checked", true);
  const split = (plot) => plot.axes[1]._values.filter((text) => text).length;
  say("axes", [of("train").scales.y.distr, of("waited").scales.y.distr, of("before clipping").scales.y.distr, split(of("train"))]);
  await set(smooth, "value", "0");
  say("plain", [of("train").series.length, document.querySelectorAll("canvas").length, document.getElementById("smoothed").textContent]);
});</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_curves_are_smoothed_and_axes_are_logarithmic_where_one_asks_for_it(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    own = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render(facts()))
    page.write_text(own.replace("</body>", TOOLS))
    dom, said = browse_page(page, tmp_path, 1280)
    told = {name: json.loads(value) for name, value in re.findall(r'<p id="(\w+)">([^<]*)</p>', dom)}
    assert told["gaps"] == [None, 4, None, pytest.approx((0.25 * 4 + 0.5 * 2) / 0.75)]
    labels, columns = told["averaged"]
    assert labels == ["step", "train", "eval valid", "train, smoothed"]
    losses = [step["loss"] for step in STEPS]
    for at, value in enumerate(columns[3]):
        weights = [0.75 ** (at - before) for before in range(at + 1)]
        wanted = sum(w * loss for w, loss in zip(weights, losses[: at + 1], strict=True)) / sum(weights)
        assert value == pytest.approx(wanted, rel=1e-5)
    train, waited, flat, ticks = told["axes"]
    assert (train, waited, flat) == (3, 1, 1), "zeros have no logarithm, and equal values need none"
    assert ticks >= 2
    assert told["plain"] == [3, 11, "0"]
    assert "CONSOLE" not in said


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_policy_of_the_page_lets_its_own_scripts_run_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(facts()).replace("</body>", "<script>document.title = 'foreign'</script></body>"))
    dom, said = browse_page(page, tmp_path, 1280)
    assert dom.count("<canvas") == 11
    assert "<title>foreign" not in dom
    assert "Content Security Policy" in said
