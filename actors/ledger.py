"""Who may advance a server, and how far training has come. Pure: the clock is an argument.

Always true:
- a fence never goes down and is never given out twice;
- at most one fence is accepted at a time: the newest, while its lease lives;
- the frontier moves only by the holder of that fence: by one step at a time, by `move`, or by the first commit
  after a restore;
- committing what is already committed changes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from raysvc.errors import FencedError, LeaseHeld, StateMismatch, StepOutOfOrder

LEDGER_VERSION = 1


@dataclass(frozen=True)
class Ledger:
    """State of one server that has to outlive its process.

    Attributes:
        name: of the server.
        fence: newest fence given out, 0 before the first attach.
        holder: who holds the lease (unique per attach), None when nobody does.
        since_s: clock value at which the holder attached.
        seen_s: clock value of the holder's last sign of life.
        frontier: next step to train; all steps below it are committed.
        skipped: committed steps that the trainer did not apply.
        restored: read from a journal, which may lag behind by commits that were not flushed yet; the holder's
            next commit then says where it is.
    """

    name: str
    fence: int = 0
    holder: str | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    frontier: int = 0
    skipped: tuple[int, ...] = ()
    restored: bool = False

    def lives(self, now_s: float, ttl_s: float) -> bool:
        """Whether somebody holds an unexpired lease."""
        return self.holder is not None and now_s - self.seen_s <= ttl_s

    def attach(self, holder: str, now_s: float, ttl_s: float, *, takeover: bool = False) -> Ledger:
        """The ledger after `holder` attached, with a new fence; asking again as the same holder changes nothing.

        Raises:
            LeaseHeld: another lease lives and `takeover` is not set.
        """
        if self.holder == holder:  # Ray may run a call twice when the server dies
            return replace(self, seen_s=max(now_s, self.seen_s))
        if self.lives(now_s, ttl_s) and not takeover:
            raise LeaseHeld(self.name, str(self.holder), now_s - self.since_s)
        return replace(self, fence=self.fence + 1, holder=holder, since_s=now_s, seen_s=now_s)

    def check(self, fence: int) -> None:
        """Refuse a caller from the past.

        Raises:
            FencedError: the fence is not the newest, or its holder detached.
        """
        if fence != self.fence or self.holder is None:
            raise FencedError(self.name, fence, self.fence if self.holder else None)

    def beat(self, fence: int, now_s: float) -> Ledger:
        """The ledger after a sign of life. A lease that ran out and that nobody took goes on."""
        self.check(fence)
        return replace(self, seen_s=max(now_s, self.seen_s))

    def detach(self, fence: int) -> Ledger:
        """The ledger after the holder left; the frontier stays."""
        self.check(fence)
        return replace(self, holder=None)

    def commit(self, fence: int, step: int, *, skipped: bool = False) -> Ledger:
        """The ledger after `step` was trained (or skipped).

        Raises:
            StepOutOfOrder: a step in between is not committed.
        """
        self.check(fence)
        if step < self.frontier:
            return self
        if step > self.frontier and not self.restored:
            raise StepOutOfOrder(self.name, step, f"step {self.frontier}, the first that is not committed")
        marks = (*self.skipped, step) if skipped else self.skipped
        return replace(self, frontier=step + 1, skipped=marks, restored=False)

    def move(self, fence: int, frontier: int, num_steps: int) -> Ledger:
        """The ledger with another frontier: the trainer's checkpoint wins over our memory."""
        self.check(fence)
        if not 0 <= frontier <= num_steps:
            raise StepOutOfOrder(self.name, frontier, f"a step from 0 to {num_steps}")
        return replace(self, frontier=frontier, skipped=tuple(s for s in self.skipped if s < frontier))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for the journal."""
        return {"version": LEDGER_VERSION, **asdict(self), "skipped": list(self.skipped)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ledger:
        """Read what `to_json` wrote.

        Raises:
            StateMismatch: the data come from a newer version, or are no ledger.
        """
        fields = dict(data)
        version = fields.pop("version", None)
        if version != LEDGER_VERSION:
            remedy = "use the raysvc version that wrote it, or another server.name"
            raise StateMismatch("ledger.version", f"{version!r} is not {LEDGER_VERSION}", remedy)
        return cls(**{**fields, "skipped": tuple(fields["skipped"]), "restored": True})
