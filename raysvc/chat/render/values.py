"""What an expression of a template is while a conversation is not known: texts to fill in, messages, loops.

Always true:
- every value is frozen and compares by content;
- what is not one of these classes is an ordinary, known value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from raysvc.chat.render.symbols import Hole, Path, Place, Segment


@dataclass(frozen=True)
class Joined:
    """Texts and holes in a row, from `+` and `~`."""

    parts: tuple[Segment, ...]


@dataclass(frozen=True)
class Messages:
    """The conversation from its `start`-th message on, or that backwards."""

    start: int = 0
    backwards: bool = False


@dataclass(frozen=True)
class OneMessage:
    """A message."""

    place: Place


@dataclass(frozen=True)
class Inner:
    """A list or dict inside a message."""

    path: Path
    kind: str


@dataclass(frozen=True)
class LoopState:
    """`loop`, at any turn of a loop over messages from `start` on."""

    start: int


@dataclass(frozen=True)
class CountedLoop:
    """`loop`, at a known turn of a loop that is written out."""

    index0: int
    length: int

    def field(self, name: str) -> Any:
        """A field of `loop`; KeyError for one that is not a number or a truth."""
        return {
            "index0": self.index0,
            "index": self.index0 + 1,
            "first": self.index0 == 0,
            "last": self.index0 == self.length - 1,
            "length": self.length,
            "revindex": self.length - self.index0,
            "revindex0": self.length - self.index0 - 1,
        }[name]


@dataclass(frozen=True)
class LoopIndex:
    """`loop.index0 + offset`."""

    start: int
    offset: int = 0


@dataclass(frozen=True)
class MethodOf:
    """A method of a text that is not known."""

    owner: Hole
    name: str


@dataclass(frozen=True)
class MessageLoop:
    """A loop over messages that stands in a result: its body runs for every message from `start` on.

    Attributes:
        node: the loop.
        start: first message.
        scope: variables that the body reads, as they were when it began.
    """

    node: nodes.For
    start: int
    scope: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TurnOf:
    """Marks where a message's turn begins in a loop that is written out; -1 where it ends."""

    place: int


OPEN = (Hole, Joined, Messages, OneMessage, Inner, LoopState, CountedLoop, LoopIndex, MethodOf)


def is_open(value: Any) -> bool:
    """Whether a value depends on the conversation."""
    return isinstance(value, OPEN)


def is_text(value: Any) -> bool:
    """Whether a value is a text, known or not; a split is a list."""
    if isinstance(value, Hole):
        return not value.steps or value.steps[-1][0] != "split"
    return isinstance(value, str | Joined)
