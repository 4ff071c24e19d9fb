"""Room in a buffer that is used again and again.

Always true:
- two rooms that are in use never overlap;
- room that was given back is handed out again together with the events its new user has to wait for, each once
  for every byte it covers;
- rooms begin at multiples of 64 bytes, so every dtype may lie there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raysvc.actors.staging.device import Event

LINE = 64


def aligned(nbytes: int) -> int:
    """`nbytes` up to the next multiple of 64."""
    return -(-nbytes // LINE) * LINE


@dataclass(frozen=True)
class Room:
    """Bytes [start, stop) of the buffer.

    Attributes:
        copied: events of copies out of these bytes' host side that may still run.
        consumed: events of compute on these bytes' device side that may still run.
    """

    start: int
    stop: int
    copied: tuple[Event, ...] = ()
    consumed: tuple[Event, ...] = ()


@dataclass
class Ring:
    """Which bytes of a buffer of `nbytes` are in use.

    Attributes:
        used: rooms in use, by where they begin.
        given_back: bytes that nobody uses, with the events of their last user.
    """

    nbytes: int
    used: list[Room] = field(default_factory=list)
    given_back: list[Room] = field(default_factory=list)
    _next: int = 0  # behind the room handed out last; looking there first lets old events happen

    def take(self, nbytes: int) -> Room | None:
        """Room for `nbytes`, None when there is none now."""
        size = aligned(nbytes)
        start = self._first_gap(size)
        if start is None:
            return None
        stop = start + size
        old = [room for room in self.given_back if room.start < stop and start < room.stop]
        self.given_back = [room for room in self.given_back if room not in old]
        for room in old:  # what is left of it on either side keeps its events
            if room.start < start:
                self.given_back.append(Room(room.start, start, room.copied, room.consumed))
            if stop < room.stop:
                self.given_back.append(Room(stop, room.stop, room.copied, room.consumed))
        copied = tuple(event for room in old for event in room.copied)
        consumed = tuple(event for room in old for event in room.consumed)
        taken = Room(start, stop, copied, consumed)
        self.used = sorted([*self.used, taken], key=lambda room: room.start)
        self._next = stop
        return taken

    def give_back(self, room: Room, copied: Event, consumed: Event) -> None:
        """`room` may be handed out; its next user waits for these events (None: happened)."""
        self.used = [other for other in self.used if other is not room]
        if copied is not None or consumed is not None:
            self.given_back.append(Room(room.start, room.stop, _some(copied), _some(consumed)))

    def _first_gap(self, size: int) -> int | None:
        starts = [0, *(room.stop for room in self.used)]
        stops = [*(room.start for room in self.used), self.nbytes]
        gaps = list(zip(starts, stops, strict=True))
        ahead = [(max(start, self._next), stop) for start, stop in gaps if stop > self._next]
        for start, stop in [*ahead, *gaps]:
            if stop - start >= size:
                return start
        return None


def _some(event: Event) -> tuple[Event, ...]:
    return () if event is None else (event,)
