"""A run of rollouts as one HTML page: rewards, lengths, staleness and turns by step, and what was lost, with reasons.

Axes: N steps.
Always true:
- every figure is of the groups of the run folder, as `raysvc show` says them of a step;
- what `raysvc.report.page` says of its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from raysvc.report.charts import Chart
from raysvc.report.page import Figures, charts_over_steps, records, table, whole_page

if TYPE_CHECKING:
    from raysvc.inspect.rollout_run import RolloutRun, RolloutStep

FIRST = ("reward", "length", "trained_tokens", "staleness")  # the order of charts; other columns follow
NAMED = 50  # lost prompts


def render_rollouts(run: RolloutRun, text_of: Callable[[Sequence[int]], str]) -> str:
    """The whole page; `text_of` shows ids."""
    figures, steps, lines = Figures(), [], []
    groups = rows = 0
    broken: list[dict[str, object]] = []
    for step in run.each_step():
        steps.append(step.step)
        lines.append(_line(step))
        groups += len(step.groups)
        rows += sum(len(each.facts.is_last) for each in step.groups)
        broken += [
            {
                "step": step.step,
                "group": f"{uid}#{attempt}",
                "row": prefix.later,
                "continues": prefix.earlier,
                "up to token": prefix.at,
                "which was": text_of(prefix.sampled[:1]),
                "and is": text_of(prefix.found[:1]),
                "sampled": text_of(prefix.sampled),
                "found": text_of(prefix.found),
            }
            for (uid, attempt), prefix in islice(step.broken, NAMED - len(broken))
        ]
    turns = {name: int(sum(line[name] for line in lines)) for name in ("merged", "apart", "broken")}
    overview = {
        "steps": len(steps),
        "groups": groups,
        "rows": rows,
        **{f"turns {n}": c for n, c in turns.items()},
    }
    charts = charts_over_steps(figures, _charts(steps, lines))
    sections = [
        table(overview),
        f"<h2>Steps</h2>{charts}" if steps else "",
        f"<h2>Broken turns</h2>{_broken(broken)}" if broken else "",
        f"<h2>Lost</h2>{_lost(run)}",
    ]
    return whole_page(f"{run.name}: rollouts", sections, figures)


def _line(step: RolloutStep) -> dict[str, float]:
    facts = step.facts
    return {**({} if facts is None else facts.metrics()), **step.turns}


def _charts(steps: list[int], lines: list[dict[str, float]]) -> Iterable[Chart]:
    there = {name.removesuffix("_mean") for line in lines for name in line if name.endswith("_mean")}
    for column in (*(name for name in FIRST if name in there), *sorted(there.difference(FIRST))):
        series = {
            which: [line.get(f"{column}_{which}") for line in lines] for which in ("mean", "min", "max")
        }
        yield Chart(column, "step", steps, series)
    if any("reward_std" in line for line in lines):
        spread = ("reward_std", "frac_reward_zero_std")
        yield Chart(
            "Rewards within a group", "step", steps, {n: [line.get(n) for line in lines] for n in spread}
        )
    yield Chart(
        "Turns", "step", steps, {n: [line[n] for line in lines] for n in ("merged", "apart", "broken")}
    )


def _broken(broken: list[dict[str, object]]) -> str:
    return f"<p>Turns that do not begin with the tokens of the turn before.</p>{records(broken, tuple(broken[0]))}"


def _lost(run: RolloutRun) -> str:
    counts: Mapping[str, int] = run.lost()
    if not counts:
        return "<p>Nothing was lost.</p>"
    named = [{"prompt": uid, "reason": reason} for uid, reason in islice(run.lost_prompts().items(), NAMED)]
    return table(counts) + (records(named, ("prompt", "reason")) if named else "")
