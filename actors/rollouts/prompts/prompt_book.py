"""Remembers the prompts of a stream that were handed out, under which attempt, and what became of them. Pure: no disk, no clock.

A prompt is a position of the stream: a row of the source in an epoch. It is under way (`out`), waits to be handed out again (`back`),
was put, or is lost for good (`lost`, with the reason).
Always true:
- every position below `next` that has a row is exactly one of these;
- a position is handed out in the order of the stream, and one that came back before all new ones;
- of the attempts at a prompt the last one that was handed out counts: what an earlier one brings is refused;
- a prompt is handed out `max_attempts` times at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KEPT_ASKS = 64  # of a producer; Ray repeats those that were not answered when the server died


class PromptAttempt(NamedTuple):
    """A prompt, the attempt, and the version of the weights that trained when it was handed out."""

    uid: str
    attempt: int
    version: int


@dataclass
class PromptBook:
    """See the module.

    Attributes:
        max_attempts: how often a prompt is handed out.
        stream: identity of the stream; "": nothing was handed out.
        next: the first position that was never looked at.
        out: uid -> as it was handed out; until its first rows are put.
        back: uid -> the attempt that it is handed out under next.
        attempts: uid -> the attempt that was handed out last, where it is not the first.
        lost: uid -> why it is not trained.
        asks: producer -> its newest questions, by name, each with what was answered: several threads of it may ask at once.
    """

    max_attempts: int
    stream: str = ""
    next: int = 0
    out: dict[str, PromptAttempt] = field(default_factory=dict)
    back: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    asks: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def hand_out(self, owner: str, ask: str, prompts: Sequence[PromptAttempt], following: int) -> None:
        """These were handed out; `following` is the next position."""
        self.next = following
        mine = self.asks.setdefault(owner, {})
        mine[ask] = [each.uid for each in prompts]
        for old in list(mine)[:-KEPT_ASKS]:
            del mine[old]
        for each in prompts:
            self.back.pop(each.uid, None)
            self.out[each.uid] = each
            if each.attempt:
                self.attempts[each.uid] = each.attempt

    def put(self, uid: str) -> None:
        """Rows of it came."""
        self.out.pop(uid, None)
        self.back.pop(uid, None)

    def give_back(self, uids: Iterable[str], reason: str) -> None:
        """Nothing comes of these attempts: the prompts are handed out again, or are lost."""
        for uid in uids:
            self.out.pop(uid, None)
            attempt = self.attempts.get(uid, 0) + 1
            if attempt < self.max_attempts:
                self.back[uid] = attempt
            else:
                self.lost[uid] = reason

    def lose(self, uids: Iterable[str], reason: str) -> None:
        """These are not trained."""
        for uid in uids:
            self.put(uid)
            self.lost[uid] = reason

    def forget_producer(self, owner: str) -> None:
        """It asks no more."""
        self.asks.pop(owner, None)

    def counts(self, total: int) -> dict[str, Any]:
        """Counts the prompts by where they are; `total`: positions of the stream."""
        return {
            "handed_out": self.next,
            "of": total,
            "under_way": len(self.out),
            "to_hand_out_again": len(self.back),
            "lost": dict(Counter(self.lost.values())),
        }

    def to_json(self) -> dict[str, Any]:
        """All of it but what the spec says."""
        out = [list(each) for each in self.out.values()]
        return {"stream": self.stream, "next": self.next, "out": out, "back": self.back, "attempts": self.attempts, "lost": self.lost,
                "asks": {owner: list(mine.items()) for owner, mine in self.asks.items()}}  # fmt: skip

    def load(self, value: dict[str, Any]) -> None:
        """The inverse of `to_json`."""
        self.stream = value.get("stream", "")
        self.next, self.back, self.attempts = value["next"], dict(value["back"]), dict(value["attempts"])
        self.lost = dict(value["lost"])
        self.out = {uid: PromptAttempt(uid, attempt, version) for uid, attempt, version in value["out"]}
        self.asks = {owner: {ask: list(uids) for ask, uids in mine} for owner, mine in value["asks"].items()}


def position_of(uid: str) -> int:
    """The place of a prompt in its stream; -1: it is no uid of a stream."""
    number, slash, _ = uid.partition("/")
    return int(number) if slash and number.isascii() and number.isdigit() else -1
