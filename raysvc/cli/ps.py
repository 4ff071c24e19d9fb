"""`raysvc ps`: the batch servers of a cluster."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from raysvc.cli.common import Address, AsJson, edge, emit


@edge
def ps(address: Address = None, as_json: AsJson = False) -> None:
    """List the servers of a cluster: who holds each, and how far it is.

    Example: raysvc ps --address auto
    """
    from raysvc.servers import join_cluster, list_servers

    join_cluster(address)
    servers = list_servers()
    if as_json:
        emit({"servers": servers})
        return
    table = Table("name", "step", "holder", "held", "pid", "up", "memory")
    for facts in servers:
        table.add_row(*_cells(facts))
    Console().print(table if servers else "no servers")


def _cells(facts: dict[str, Any]) -> list[str]:
    if facts["state"] == "silent":
        return [facts["name"], "", f"does not answer ({facts['cause']})", "", "", "", ""]
    held = f"{facts['since_s']:.0f} s" if facts["holder"] else ""
    step = f"{facts['frontier']} of {facts['num_steps']}"
    return [
        facts["name"], step, facts["holder"] or "", held, str(facts["pid"]), f"{facts['up_s']:.0f} s",
        f"{facts['rss_bytes'] >> 20} MB",
    ]  # fmt: skip
