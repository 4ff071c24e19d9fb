"""`raysvc show`: one row as a person wants to see it, trained tokens coloured."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from raysvc.cli.common import Address, AsJson, Job, Overrides, Verbose, edge, emit
from raysvc.cli.view import View

RowNumber = Annotated[int, typer.Option(help="Row of the entry, 0-based.", min=0)]
TRAINED = "bold green"
CONTEXT = "dim"


@edge
def show(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    row: RowNumber = 0,
    address: Address = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Print a row's text; trained tokens are green and stand between » and «.

    Example: raysvc show -c job.yaml --row 17
    """
    from raysvc import api
    from raysvc.errors import EntryError
    from raysvc.jobfile import load_job

    job = load_job(config, overrides or ())
    with View() as view:
        entry = api.tokenize(job, address=address, progress=view)
    if row >= entry.num_rows:
        raise EntryError("--row", f"{row} is not below the {entry.num_rows} rows", "give a smaller one")
    spans = entry.spans(row)
    if as_json:
        emit(
            {"row": row, "source_row": entry.row(row)["source_row"], "spans": [list(span) for span in spans]}
        )
        return
    text = Text()
    for words, trained in spans:
        text.append(f"»{words}«" if trained else words, style=TRAINED if trained else CONTEXT)
    count = len(entry.row(row)["input_ids"])
    Console().print(text, soft_wrap=True)
    print(f"\nrow {row} of {entry.num_rows}, source row {entry.row(row)['source_row']}, {count} tokens")
