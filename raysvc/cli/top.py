"""`raysvc top`: all servers of a cluster, live."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import Address, AsJson, edge, emit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raysvc.inspect.clusters import Facts, Look
    from raysvc.inspect.live import Line, Snapshot
    from raysvc.inspect.run_logs import RunLogs

Interval = Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.1)]
Web = Annotated[bool, typer.Option("--web", help="Serve a live web page on this machine instead.")]
Port = Annotated[int, typer.Option(help="Port of the page; 0 picks a free one.", min=0, max=65535)]
Count = Annotated[int | None, typer.Option(help="Number of refreshes. Default: until Ctrl-C.", min=1)]


@edge
def top(
    address: Address = None,
    interval: Interval = 2.0,
    count: Count = None,
    web: Web = False,
    port: Port = 0,
    as_json: AsJson = False,
) -> None:
    """Watch the servers of a cluster, live, until it ends; without an address those of all your runs on this machine.

    Trainer, versions, step, rates, stalls, look-ahead, rollouts, memory, lease and node of each.

    Example: raysvc top --address auto --interval 5
    """
    from raysvc.inspect.clusters import looking

    with looking(address, code=1 if as_json else 0) as look:
        if web:
            _serve(look, port)
        elif as_json:
            *_, (_, last) = _looks(look, interval, count or 2)
            emit({"servers": [asdict(line) for line in last]})
        else:
            with suppress(KeyboardInterrupt):  # how one leaves it
                _show(look, interval, count)


def _serve(look: Look, port: int) -> None:
    from raysvc.errors import ConfigError
    from raysvc.inspect.run_logs import RunLogs
    from raysvc.report.live_page import page_server

    try:
        server, url = page_server(partial(rows, look, RunLogs()), port)
    except OSError as error:
        raise ConfigError("--port", f"{port}: {error.strerror}", "give another one, or 0") from None
    print(url, flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


def rows(look: Look, logs: RunLogs) -> dict[str, Any]:
    """Returns what the page shows: columns as text, and the charts of each run whose folder is here."""
    from raysvc.inspect.live import cells_of
    from raysvc.report.run_charts import run_charts

    ((all_facts, found),) = _looks(look, 0.0, 1, logs)
    builds = [
        {"entry": one["entry"], "slices": f"{one['done']}/{one['slices']}", "node": one["node"] or "-"}
        for one in all_facts["builds"]
    ]
    charts, reports = {}, {}
    for facts in all_facts["servers"]:
        lines = logs.of(facts)
        if lines.steps:
            charts[facts["name"]] = [chart.to_json() for chart in run_charts(lines.steps, lines.evals)]
            reports[facts["name"]] = f"raysvc report {shlex.quote(str(Path(facts['journal']).parent))}"
    return {
        "servers": [cells_of(line) for line in found],
        "builds": builds,
        "charts": charts,
        "reports": reports,
    }


def _show(look: Look, interval: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    from raysvc.inspect.live import text

    console = Console()
    if not console.is_terminal:
        for _, found in _looks(look, interval, count):
            print("\n".join(text(line) for line in found) or "no servers", flush=True)
        return
    with Live(console=console, screen=False, auto_refresh=False) as live:
        for _, found in _looks(look, interval, count):
            live.update(_table(found, console.width), refresh=True)


def _looks(
    look: Look, interval: float, count: int | None, logs: RunLogs | None = None
) -> Iterator[tuple[Facts, list[Line]]]:
    """Looks again and again, until nothing is left: gives what was seen, and a line of each server."""
    from raysvc.inspect.live import Snapshot, lines
    from raysvc.inspect.run_logs import RunLogs

    logs = logs or RunLogs()
    before: Snapshot | None = None
    done = 0
    while True:
        seen = look()
        found = seen or {"servers": [], "builds": []}
        for facts in found["servers"]:
            facts["loss"] = next((line["loss"] for line in reversed(logs.of(facts).steps)), None)
        now = Snapshot(time.monotonic(), found["servers"])
        yield found, lines(now, before)
        before, done = now, done + 1
        if done == count or seen is None:
            return
        time.sleep(interval)


def _table(found: Sequence[Line], width: int) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from raysvc.inspect.live import cells_of, fitted

    if not found:
        return "no servers"
    rows = [cells_of(line) for line in found]
    fit = fitted(rows, width)
    table = Table()
    for name in fit.columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in fit.columns))
    under = [
        Padding(Text(f"{row['server']}: {text}"), (0, 2))
        for row, text in zip(rows, fit.under, strict=True)
        if text
    ]
    return Group(table, *under)
