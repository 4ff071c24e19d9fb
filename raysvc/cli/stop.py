"""`raysvc stop`: end a batch server."""

from __future__ import annotations

from typing import Annotated

import typer

from raysvc.cli.common import Address, AsJson, edge, emit

Name = Annotated[str, typer.Argument(help="Name of the server; `raysvc ps` lists them.")]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart", help="Start it again with the package now installed on its node; trainers continue."
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Stop it even while a trainer is attached, or when somebody else started it."
    ),
]


@edge
def stop(
    name: Name,
    force: Force = False,
    restart: Restart = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Stop a server, or restart it for an upgrade.

    The progress of its trainer stays in the run folder.

    Example: raysvc stop sft-1
    """
    from raysvc.cluster import join_cluster
    from raysvc.inspect import servers

    join_cluster(address)
    if restart:
        version = servers.restart(name, force=force)
        emit({"restarted": [name], "version": version}) if as_json else print(
            f"restarted {name}, raysvc {version}"
        )
        return
    servers.stop(name, force=force)
    if as_json:
        emit({"stopped": [name]})
        return
    print(f"stopped {name}")
