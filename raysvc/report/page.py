"""Facts into one HTML page: style, charts and what draws them inside, nothing to fetch.

Always true:
- every text of a row is escaped; a page of hostile rows is only text;
- the browser runs the three scripts of the page and no other: their digests stand in its policy;
- pictures of media lie inside the page, and a page without any allows none.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from raysvc.chat.row_counts import warnings_of
from raysvc.collate.plan_report import PlanReport, in_words
from raysvc.errors import StateMismatch
from raysvc.job.objectives.eval_metrics import SHOWN
from raysvc.job.objectives.units import count_of, untrained_text
from raysvc.progress import how_many
from raysvc.report.browse import STYLE as BROWSE_STYLE
from raysvc.report.browse import browse
from raysvc.report.charts import Chart, bars, histogram, short
from raysvc.report.facts import Facts, newest_rate, worst_stalls
from raysvc.report.pictures import STYLE as MEDIA_STYLE
from raysvc.report.pictures import gallery
from raysvc.report.run_charts import run_charts
from raysvc.row_ids import written

STYLE = """
:root{color-scheme:light dark;--ink:#1b2430;--soft:#5b6878;--line:#d9dfe7;--back:#fff;--card:#f6f8fb;--hue:#2f6fde;--on:#127a3d;--onb:#e2f5e9}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf2;--soft:#9aa8ba;--line:#313b49;--back:#12161c;--card:#1a212b;--hue:#6ea2ff;--on:#7fe0a5;--onb:#143323}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);margin:0 auto;max-width:1180px;padding:24px}
h1{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:18px;margin:36px 0 10px;border-bottom:1px solid var(--line);padding-bottom:4px}
p,figcaption{color:var(--soft)}figcaption{font-size:13px;margin-bottom:4px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
.uplot{font:12px/1.4 system-ui,sans-serif}.u-legend{color:var(--soft);text-align:left}.uplot .u-legend td,.uplot .u-legend th{border:0;width:auto;padding:1px 4px}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{padding:4px 10px;border-bottom:1px solid var(--line);text-align:left;overflow-wrap:anywhere}
td:first-child{min-width:6em}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.row{font:13px/1.6 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;color:var(--soft);max-height:320px;overflow:auto}
.row b{font-weight:600;color:var(--on);background:var(--onb);border-radius:3px}
.tools{display:flex;flex-wrap:wrap;gap:20px;align-items:center}.tools[hidden]{display:none}.tools input{vertical-align:middle}summary{cursor:pointer}
.facts{max-width:640px}.facts td{text-align:left}
.big{display:flex;flex-wrap:wrap;gap:12px}.big div{flex:1;min-width:104px;max-width:220px}.big strong{display:block;font-size:22px}
"""


class Figures:
    """The charts of a page, in the order of their places."""

    def __init__(self) -> None:
        self.charts: list[Chart] = []

    def place(self, *charts: Chart) -> str:
        """Figures to be filled in by the page's script."""
        out = ""
        for chart in charts:
            caption = f"<figcaption>{escape(chart.title)}</figcaption>"
            out += f"<figure data-chart='{len(self.charts)}'>{caption}</figure>"
            self.charts.append(chart)
        return out

    def data(self) -> str:
        """JSON that no text can end."""
        return json.dumps([chart.to_json() for chart in self.charts]).replace("<", "\\u003c")


def render(facts: Facts) -> str:
    """The whole page."""
    figures, pictures = Figures(), gallery(facts.media)
    sections = [
        f"<div class='facts'>{table(facts.overview)}</div>",
        _job(facts.job) if facts.job else "",
        _whole_run(facts, figures) if facts.steps else "",  # first what a reader of a run looks for
        _decisions(facts.decisions) if facts.decisions else "",
        _lengths(facts, figures),
        _row_counts(facts),
        browse(facts.rows, facts.row_counts, facts.set_aside, facts.command),
        pictures,
        _plan(facts.plan, facts.dp_size, figures) if facts.plan else "",
    ]
    return whole_page(facts.title, sections, figures, bool(pictures))


def write_page(file: Path, page: str) -> None:
    """Write a page; of a lone surrogate, which UTF-8 does not have, a question mark is left."""
    file.write_text(page, "utf-8", errors="replace")


def whole_page(title: str, sections: Iterable[str], figures: Figures, has_pictures: bool = False) -> str:
    """A page of sections, with the charts that stand in them."""
    scripts = (page_file("uplot/uPlot.iife.min.js"), page_file("draw.js"), page_file("browse.js"))
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; img-src data:" if has_pictures else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{page_file('uplot/uPlot.min.css')}{STYLE}{MEDIA_STYLE}{BROWSE_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<noscript><p>The charts of this page need JavaScript; it fetches nothing.</p></noscript>{''.join(sections)}"
        f'<script type="application/json" id="charts">{figures.data()}</script>'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


@cache
def page_file(name: str) -> str:
    """Returns a file that pages hold: a script, or a style."""
    return files("raysvc.report").joinpath(name).read_text()


def _digest(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()


def _lengths(facts: Facts, figures: Figures) -> str:
    charts = figures.place(
        histogram("Tokens per row", "tokens", facts.lengths),
        histogram("Share of a row's tokens that has loss", "share", facts.trained, bins=20),
    )
    return f"<h2>Lengths</h2><div class='grid2'>{charts}</div>"


def _row_counts(facts: Facts) -> str:
    row_counts = facts.row_counts
    rows = {"rows in": row_counts["rows_in"], "rows written": row_counts["rows_written"]}
    rows["of these truncated"] = row_counts.get("rows_truncated", 0)
    rows |= {f"dropped: {name}": count for name, count in row_counts["dropped"].items()}
    rows |= {f"quarantined: {name}": count for name, count in row_counts["quarantined"].items()}
    if removed := row_counts.get("reasoning_removed", 0):
        rows["trained messages without their reasoning"] = removed
    if endless := row_counts.get("turns_without_end", 0):
        rows["trained turns without an end"] = endless
    notes = "".join(f"<p>Note: {escape(warning)}.</p>" for warning in warnings_of(row_counts))
    tokens = {name: row_counts[f"tokens_{name}"] for name in ("rendered", "trained", "context", "truncated")}
    return (
        "<h2>Row counts</h2><p>Rows in = written + dropped + quarantined; tokens rendered = trained + context + truncated."
        f"</p><div class='grid2'><div class='card'>{table(rows)}</div><div class='card'>{table(tokens)}</div></div>"
        f"{notes}"
    )


def _plan(plan: PlanReport, dp_size: int, figures: Figures) -> str:
    rows = [(float(start), float(stop), float(count)) for start, stop, count in plan.histogram]
    chart = figures.place(bars("Steps by their tokens", "tokens per step", rows, "steps"))
    return (
        f"<h2>Plan for {how_many(dp_size, 'rank')}</h2><div class='grid2'><div class='card'>{table(in_words(plan))}</div>"
        f"{chart}</div>"
    )


def _whole_run(facts: Facts, figures: Figures) -> str:
    """Does what `_run` does.

    Raises:
        StateMismatch: the logs of the run are not what was written.
    """
    try:
        return _run(facts, figures)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        where = f"{facts.run_dir}: metrics.jsonl, evals.jsonl or summary.json"
        remedy = "restore it, or give another trainer.run_dir for a report without a run"
        raise StateMismatch(where, f"holds what no run writes ({error})", remedy) from error


def _run(facts: Facts, figures: Figures) -> str:
    charts = charts_over_steps(figures, run_charts(facts.steps, facts.evals))
    return f"<h2>Run</h2>{_headline(facts)}{charts}{_verdict(facts)}"


def charts_over_steps(figures: Figures, charts: Iterable[Chart]) -> str:
    """Charts of runs, with controls that smooth all their lines and set their axes."""
    how = "Values under the pointer stand below each chart. Drag to zoom in, double-click to zoom out."
    smooth = "An average of a value and all before it, of which each counts this much of the next one. The values themselves stay, faint; of a run of thousands of steps the highest and lowest are drawn, and averaged."
    log = "For charts whose values are positive, and the largest more than four times the smallest."
    return (
        f"<p>{how}</p><p class='tools' id='tools' hidden>"
        f"<label title='{smooth}'>Smoothing <input type='range' id='smooth' min='0' max='0.99' step='0.01' value='0'> <output id='smoothed'>0</output></label>"
        f"<label title='{log}'><input type='checkbox' id='log'> logarithmic axis</label></p>"
        f"<div class='grid2'>{figures.place(*charts)}</div>"
    )


def _job(job: Mapping[str, Any]) -> str:
    told = {key: value if isinstance(value, str) else json.dumps(value) for key, value in job.items()}
    lines = len(told)
    return (
        f"<details class='card'><summary>Job: the {how_many(lines, 'field')} that it gives, without credentials</summary>"
        f"{table(told)}</details>"
    )


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in decisions:
        shares = ", ".join(f"{name} {weight:g}" for name, weight in (one["weights"] or {}).items())
        left_out = one["skip_rows"]
        named = ", ".join(map(written, left_out[:8])) + (", …" if len(left_out) > 8 else "")
        rows.append(
            {
                "from step": one["step"],
                "weights": shares,
                "rows left out": f"{len(left_out):,}: {named}" if left_out else "",
            }
        )
    return f"<h2>Decisions</h2>{records(rows, tuple(rows[0]))}"


def _headline(facts: Facts) -> str:
    summary, newest = facts.summary, f"{newest_rate(facts.steps):,.0f}"
    if summary is None:
        return f"<p>The run has not ended yet. Its last steps train {newest} tokens a second.</p>"
    best = f"loss best (step {summary['loss_best_step']})" if "loss_best_step" in summary else ""
    count = count_of(summary)
    names = {
        "steps": "steps", count.unit: count.unit, "tokens_trained": "trained tokens", "loss_first": "loss first", "loss_last": "loss last",
        **({"loss_best": best} if best else {}), "tokens_per_s": "trained tokens/s",
    }  # fmt: skip
    told = {said: four_digits(summary[name]) for name, said in names.items()}
    told[f"trained tokens/s, last {how_many(min(20, len(facts.steps)), 'step')}"] = newest
    told["waited for data"] = f"{summary['stall_fraction']:.2%}"
    cells = [
        f"<div class='card'><strong>{value}</strong>{escape(said)}</div>" for said, value in told.items()
    ]
    lines = "".join(f"<p>{escape(line)}</p>" for line in (*_of_untrained(summary), *_of_evals(summary)))
    return f"<div class='big'>{''.join(cells)}</div>{lines}"


def _of_untrained(summary: Mapping[str, Any]) -> Iterable[str]:
    """Says which rows of the entry no step trained."""
    if told := untrained_text(summary.get("left_out", {})):
        yield f"Not trained: {', '.join(told)}."


def _of_evals(summary: Mapping[str, Any]) -> Iterable[str]:
    """Says what the last evals said, and what they decided."""
    for name, line in summary.get("evals", {}).items():
        said = {metric: line.get(metric) for metric in SHOWN}
        if said["loss"] is not None:
            told = ", ".join(
                f"{metric} {four_digits(value)}" for metric, value in said.items() if value is not None
            )
            yield f"Eval {name}: {told} on {count_of(line)} at the end."
    if best := summary.get("best"):
        value = f"{best['metric']} {four_digits(best['value'])}"
        yield f"The best model is that of {how_many(best['steps'], 'step')}: eval {best['eval']} had {value}."
    if stopped := summary.get("stopped_early"):
        yield f"Stopped early, after {how_many(stopped['without'], 'eval')} of {stopped['eval']} without progress."


def _verdict(facts: Facts) -> str:
    worst = worst_stalls(facts.steps)
    if not worst:
        return "<p>No step waited for data.</p>"
    rows = [
        {"step": s["step"], "waited ms": round(s["stall_s"] * 1e3, 1), "of ms": round(s["step_s"] * 1e3, 1)}
        for s in worst
    ]
    stalls = (facts.summary or {}).get("stalls", {})
    why = {cause: f"{seconds:.2f} s" for cause, seconds in stalls.get("by_cause", {}).items()}
    lines = "".join(f"<p>{escape(line)}</p>" for line in stalls.get("last", ())[-5:])
    return (
        f"<h2>Longest waits</h2><div class='grid2'><div class='card'>{records(rows, tuple(rows[0]))}</div>"
        f"<div class='card'>{table(why)}{lines}</div></div>"
    )


def four_digits(value: float) -> str:
    """A figure that is compared with others: losses with four digits."""
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    )


def table(rows: Mapping[str, Any]) -> str:
    """Names and values."""
    cells = (
        f"<tr><td>{escape(str(name))}</td><td class='n'>{_figure(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def records(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Lines of a table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(row.get(name, '')))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape("–" if value is None else str(value))
    return f"{value:,}" if isinstance(value, int) else short(value)
