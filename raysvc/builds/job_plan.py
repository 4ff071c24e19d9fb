"""Defines what of a job decides its plan.

Always true:
- `plan_of` is the plan that the job's server follows;
- what balances ranks comes from the model that is trained, unless the job says otherwise; it moves rows between ranks, never
  between steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.builds.mixed_job import shuffles_of, stages_of
from raysvc.cache.key import ADDED
from raysvc.collate.plan_report import PlanReport, plan_report
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.collate.text_columns import of_fixed_width, text_widths
from raysvc.errors import ConfigError
from raysvc.evals.held_rows import evaluated_rows, held_counts, held_out, trained_rows
from raysvc.job.config import RowsConfig
from raysvc.job.objectives.units import UNITS
from raysvc.plan.cost import CostModel
from raysvc.plan.entry_plan import plan_of_entries

COMPUTED = ("ref_logprobs", "teacher_ids", "teacher_logprobs")  # columns that a job may be given later
OWN = {  # columns that a format gives its rows
    "preference": {"chosen": {"pad": 0}},
    "kto": {"label": {"pad": 0}, "mismatched": {"pad": 0}},
    "stepwise": {"step_labels": {"pad": -1}},
}

if TYPE_CHECKING:
    import numpy.typing as npt

    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig, PlanConfig
    from raysvc.plan.plan import Plan
    from raysvc.plan.plan_rows import Int32s
    from raysvc.ragged import Int64s


def plan_of(job: JobConfig, entry: CacheEntry) -> Plan:
    """The plan that the job's server would follow."""
    entries = entry.entries
    return plan_of_entries(plan_config(job, entry), entries, stages_of(job, entries), shuffles_of(job))


def report_of(job: JobConfig, entry: CacheEntry) -> PlanReport:
    """The report of the job's plan, with the bytes that its server will send."""
    plan = plan_of(job, entry)
    widths = text_widths(entry.entries, plan.config.columns)
    column_bytes = ColumnBytes.of(
        of_fixed_width(entry.rows.read(np.array([entry.rows.first_row()])), widths), plan.config
    )
    report = plan_report(
        plan, job.trainer.dp_size, column_bytes, look_ahead_steps=job.server.look_ahead_steps
    )
    held = held_counts(job, entry.entries)
    unit = UNITS.get(str(entry.entries[0].recipe.get("format")), report.unit)
    return replace(report, held_rows=held.rows, held_groups=held.groups, unit=unit)


def untrained_rows(job: JobConfig, entry: CacheEntry, rows: Int64s, lengths: Int32s) -> dict[int, str]:
    """Row -> why no step of the job's plan trains it; of `tail: drop`, windows of tokens and pairs over the budget nothing is told.

    Args:
        rows: int64 [N], ids of rows of the entry.
        lengths: int32 [N], their tokens.
    """
    chosen, held = job.plan.rows or RowsConfig(), held_out(job)
    reasons: list[tuple[str, npt.NDArray[np.bool_]]] = []
    plan = plan_of(job, entry)
    if (
        job.plan.oversize == "drop"
        and plan.rules.tokens is not None
        and not plan.rows.are_pairs
        and plan.windows is None
    ):
        reasons.append(
            (f"longer than the {plan.rules.tokens:,} tokens of a micro-batch", lengths > plan.rules.tokens)
        )
    reasons.append(("in plan.skip_rows", np.isin(rows, np.array(job.plan.skip_rows, np.int64))))
    if chosen.include is not None:
        reasons.append(("not in plan.rows", ~np.isin(rows, np.array(chosen.include, np.int64))))
    reasons.append(("excluded by plan.rows", np.isin(rows, np.array(chosen.exclude, np.int64))))
    if held is not None:
        reasons.append(
            (f"held out for the eval {held.name}", np.isin(rows, evaluated_rows(job, entry.entries)))
        )
    return {int(rows[at]): why for why, there in reasons for at in np.flatnonzero(there)}


def plan_config(job: JobConfig, entry: CacheEntry | None = None) -> PlanConfig:
    """Section `plan` with what follows from the rest: the cost of a row where the model's own `config.json` tells it, the
    columns that the rows carry, their pads, and the rows that an eval holds out.

    Raises:
        ConfigError: a column that some sources of a mixture carry and others do not, or carry otherwise; a pad of no column.
        PlanError: an eval holds out nothing, or all rows of a source.
    """
    plan, carried = job.plan, {} if entry is None else _carried(entry)
    pads = {name: column["pad"] for name, column in carried.items()}
    update: dict[str, Any] = {"pad_values": {**pads, **plan.pad_values}}
    if entry is not None:
        update["rows"] = trained_rows(job, entry.entries)
    if "columns" not in plan.model_fields_set:
        update["columns"] = tuple(dict.fromkeys([*plan.columns, *carried]))
    known_names = {*update.get("columns", plan.columns), *carried, *COMPUTED}
    if entry is not None and (unknown := sorted(plan.pad_values.keys() - known_names)):
        what = f"{unknown[0]!r} is not a column of this job"
        raise ConfigError("plan.pad_values", what, f"known are {', '.join(sorted(known_names))}")
    known = _model_config(Path(job.trainer.model).expanduser() / "config.json")
    if plan.cost is None and known is not None:
        cost = CostModel.of_model(known)
        update["cost"] = (cost.linear, cost.quadratic)
    return plan.model_copy(update=update)


def _carried(entry: CacheEntry) -> dict[str, Any]:
    """Name -> what the recipe says of a carried or computed column."""
    recipes = [one.recipe for one in entry.entries]
    each = [declared_columns(recipe) for recipe in recipes]
    carried = {name: column for its in each for name, column in its.items()}
    for name in carried:
        if not all(name in its for its in each):
            what = f"{name!r} is carried by {sum(name in its for its in each)} of {len(each)} sources"
            raise ConfigError("mixture", what, "carry it in all of them, or in none")
        for key, all_of_them in (("dtype", "one dtype"), ("pad", "one pad")):
            found = dict.fromkeys(str(its[name].get(key)) for its in each)
            if len(found) > 1:
                what = f"the {key} of {name!r} is {' and '.join(found)} in different sources"
                raise ConfigError("mixture", what, f"give source.carry {all_of_them} for it in all of them")
    formats = {str(recipe.get("format")) for recipe in recipes}
    return {**(OWN.get(formats.pop(), {}) if len(formats) == 1 else {}), **carried}


def declared_columns(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> what a recipe says of a column that its rows carry, of their source or of a model."""
    return {
        **recipe.get("carry", {}),
        **{name: column for added in recipe.get(ADDED, ()) for name, column in added["columns"].items()},
    }


def _model_config(path: Path) -> dict[str, Any] | None:
    """A `transformers` model config of a decoder, or of that of a vision model; None when there is none, or one of another kind."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict):
        return None
    inner = known.get("text_config")
    known = inner if isinstance(inner, dict) else known
    sizes = (known.get(name) for name in ("hidden_size", "num_hidden_layers"))
    return known if all(isinstance(size, int) for size in sizes) else None
