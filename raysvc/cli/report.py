"""`raysvc report`: one HTML page about a job's entry, plan and run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.named_entry import named_entry
from raysvc.cli.named_run import further_runs, job_that_ran, served_run, show_command
from raysvc.cli.replay import Tokenizer, decoder
from raysvc.cli.view import View, print_rows

Html = Annotated[Path, typer.Option("--out", help="File to write.")]


def _compare(config: object, others: list[str], words: list[str] | None, html: Path, as_json: bool) -> None:
    """Several runs on one page, and their figures in the terminal.

    Raises:
        ConfigError: the first is not a run that trained, or a key is given too.
    """
    from raysvc.errors import ConfigError
    from raysvc.job.config import JobConfig
    from raysvc.report.compare import (
        fields_that_differ,
        figures_of,
        read_runs,
        render_comparison,
        rows_in_words,
    )
    from raysvc.report.page import write_page

    if not isinstance(config, JobConfig):
        what = "is compared with what is not a run of raysvc train"
        raise ConfigError(others[0], what, "name the folders of two such runs")
    for word in (word for word in words or () if not further_runs([word])):
        raise ConfigError(word, "changes a job, and runs are compared as they ran", "leave it out")
    runs = read_runs([config.run_dir, *others])
    html.parent.mkdir(parents=True, exist_ok=True)
    write_page(html, render_comparison(runs))
    figures, fields = figures_of(runs), fields_that_differ(runs)
    if as_json:
        emit({"html": str(html), "figures": figures, "fields": fields, "rows": rows_in_words(runs)})
        return
    print_rows("Runs", figures)
    print_rows("Fields that differ", fields)
    print(rows_in_words(runs))
    print(f"report: {html}")


@edge
def report(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    html: Html = Path("report.html"),
    tokenizer: Tokenizer = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Write a report of data, plan and run as one HTML page.

    Lengths, masks, row counts and plan; after a run, its curves too; of a run of rollouts, rewards, staleness and turns. Of two runs or more
    it compares losses, rows, waits and jobs. The page needs no other file.

    Example: raysvc report job.yaml --out report.html

    Example: raysvc report runs/grpo-1

    Example: raysvc report runs/sft-1 runs/sft-2 --out both.html
    """
    from raysvc.errors import ConfigError
    from raysvc.report.facts import gather
    from raysvc.report.page import render, write_page

    if others := further_runs(overrides):
        _compare(config, others, overrides, html, as_json)
        return
    run = served_run(config, overrides)
    if run is None and tokenizer is not None:
        raise ConfigError("--tokenizer", "is for runs of rollouts, and a job names its own", "leave it out")
    named = None if run is not None else job_that_ran(config, overrides)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.open("a").close()  # what cannot be written is said before the rows are read
    if named is None:
        from raysvc.inspect.rollout_run import open_run
        from raysvc.report.rollouts_page import render_rollouts

        write_page(html, render_rollouts(open_run(str(run)), decoder(tokenizer)))
    else:
        with View() as view:
            entry = named_entry(named, address, view)
        write_page(html, render(gather(named.job, entry, show_command(named, config, overrides))))
    if as_json:
        emit({"html": str(html)})
    else:
        print(f"report: {html}")
