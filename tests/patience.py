"""Ray on a busy machine: a node that a test starts has minutes to be up, and a server may end before it is stopped."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

WITHIN_S = 200.0


def wait_longer_for_nodes() -> None:
    """Ask again for a node that this process starts from now on, until the cluster knows it."""
    from ray._private import services

    if hasattr(services.get_node, "asks_again"):
        return
    get_node = services.get_node

    def get_node_at_last(*arguments: Any) -> Any:
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # how Ray says that the cluster does not know it yet
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    get_node_at_last.asks_again = True  # type: ignore[attr-defined]
    services.get_node = get_node_at_last


def end_servers(names: Iterable[str]) -> None:
    """Stop those of some servers that still run; one of them may end by itself meanwhile."""
    from raysvc.actors.launch import server_names, stop_server
    from raysvc.errors import ServerError

    for name in set(names) & set(server_names()):
        try:
            stop_server(name)
        except ServerError:
            assert name not in server_names()
