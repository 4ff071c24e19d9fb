"""The ledgers of all readers of one server: fences are numbered through, so a fence names its reader.

A server has one reader, "", unless it is shared: then every trainer reads the same steps at its own pace.

Always true:
- no two readers ever get the same fence, and no fence comes twice;
- a call with a fence changes the ledger of that fence's reader alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raysvc.actors.server.leases import Ledger
from raysvc.errors import FencedError, ServerError


@dataclass(frozen=True)
class Ledgers:
    """All readers of a server.

    Attributes:
        name: of the server.
        by_reader: ledger of each reader that ever attached.
        shared: whether readers other than "" may attach.
    """

    name: str
    by_reader: Mapping[str, Ledger] = field(default_factory=dict)
    shared: bool = False

    @property
    def fence(self) -> int:
        """The newest fence of all readers."""
        return max((ledger.fence for ledger in self.by_reader.values()), default=0)

    def of(self, reader: str) -> Ledger:
        """The ledger of a reader, an empty one for a new reader.

        Raises:
            ServerError: the server has one reader only.
        """
        if reader and not self.shared:
            where, what = f"server.name {self.name!r}", f"is not shared, and was asked for reader {reader!r}"
            raise ServerError(where, what, "serve it with server.share=stream, or attach without a reader")
        return self.by_reader.get(reader) or Ledger(f"{self.name}/{reader}" if reader else self.name)

    def reader(self, fence: int) -> str:
        """Whose fence this is.

        Raises:
            FencedError: nobody's that still counts.
        """
        for name, ledger in self.by_reader.items():
            if ledger.fence == fence:
                return name
        newest = self.of("").fence if not self.shared else None
        raise FencedError(self.name, fence, newest or None)

    def attached(self, reader: str, change: Callable[[Ledger, int], Ledger]) -> tuple[Ledgers, Ledger]:
        """The ledgers after an attach; `change` gets the reader's ledger and the fence to give out."""
        ledger = change(self.of(reader), self.fence + 1)
        return replace(self, by_reader={**self.by_reader, reader: ledger}), ledger

    def changed(self, fence: int, change: Callable[[Ledger], Ledger]) -> tuple[Ledgers, Ledger]:
        """The ledgers after a call of the holder of `fence`, and that holder's ledger."""
        reader = self.reader(fence)
        ledger = change(self.by_reader[reader])
        return replace(self, by_reader={**self.by_reader, reader: ledger}), ledger

    def check(self, fence: int) -> Ledger:
        """The ledger of a holder.

        Raises:
            FencedError: it was replaced.
        """
        ledger = self.by_reader[self.reader(fence)]
        ledger.check(fence)
        return ledger

    def lives(self, now_s: float, ttl_s: float) -> bool:
        """Whether anybody holds an unexpired lease."""
        return any(ledger.lives(now_s, ttl_s) for ledger in self.by_reader.values())

    def committed(self) -> int:
        """The step below which every reader with a lease is done."""
        held = [ledger.frontier for ledger in self.by_reader.values() if ledger.holder is not None]
        return min(held, default=0)

    def without_holders(self) -> Ledgers:
        """Nobody holds a lease any more; fences and frontiers stay."""
        free = {name: replace(ledger, holder=None, seats=()) for name, ledger in self.by_reader.items()}
        return replace(self, by_reader=free)

    def without_frontiers(self) -> Ledgers:
        """Other rows are served: every reader starts over, but no fence is used again."""
        free = {name: Ledger(ledger.name, fence=ledger.fence) for name, ledger in self.by_reader.items()}
        return replace(self, by_reader=free)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for the journal."""
        return {name: ledger.to_json() for name, ledger in self.by_reader.items()}

    def restored(self, data: Mapping[str, Any]) -> Ledgers:
        """With the readers that `to_json` wrote.

        Raises:
            StateMismatch: another version wrote them.
        """
        return replace(self, by_reader={name: Ledger.from_json(value) for name, value in data.items()})
