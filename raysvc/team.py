"""Names the namespace of a team and the owner of a server: a guard against accidents, not against people.

Always true:
- servers of different teams never meet: each team has a Ray namespace of its own;
- within a team, a server says who started it; who ends it or takes its lease over is asked to mean it, where that is another.
"""

from __future__ import annotations

import getpass
import os
import re

from raysvc.errors import ConfigError, ServerError

TEAM, OWNER = "RAYSVC_TEAM", "RAYSVC_OWNER"
NAMESPACE = "raysvc"  # of who names no team
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def ray_namespace() -> str:
    """The Ray namespace of this process's team: `raysvc`, or `raysvc.<RAYSVC_TEAM>`.

    Raises:
        ConfigError: the team's name is not a name.
    """
    team = os.environ.get(TEAM, "")
    if team and not _NAME.fullmatch(team):
        raise ConfigError(TEAM, f"{team!r} is not a name", "use letters, digits, - and _, at most 63")
    return f"{NAMESPACE}.{team}" if team else NAMESPACE


def team_of(namespace: str) -> str | None:
    """The team of a Ray namespace, "" for who names none; None: no server lives in that namespace."""
    if namespace == NAMESPACE:
        return ""
    return namespace.removeprefix(f"{NAMESPACE}.") if namespace.startswith(f"{NAMESPACE}.") else None


def own_name() -> str:
    """RAYSVC_OWNER, else the user of this process."""
    try:
        return os.environ.get(OWNER) or getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


def refuse_foreign(name: str, owner: str, how: str) -> None:
    """Refuse to touch a server that somebody else started.

    Args:
        owner: as the server says; "": it does not.
        how: what to type to do it all the same.

    Raises:
        ServerError: it is somebody else's.
    """
    if owner and owner != own_name():
        what = f"belongs to {owner}, and you are {own_name()}"
        raise ServerError(f"server.name {name!r}", what, f"ask {owner} first; {how} does it all the same")
