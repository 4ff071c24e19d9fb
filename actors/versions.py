"""Decides whether a client and a server of two versions work together. Pure.

1. The wire format is what travels between them: calls, their arguments, the types of `raysvc.actors.server.spec`,
   and shards, whose own format has a version of its own (docs/wire.md).
2. Within a minor version it only grows: a field has a default, an argument may be left out. Versions with the same
   major and minor number work together, the older one on either side.
3. Another minor version, or another wire format, is refused before anything is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from raysvc import __version__
from raysvc.errors import VersionMismatch

WIRE = 2


class Side(NamedTuple):
    """A client or a server."""

    version: str
    wire: int


HERE = Side(__version__, WIRE)


def check_versions_meet(name: str, client: Side, server: Side) -> None:
    """Refuse a pair that does not work together.

    Args:
        name: of the server.

    Raises:
        VersionMismatch: says both, and the command that fixes it.
    """
    if client.wire != server.wire or _minor(client.version) != _minor(server.version):
        raise VersionMismatch(name, client.version, server.version)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
