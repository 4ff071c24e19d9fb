"""`raysvc ps`: the batch servers of a cluster."""

from __future__ import annotations

from typing import Any

from raysvc.cli.common import Address, AsJson, edge, emit
from raysvc.cli.view import print_rows


@edge
def ps(address: Address = None, as_json: AsJson = False) -> None:
    """List the servers of a cluster, their trainers and progress; without an address those of all your runs on this machine.

    Example: raysvc ps --address auto
    """
    from raysvc.inspect.clusters import looking

    with looking(address) as look:
        servers = (look() or {}).get("servers", [])
    if as_json:
        emit({"servers": servers})
        return
    print_rows("Servers", [_cells(facts) for facts in servers])


def _cells(facts: dict[str, Any]) -> dict[str, Any]:
    if facts["state"] == "silent":
        names = ("owner", "step", "holder", "held", "stall", "version", "pid", "up", "memory")
        return {"name": facts["name"], **dict.fromkeys(names, ""), "holder": f"silent ({facts['cause']})"}
    return {
        "name": facts["name"],
        "owner": facts.get("owner", ""),
        "step": _step(facts),
        "holder": facts["holder"] or "",
        "held": _held(facts),
        "stall": _stall(facts),
        "version": facts.get("version", ""),
        "pid": str(facts["pid"]),
        "up": f"{facts['up_s']:.0f} s",
        "memory": f"{facts['rss_bytes'] >> 20} MB",
    }


def _step(facts: dict[str, Any]) -> str:
    end = facts["num_steps"]
    return str(facts["frontier"]) if end is None else f"{facts['frontier']} of {end}"


def _held(facts: dict[str, Any]) -> str:
    if facts["state"] == "lapsed":
        return f"silent for {facts['seen_s']:.0f} s"
    return f"{facts['since_s']:.0f} s" if facts["holder"] else ""


def _stall(facts: dict[str, Any]) -> str:
    """Share of its last 30 seconds in which a living trainer waited for data."""
    told = facts.get("trainer") if facts["state"] == "held" else None
    return f"{told['stall']:.1%}" if told and "stall" in told else ""
