"""The servers of a cluster, for display: list them, end one.

Always true:
- a server that a living trainer holds, or that another owner started, is not ended unless it is forced;
- an actor that does not answer in time is listed all the same.
"""

from __future__ import annotations

import logging
from typing import Any

from raysvc.errors import ServerError
from raysvc.team import refuse_foreign

log = logging.getLogger(__name__)
ANSWER_TIMEOUT_S = 5.0


def list_servers() -> list[dict[str, Any]]:
    """`BatchServer.stats` of every server by name; {"name", "state": "silent"} for one that does not answer."""
    import ray

    from raysvc.actors.launch import find_server, server_names

    names = server_names()
    asked = {}
    for name in names:
        try:
            asked[name] = find_server(name).stats.options(concurrency_group="control").remote()
        except ServerError:
            continue  # it ended just now
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_TIMEOUT_S) if asked else None
    return [_facts(name, ref) for name, ref in asked.items()]


def stop(name: str, *, force: bool = False) -> None:
    """End a server; its frontier stays in the run folder.

    Raises:
        ServerError: no such server, or `force` is False and a living trainer holds it, or it is another owner's.
    """
    from raysvc.actors.launch import find_server, stop_server, wait_for

    if not force:
        facts = wait_for(
            find_server(name).stats.options(concurrency_group="control").remote(), f"server {name!r}"
        )
        refuse_foreign(name, facts.get("owner", ""), "--force")
        for reader in facts["readers"].values():
            if reader["holder"] and reader["seen_s"] <= facts["lease_ttl_s"]:
                what = f"has been held by {reader['holder']} for {reader['since_s']:.0f} s"
                raise ServerError(f"server.name {name!r}", what, "stop that trainer first, or give --force")
    stop_server(name)


def restart(name: str, *, force: bool = False) -> str:
    """Have a server's process started again; returns the version of the package that runs now.

    Raises:
        ServerError: no such server, or it is another owner's and `force` is False.
    """
    from raysvc.actors.launch import find_server, restart_server, wait_for

    if not force:
        stats = find_server(name).stats.options(concurrency_group="control").remote()
        refuse_foreign(name, wait_for(stats, f"server {name!r}").get("owner", ""), "--force")
    return restart_server(name)


def _facts(name: str, ref: Any) -> dict[str, Any]:
    import ray

    try:
        facts: dict[str, Any] = ray.get(ref, timeout=0.1)
    except ray.exceptions.RayError as error:
        return {"name": name, "state": "silent", "cause": type(error).__name__}
    if facts["holder"] is None:
        state = "free"
    else:
        state = "held" if facts["seen_s"] <= facts["lease_ttl_s"] else "lapsed"
    return {**facts, "state": state}
