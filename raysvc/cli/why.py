"""`raysvc why`: which rows moved the loss of a step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import AsJson, edge, emit
from raysvc.cli.named_run import run_folder
from raysvc.cli.row_text import print_picture, token_counts
from raysvc.cli.view import number, print_rows

if TYPE_CHECKING:
    from raysvc.inspect.why import Metric, Why, WhyRow

SHOWN = 5  # rows as text
Run = Annotated[str, typer.Argument(help="The folder of a run.", metavar="RUN")]
StepNumber = Annotated[
    int | None, typer.Option(help="The step, counted from 0. Default: that of the greatest spike.", min=0)
]
Spike = Annotated[
    str, typer.Option(help="Without --step, the metric whose spike is meant: loss or grad_norm.")
]


@edge
def why(run: Run, step: StepNumber = None, spike: Spike = "loss", as_json: AsJson = False) -> None:
    """Say which rows, sources and lengths moved the loss of a step.

    A row lifts the loss by what it costs above what targets of its source cost in the 50 steps before and after. `raysvc train`
    keeps the losses of rows; other loops report them with `report_rows`, and HF's Trainer with `row_losses = True`.

    Example: raysvc why runs/sft-1 --step 812

    Example: raysvc why runs/sft-1 --spike grad_norm
    """
    from raysvc.cache.store.open import absolute
    from raysvc.inspect import why as found_by

    folder = absolute(run_folder(run))
    at = step if step is not None else found_by.spike_of(folder, _metric(spike))
    found, entry = found_by.why(folder, at)
    if as_json:
        emit(asdict(found))
        return
    _say(found)
    from rich.console import Console

    from raysvc.errors import TokenizerError
    from raysvc.inspect.row_view import row_picture
    from raysvc.row_ids import parse

    try:
        tokenizer = entry.tokenizer
    except TokenizerError:
        tokenizer = None  # ids are shown
    console = Console()
    for row in found.rows[:SHOWN]:
        values = entry.row(parse(row.row_id))
        picture = row_picture(parse(row.row_id), values["input_ids"], values["loss_mask"], tokenizer)
        head = (
            f"row {row.row_id}, source row {row.source_row}, {token_counts(picture)}, loss {number(row.loss)}"
        )
        print_picture(console, head, picture)


def _metric(name: str) -> Metric:
    from raysvc.errors import ConfigError
    from raysvc.inspect.why import METRICS

    for metric in METRICS:
        if metric == name:
            return metric
    raise ConfigError("--spike", f"{name!r} is not known", f"use one of: {', '.join(METRICS)}")


def _say(found: Why) -> None:
    around = (
        "no steps around it"
        if found.loss_around is None
        else f"{number(found.loss_around)} in the steps around"
    )
    print(f"step {found.step}: loss {number(found.loss)} a target, {around}")
    for name, (here, median) in found.metrics.items():
        print(f"{name} {number(here)}, median of the steps around {number(median)}")
    for title, groups in (("source", found.sources), ("tokens", found.lengths)):
        print()
        print_rows(title, [{title: one.name, "rows": one.rows, "targets": one.targets, "loss": number(one.loss),
                            "lifts the loss by": f"{one.lift:+.4f}"} for one in groups])  # fmt: skip
    print()
    print_rows("rows", [_cells(row) for row in found.rows[: 2 * SHOWN]])


def _cells(row: WhyRow) -> dict[str, Any]:
    before = ", ".join(f"{number(loss)} at step {step}" for step, loss in row.earlier[-3:])
    return {"row": row.row_id, "source": row.source, "source row": row.source_row, "tokens": row.tokens,
            "targets": row.targets, "loss": number(row.loss), "lifts the loss by": f"{row.lift:+.4f}", "before": before or "-"}  # fmt: skip
