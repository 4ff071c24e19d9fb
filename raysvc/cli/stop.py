"""`raysvc stop`: end a batch server."""

from __future__ import annotations

from typing import Annotated

import typer

from raysvc.cli.common import Address, AsJson, edge, emit

Name = Annotated[str, typer.Argument(help="Of the server; `raysvc ps` lists them.")]
Force = Annotated[bool, typer.Option("--force", help="End it even when a living trainer holds it.")]


@edge
def stop(
    name: Name,
    force: Force = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """End a server. How far its trainer came stays in the run folder.

    Example: raysvc stop sft-1
    """
    from raysvc.inspect import servers

    servers.join_cluster(address)
    servers.stop(name, force=force)
    if as_json:
        emit({"stopped": [name]})
        return
    print(f"stopped {name}")
