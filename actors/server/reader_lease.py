"""The lease of one reader: who may advance a stream of steps, and how far training has come. Pure: the clock is an argument.

A lease is held by one driver, or by the ranks of one group that each attach by themselves (rank mode). Every process of the
group's mesh has a seat; a driver is a group of one seat.

How calls converge, in whatever order and however often they arrive:
1. A fence counts attaches. A call with another fence than the newest is refused.
2. Within a fence a seat counts its moves (rewinds and restored states). A call from before the newest move changes nothing.
3. Within a move a commit of step s says that all steps up to s are trained: the seat's frontier becomes at least s + 1.

4. Peers of a mesh (context, tensor, pipeline) train a step together. So they go to the same frontier, each by its own move, before
   any of them commits in it; a peer that does otherwise is refused.

Axes: R processes of a group: its ranks, or all seats of its mesh.
Always true:
- at most one fence is accepted at a time: the newest, while the lease is held;
- a seat's (moves, frontier) never goes down in lexicographic order while its fence is the newest;
- the frontier is the smallest of the seats once all are taken;
- clock values stay in the process: a record holds durations, and who reads it starts each lease's time again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

from raysvc.actors.mesh import Mesh
from raysvc.errors import FencedError, LeaseHeld, SeatRefused, StateMismatch, StepOutOfOrder

RECORD_VERSION = 3
ALONE = Mesh(1)


@dataclass(frozen=True)
class Seat:
    """One process of a group, or the driver.

    Attributes:
        holder: which process (unique per attach), "" before it came and after it left.
        frontier: its next step; None before it came.
        moves: rewinds and restored states since it attached.
        seen_s: clock value of its last sign of life.
    """

    holder: str = ""
    frontier: int | None = None
    moves: int = 0
    seen_s: float = 0.0


class SilentRank(NamedTuple):
    """A rank of which nothing was heard for a while."""

    rank: int
    holder: str
    silent_s: float


class Peers(NamedTuple):
    """Holds what a holder learns of its group.

    Attributes:
        frontier: of the group.
        behind: (rank, its next step) of ranks further behind the asking one than its look-ahead reaches; the first rank
            that is so far ahead hears it for all.
        silent: ranks that missed their heartbeats.
    """

    frontier: int
    behind: tuple[tuple[int, int], ...] = ()
    silent: tuple[SilentRank, ...] = ()


@dataclass(frozen=True)
class ReaderLease:
    """State of one reader that has to outlive the server's process.

    Attributes:
        reader: "" unless the server is shared.
        name: of the server, and of the reader where there is one; for errors.
        fence: newest fence given out, 0 before the first attach.
        holder: who holds the lease (a driver, or a group), None when nobody does.
        since_s: clock value at which the holder attached.
        frontier: next step to train; all steps below it are committed.
        committed_by: the process that was the last to commit a step, or to go to the frontier of its checkpoint; "" before any.
        skipped: committed steps that the trainer did not apply, ascending.
        seats: [R]; of a driver one; empty when nobody holds the lease.
        window: steps that a seat may be ahead of the slowest one: its look-ahead and the one it trains.
        mesh: of the seats.
    """

    reader: str
    name: str
    fence: int = 0
    holder: str | None = None
    since_s: float = 0.0
    frontier: int = 0
    committed_by: str = ""
    skipped: tuple[int, ...] = ()
    seats: tuple[Seat, ...] = ()
    window: int = 1
    mesh: Mesh = ALONE

    @property
    def shown_holder(self) -> str | None:
        """The holder for display; a group with the process of its first rank."""
        first = next((seat.holder for seat in self.seats if seat.holder), "")
        return f"{self.holder} ({first})" if self.holder and first and first != self.holder else self.holder

    @property
    def seen_s(self) -> float:
        """Clock value of the last sign of life of any seat."""
        return max((seat.seen_s for seat in self.seats), default=0.0)

    def lives(self, now_s: float, ttl_s: float) -> bool:
        """Returns whether somebody holds an unexpired lease."""
        return self.holder is not None and now_s - self.seen_s <= ttl_s

    def check(self, fence: int) -> None:
        """Refuse a caller from the past.

        Raises:
            FencedError: the fence is not the newest, or its holder detached.
        """
        if fence != self.fence or self.holder is None:
            raise FencedError(self.name, fence, self.fence if self.holder else None)

    def attach(
        self, holder: str, now_s: float, ttl_s: float, *, fence: int, takeover: bool = False
    ) -> ReaderLease:
        """The lease after a driver attached; asking again as the same holder changes nothing.

        Args:
            fence: the one to give out when the lease is new.

        Raises:
            LeaseHeld: another lease lives and `takeover` is not set.
        """
        return self.attach_rank(holder, holder, 0, Mesh(1), now_s, ttl_s, fence=fence, takeover=takeover)

    def attach_rank(
        self,
        group: str,
        holder: str,
        rank: int,
        mesh: Mesh,
        now_s: float,
        ttl_s: float,
        *,
        fence: int,
        takeover: bool = False,
        window: int = 1,
    ) -> ReaderLease:
        """The lease after a process of `group` took its seat; the first one opens the lease, the others share its fence.

        Args:
            rank: number of the seat in `mesh`.

        Raises:
            LeaseHeld: another group lives and `takeover` is not set.
            SeatRefused: so does another process on that seat, or the group has another mesh.
        """
        same_group = self.holder == group and self.mesh == mesh
        if same_group and self.seats[rank].holder == holder:  # Ray may run a call twice
            return self._seated(rank, replace(self.seats[rank], seen_s=now_s))
        if same_group and not self.seats[rank].holder:
            return self._seated(rank, Seat(holder, self.frontier, seen_s=now_s))
        if self.lives(now_s, ttl_s) and not takeover:
            raise self._refused(group, rank, mesh, now_s)
        seats = (Seat(),) * mesh.size
        lease = replace(self, fence=fence, holder=group, since_s=now_s, seats=seats, window=window, mesh=mesh)
        return lease._seated(rank, Seat(holder, self.frontier, seen_s=now_s))

    def beat(self, fence: int, rank: int, now_s: float) -> ReaderLease:
        """The lease after a sign of life. A lease that ran out and that nobody took goes on."""
        self.check(fence)
        seat = self.seats[rank]
        return self._seated(rank, replace(seat, seen_s=max(now_s, seat.seen_s)))

    def commit(
        self, fence: int, step: int, rank: int, now_s: float, *, moves: int = 0, skipped: bool = False
    ) -> ReaderLease:
        """The lease after all steps up to `step` were trained, or `step` was skipped, by one seat.

        Args:
            moves: of the seat when it was sent.

        Raises:
            StepOutOfOrder: a peer has not moved as this seat did, and cannot have trained that step with it.
        """
        if fence == self.fence and self.holder is None and step < self.frontier:
            return self  # it was sent again, and its holder has left since
        self.check(fence)
        seat = self.seats[rank]
        if moves < seat.moves:
            return self
        for number, peer in self._peers_of(rank):
            if peer.moves < moves:
                what = f"{self.mesh.name(number)} to be there too: it did not load that state, or rewind"
                raise StepOutOfOrder(self.name, step, what)
        known = seat.frontier or 0 if moves == seat.moves else 0
        marks = tuple(sorted({*self.skipped, step})) if skipped else self.skipped
        after = Seat(seat.holder, max(known, step + 1), moves, max(now_s, seat.seen_s))
        is_new = (after.moves, after.frontier) != (seat.moves, seat.frontier)  # else it was sent again
        by = seat.holder if is_new and seat.holder else self.committed_by
        return replace(self, skipped=marks, committed_by=by)._seated(rank, after)

    def move(
        self, fence: int, frontier: int, rank: int, now_s: float, *, moves: int | None = None
    ) -> ReaderLease:
        """The lease with another frontier: the trainer's checkpoint wins over our memory.

        Args:
            moves: of the seat with this one counted; None: the next.

        Raises:
            StepOutOfOrder: a peer went to another frontier by that move.
        """
        self.check(fence)
        seat = self.seats[rank]
        number = seat.moves + 1 if moves is None else moves
        if number <= seat.moves:
            return self
        for other, peer in self._peers_of(rank):
            if peer.moves == number and peer.frontier != frontier:
                what = f"step {peer.frontier}, to which {self.mesh.name(other)} of this dp rank went"
                raise StepOutOfOrder(self.name, frontier, what)
        after = Seat(seat.holder, frontier, number, max(now_s, seat.seen_s))
        return replace(self, committed_by=seat.holder or self.committed_by)._seated(rank, after)

    def detach(self, fence: int, rank: int) -> ReaderLease:
        """The lease after the driver, or one rank, left; the frontier stays."""
        if fence == self.fence and self.holder is None:
            return self
        self.check(fence)
        lease = self._seated(rank, replace(self.seats[rank], holder=""))
        return lease if any(seat.holder for seat in lease.seats) else lease.without_holder()

    def peers(self, rank: int, now_s: float, ttl_s: float) -> Peers:
        """Returns which ranks keep this one waiting, and which have been silent for two of a lease's three
        heartbeats.
        """
        seated = [(number, seat) for number, seat in enumerate(self.seats) if seat.frontier is not None]
        steps = [(number, seat.frontier or 0) for number, seat in seated]
        lowest = min((step for _, step in steps), default=0)
        told = next((number for number, step in steps if step - lowest > self.window), None)
        own = self.seats[rank].frontier or 0
        behind = [(number, step) for number, step in steps if rank == told and own - step > self.window]
        silent = [
            SilentRank(number, seat.holder, now_s - seat.seen_s)
            for number, seat in seated
            if number != rank and seat.holder and now_s - seat.seen_s > ttl_s * 2 / 3
        ]
        return Peers(self.frontier, tuple(behind), tuple(silent))

    def later(self, by_s: float) -> ReaderLease:
        """Returns the lease with all signs of life so much later."""
        return replace(self, seats=tuple(replace(seat, seen_s=seat.seen_s + by_s) for seat in self.seats))

    def without_holder(self) -> ReaderLease:
        """Nobody holds it any more; fence and frontier stay."""
        return replace(self, holder=None, seats=())

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Plain JSON, for the journal."""
        seats = [[seat.holder, seat.frontier, seat.moves] for seat in self.seats]
        return {
            "version": RECORD_VERSION,
            "fence": self.fence,
            "holder": self.holder,
            "held_s": now_s - self.since_s,
            "frontier": self.frontier,
            "committed_by": self.committed_by,
            "skipped": list(self.skipped),
            "seats": seats,
            "window": self.window,
            "mesh": asdict(self.mesh),
        }

    def from_json(self, data: Mapping[str, Any], now_s: float) -> ReaderLease:
        """Read what `to_json` wrote. Its holder has the whole lease time from now on to say that it lives.

        Raises:
            StateMismatch: another version wrote it.
        """
        if data.get("version") != RECORD_VERSION:
            remedy = "use the raysvc version that wrote it, or another server.name"
            raise StateMismatch("lease.version", f"{data.get('version')!r} is not {RECORD_VERSION}", remedy)
        kept = {name: data[name] for name in ("fence", "holder", "frontier", "window")}
        seats = tuple(Seat(holder, frontier, moves, now_s) for holder, frontier, moves in data["seats"])
        mesh = Mesh(**data.get("mesh") or {"dp": max(1, len(seats))})  # earlier ones knew ranks alone
        kept["committed_by"] = data.get("committed_by", "")  # nor who committed
        skipped, since_s = tuple(data["skipped"]), now_s - data["held_s"]
        return replace(self, **kept, skipped=skipped, since_s=since_s, seats=seats, mesh=mesh)

    def _refused(self, group: str, rank: int, mesh: Mesh, now_s: float) -> LeaseHeld:
        """Says why a process is not let in while somebody lives."""
        held_by, since_s = str(self.shown_holder), now_s - self.since_s
        if self.holder != group:
            return LeaseHeld(self.name, held_by, since_s)
        if self.mesh != mesh:
            return SeatRefused(self.name, held_by, since_s, f"of ({mesh}) in a group of ({self.mesh})")
        return SeatRefused(self.name, self.seats[rank].holder, since_s, f"on {mesh.name(rank)}")

    def _peers_of(self, rank: int) -> list[tuple[int, Seat]]:
        """The seats beside this one whose processes train its steps with it."""
        peers = self.mesh.peers(rank)
        return [
            (number, self.seats[number]) for number in peers if number != rank and self.seats[number].holder
        ]

    def _seated(self, rank: int, seat: Seat) -> ReaderLease:
        """Returns the lease with another seat; the frontier is the smallest of all seats once they are taken."""
        seats, before = (*self.seats[:rank], seat, *self.seats[rank + 1 :]), self.seats[rank].frontier
        if before is not None and seat.frontier is not None and seat.frontier >= self.frontier:
            # it can only have grown, and has not where another seat is still there: seldom more than a few are looked at
            others = islice(cycle(seats), rank, rank + len(seats))
            if any(each.frontier in (None, self.frontier) for each in others):
                return replace(self, seats=seats)
        frontiers = [seat.frontier for seat in seats if seat.frontier is not None]
        frontier = min(frontiers) if len(frontiers) == len(seats) else self.frontier
        back = frontier < self.frontier
        skipped = tuple(step for step in self.skipped if step < frontier) if back else self.skipped
        return replace(self, seats=seats, frontier=frontier, skipped=skipped)
