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
    """Watch the servers of a cluster, live, until it ends.

    Trainer, versions, step, rates, stalls, look-ahead, rollouts, memory, lease and node of each.

    Example: raysvc top --address auto --interval 5
    """
    from raysvc.cluster import ending_with
    from raysvc.inspect.servers import join_cluster

    join_cluster(address)
    import ray  # not before: it reads how to sign in when it is imported

    with ending_with(ray.get_runtime_context().gcs_address, code=1 if as_json else 0):
        if web:
            _serve(port)
        elif as_json:
            *_, (_, last) = _looks(interval, count or 2)
            emit({"servers": [asdict(line) for line in last]})
        else:
            with suppress(KeyboardInterrupt):  # how one leaves it
                _show(interval, count)


def _serve(port: int) -> None:
    from raysvc.errors import ConfigError
    from raysvc.inspect.run_logs import RunLogs
    from raysvc.report.live_page import page_server

    try:
        server, url = page_server(partial(rows, RunLogs()), port)
    except OSError as error:
        raise ConfigError("--port", f"{port}: {error.strerror}", "give another one, or 0") from None
    print(url, flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


def rows(logs: RunLogs) -> dict[str, Any]:
    """Returns what the page shows: columns as text, and the charts of each run whose folder is here."""
    import ray

    from raysvc.inspect.live import cells_of
    from raysvc.pipelines.shared_build import builds_in_progress
    from raysvc.report.run_charts import run_charts

    ((servers, found),) = _looks(0.0, 1, logs)
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    builds = [
        {
            "entry": build["entry"],
            "slices": f"{build['done']}/{build['slices']}",
            "node": address.get(build["node"], "-"),
        }
        for build in builds_in_progress()
    ]
    charts, reports = {}, {}
    for facts in servers:
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


def _show(interval: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    from raysvc.inspect.live import text

    console = Console()
    if not console.is_terminal:
        for _, found in _looks(interval, count):
            print("\n".join(text(line) for line in found) or "no servers", flush=True)
        return
    with Live(console=console, screen=False, auto_refresh=False) as live:
        for _, found in _looks(interval, count):
            live.update(_table(found, console.width), refresh=True)


def _looks(
    interval: float, count: int | None, logs: RunLogs | None = None
) -> Iterator[tuple[list[dict[str, Any]], list[Line]]]:
    """Looks at the servers again and again: gives their facts, and a line of each."""
    import ray

    from raysvc.inspect.live import Snapshot, lines
    from raysvc.inspect.run_logs import RunLogs
    from raysvc.inspect.servers import list_servers

    logs = logs or RunLogs()
    before: Snapshot | None = None
    done = 0
    while True:
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        servers = [{**facts, "node": address.get(facts.get("node", ""))} for facts in list_servers()]
        for facts in servers:
            facts["loss"] = next((line["loss"] for line in reversed(logs.of(facts).steps)), None)
        now = Snapshot(time.monotonic(), servers)
        yield servers, lines(now, before)
        before, done = now, done + 1
        if done == count:
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
