"""Ray on a busy machine: a node that a test starts has minutes to be up, where Ray itself gives it 30 seconds."""

from __future__ import annotations

import time
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
