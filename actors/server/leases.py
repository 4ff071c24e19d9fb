"""The leases of all readers of a server. Pure: the clock is an argument.

A server has one reader, "", unless it is shared: then every trainer is a reader with a lease of its own.
Always true:
- a fence never goes down, and no two attaches of any reader get the same one;
- where other rows are served every reader starts over, and no fence is used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raysvc.actors.server.reader_lease import ReaderLease
from raysvc.errors import FencedError, ServerError


@dataclass(frozen=True)
class Leases:
    """All readers of a server.

    Attributes:
        name: of the server.
        shared: whether readers other than "" may attach.
        by_reader: lease of each reader that ever attached.
    """

    name: str
    shared: bool = False
    by_reader: Mapping[str, ReaderLease] = field(default_factory=dict)

    @property
    def next_fence(self) -> int:
        """A fence that nobody ever got."""
        return 1 + max((lease.fence for lease in self.by_reader.values()), default=0)

    def of_reader(self, reader: str) -> ReaderLease:
        """The lease of a reader, an empty one for a new reader.

        Raises:
            ServerError: the server has one reader only.
        """
        if reader and not self.shared:
            where, what = f"server.name {self.name!r}", f"is not shared, and was asked for reader {reader!r}"
            raise ServerError(where, what, "serve it with server.share=stream, or attach without a reader")
        return self.by_reader.get(reader) or self._empty(reader)

    def of_fence(self, fence: int) -> ReaderLease:
        """The lease that this fence was given out for.

        Raises:
            FencedError: the fence is not the newest of any reader.
        """
        for lease in self.by_reader.values():
            if lease.fence == fence:
                return lease
        newest = None if self.shared else self.of_reader("").fence
        raise FencedError(self.name, fence, newest or None)

    def having(self, lease: ReaderLease) -> Leases:
        """Returns these leases with another lease of its reader."""
        return replace(self, by_reader={**self.by_reader, lease.reader: lease})

    def lives(self, now_s: float, ttl_s: float) -> bool:
        """Returns whether anybody holds an unexpired lease."""
        return any(lease.lives(now_s, ttl_s) for lease in self.by_reader.values())

    def committed(self) -> int:
        """The step below which every reader with a lease is done."""
        return min((lease.frontier for lease in self.by_reader.values() if lease.holder), default=0)

    def later(self, by_s: float) -> Leases:
        """Returns these leases with all signs of life so much later."""
        moved = {reader: lease.later(by_s) for reader, lease in self.by_reader.items()}
        return replace(self, by_reader=moved)

    def without_holders(self) -> Leases:
        """Nobody holds a lease any more; fences and frontiers stay."""
        free = {reader: lease.without_holder() for reader, lease in self.by_reader.items()}
        return replace(self, by_reader=free)

    def without_frontiers(self) -> Leases:
        """Other rows are served: every reader starts over, but no fence is used again."""
        fresh = {
            reader: replace(self._empty(reader), fence=lease.fence)
            for reader, lease in self.by_reader.items()
        }
        return replace(self, by_reader=fresh)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Plain JSON, for the journal."""
        return {reader: lease.to_json(now_s) for reader, lease in self.by_reader.items()}

    def from_json(self, data: Mapping[str, Any], now_s: float) -> Leases:
        """Returns these leases with the readers that `to_json` wrote.

        Raises:
            StateMismatch: another version wrote them.
        """
        read = {reader: self._empty(reader).from_json(lease, now_s) for reader, lease in data.items()}
        return replace(self, by_reader=read)

    def _empty(self, reader: str) -> ReaderLease:
        return ReaderLease(reader, f"{self.name}/{reader}" if reader else self.name)
