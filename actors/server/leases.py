"""Who may advance a stream of steps, and how far training has come. Pure: the clock is an argument.

A lease is held by one driver, or by the ranks of one group that each attach by themselves (rank mode): then every
rank has a seat, and a step is committed when all seats committed it.

Axes: R ranks of a group.
Always true:
- a fence never goes down and is never given out twice;
- at most one fence is accepted at a time: the newest, while its lease lives;
- the frontier moves only by the holder of that fence: by one step at a time, by `move`, or by the first commit
  after a restore;
- with seats the frontier is the smallest of theirs once all are taken;
- committing what is already committed changes nothing, and neither does detaching twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from raysvc.errors import FencedError, LeaseHeld, StateMismatch, StepOutOfOrder

LEDGER_VERSION = 2


@dataclass(frozen=True)
class Seat:
    """One rank of a group.

    Attributes:
        holder: which process (unique per attach), "" before it came and after it left.
        frontier: its next step; None before it came.
    """

    holder: str = ""
    frontier: int | None = None


@dataclass(frozen=True)
class Ledger:
    """State of one stream of steps that has to outlive the server's process.

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
        seats: [R] in rank mode, empty when one driver holds the lease.
    """

    name: str
    fence: int = 0
    holder: str | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    frontier: int = 0
    skipped: tuple[int, ...] = ()
    restored: bool = False
    seats: tuple[Seat, ...] = ()

    def lives(self, now_s: float, ttl_s: float) -> bool:
        """Whether somebody holds an unexpired lease."""
        return self.holder is not None and now_s - self.seen_s <= ttl_s

    def attach(
        self, holder: str, now_s: float, ttl_s: float, *, takeover: bool = False, fence: int | None = None
    ) -> Ledger:
        """The ledger after `holder` attached, with a new fence; asking again as the same holder changes nothing.

        Args:
            fence: the one to give out; None: the next one of this ledger.

        Raises:
            LeaseHeld: another lease lives and `takeover` is not set.
        """
        if self.holder == holder:  # Ray may run a call twice when the server dies
            return replace(self, seen_s=max(now_s, self.seen_s))
        if self.lives(now_s, ttl_s) and not takeover:
            raise LeaseHeld(self.name, str(self.holder), now_s - self.since_s)
        new = self.fence + 1 if fence is None else fence
        return replace(self, fence=new, holder=holder, since_s=now_s, seen_s=now_s, seats=(), restored=False)

    def attach_rank(
        self,
        group: str,
        holder: str,
        rank: int,
        num_ranks: int,
        now_s: float,
        ttl_s: float,
        *,
        takeover: bool = False,
        fence: int | None = None,
    ) -> Ledger:
        """The ledger after a rank of `group` took its seat; the first one opens the lease, the others share its fence.

        Raises:
            LeaseHeld: another holder, or another process on that seat, lives and `takeover` is not set.
        """
        if self.holder == group and len(self.seats) == num_ranks and self.seats[rank].holder in ("", holder):
            if self.seats[rank].holder == holder:
                return replace(self, seen_s=max(now_s, self.seen_s))
            ledger = replace(self, seen_s=max(now_s, self.seen_s))
        else:
            seat_taken = replace(self, holder=f"{self.holder}, rank {rank}") if self.holder == group else self
            ledger = seat_taken.attach(group, now_s, ttl_s, takeover=takeover, fence=fence)
            ledger = replace(ledger, holder=group, seats=(Seat(),) * num_ranks)
        return ledger._seated(rank, Seat(holder, ledger.frontier))

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

    def detach(self, fence: int, rank: int | None = None) -> Ledger:
        """The ledger after the holder, or one rank of it, left; the frontier stays."""
        if fence == self.fence and self.holder is None:
            return self
        self.check(fence)
        if rank is not None:
            ledger = self._seated(rank, replace(self.seats[rank], holder=""))
            if any(seat.holder for seat in ledger.seats):
                return ledger
        return replace(self, holder=None, seats=())

    def commit(self, fence: int, step: int, *, skipped: bool = False, rank: int | None = None) -> Ledger:
        """The ledger after `step` was trained (or skipped), by the driver or by one rank.

        Raises:
            StepOutOfOrder: a step in between is not committed.
        """
        self.check(fence)
        frontier = self.frontier if rank is None else self.seats[rank].frontier or 0
        if step < frontier:
            return self
        if step > frontier and not self.restored:
            raise StepOutOfOrder(self.name, step, f"step {frontier}, the first that is not committed")
        marks = (*self.skipped, step) if skipped and step not in self.skipped else self.skipped
        if rank is None:
            return replace(self, frontier=step + 1, skipped=marks, restored=False)
        # other ranks may still have to say where they are: `restored` stays until one trainer attaches again
        return replace(self, skipped=marks)._seated(rank, replace(self.seats[rank], frontier=step + 1))

    def move(self, fence: int, frontier: int, num_steps: int, rank: int | None = None) -> Ledger:
        """The ledger with another frontier: the trainer's checkpoint wins over our memory.

        Raises:
            StepOutOfOrder: there is no such step.
        """
        self.check(fence)
        if not 0 <= frontier <= num_steps:
            raise StepOutOfOrder(self.name, frontier, f"a step from 0 to {num_steps}")
        if rank is not None:
            return self._seated(rank, replace(self.seats[rank], frontier=frontier))
        return replace(self._at(frontier), restored=False)

    def _seated(self, rank: int, seat: Seat) -> Ledger:
        """With another seat; the frontier is the smallest of all seats once they are taken."""
        seats = (*self.seats[:rank], seat, *self.seats[rank + 1 :])
        frontiers = [seat.frontier for seat in seats if seat.frontier is not None]
        ledger = replace(self, seats=seats)
        return ledger._at(min(frontiers)) if len(frontiers) == len(seats) else ledger

    def _at(self, frontier: int) -> Ledger:
        back = frontier < self.frontier
        skipped = tuple(s for s in self.skipped if s < frontier) if back else self.skipped
        return replace(self, frontier=frontier, skipped=skipped)

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
        seats = tuple(Seat(**seat) for seat in fields["seats"])
        return cls(**{**fields, "skipped": tuple(fields["skipped"]), "seats": seats, "restored": True})
