"""A client and a server say which version they are, before the client takes anything."""

from __future__ import annotations

from typing import Any

from raysvc.errors import VersionMismatch
from raysvc.team import refuse_foreign
from raysvc.versions import HERE, Side, check_versions_meet

BEFORE = "an older version, which does not say"


def meet(server: Any, name: str) -> None:
    """Exchange versions with a server; each side judges by its own rule.

    Raises:
        VersionMismatch: they do not work together.
    """
    from raysvc.actors.launch import wait_for

    if not hasattr(server, "meet"):
        raise VersionMismatch(name, HERE.version, BEFORE)
    ref = server.meet.options(concurrency_group="control").remote(*HERE)
    check_versions_meet(name, HERE, Side(*wait_for(ref, f"server {name!r}")))


def refuse_takeover_of_foreign(server: Any, name: str) -> None:
    """Refuse to fence the trainer of a server that somebody else started.

    Raises:
        ServerError: it is somebody else's.
    """
    from raysvc.actors.launch import wait_for

    facts = wait_for(server.stats.options(concurrency_group="control").remote(), f"server {name!r}")
    refuse_foreign(name, facts.get("owner", ""), 'takeover="force"')
