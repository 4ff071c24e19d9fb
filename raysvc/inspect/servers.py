"""The servers of a cluster, for display: list them, end one.

Always true:
- a server that a living trainer holds, or that another owner started, is not ended unless it is forced;
- an actor that does not answer in time is listed all the same.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from raysvc.errors import AddressError, ServerError
from raysvc.nodes import own_rays
from raysvc.team import refuse_foreign

log = logging.getLogger(__name__)
ANSWER_TIMEOUT_S = 5.0


def join_cluster(address: str | None, *, lasting: bool = False) -> None:
    """Connect to a cluster that is there: the address, RAY_ADDRESS, the newest of this user's own runs, or one on this machine.
    Starts none.

    Args:
        lasting: one that does not end with a run.

    Raises:
        AddressError: there is none that answers.
    """
    from raysvc.cluster import connect

    named = address or os.environ.get("RAY_ADDRESS")
    if is_joined():
        return
    if named or lasting:
        connect(named or "auto")
        return
    own = own_rays.living()
    if len(own) > 1:
        others = " or ".join(one.address for one in own[1:])
        log.warning(
            "this is the newest of %d runs of yours; --address %s is of another one", len(own), others
        )
    found = own[0] if own else own_rays.found_by_ray()
    if found is None:
        what = "no run of yours has one on this machine, and no other one answers within 5 seconds"
        remedy = "start one with `ray start --head`, or name yours with --address host:port or RAY_ADDRESS"
        raise AddressError("Ray", what, remedy)
    connect(own_rays.enter(found))


def is_joined() -> bool:
    """Returns whether this process is connected to Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


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
