"""Finds the server that a trainer attaches to, and checks what both ends of `attach` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from raysvc.client.arguments import (
    flag,
    integer,
    meet,
    optional_integer,
    optional_text,
    refuse_takeover_of_foreign,
    text,
)
from raysvc.client.look_ahead import Limit


def reach(
    call: str,
    name: str,
    takeover: bool | Literal["force"],
    reader: str,
    look_ahead_steps: int,
    look_ahead_bytes: int | None,
    address: str | None,
) -> tuple[Any, Limit]:
    """Returns the Ray handle of a server, and the limit of the look-ahead; arguments and errors as in `raysvc.attach`.

    Args:
        call: for errors.
    """
    from raysvc.actors.launch import find_server
    from raysvc.cluster import join_cluster

    text(f"{call}(name)", name)
    if takeover != "force":
        flag(f"{call}(takeover)", takeover)
    text(f"{call}(reader)", reader, empty=True)
    integer(f"{call}(look_ahead_steps)", look_ahead_steps, 0)
    optional_integer(f"{call}(look_ahead_bytes)", look_ahead_bytes, 0)
    optional_text(f"{call}(address)", address)
    join_cluster(address)
    server = find_server(name)
    meet(server, name)
    if takeover is True:
        refuse_takeover_of_foreign(server, name)
    return server, Limit(
        look_ahead_steps, _quarter_of_store() if look_ahead_bytes is None else look_ahead_bytes
    )


def check_columns(server: Any, name: str, columns: Sequence[str]) -> None:
    """Ask a server whether it has these columns.

    Raises:
        ConfigError: it lacks one.
    """
    from raysvc.actors.launch import wait_for

    if columns:
        check = server.check_columns.options(concurrency_group="control").remote(tuple(columns))
        wait_for(check, f"server {name!r}")


def _quarter_of_store() -> int | None:
    import ray

    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    return int(min(stores, default=0) // 4) or None
