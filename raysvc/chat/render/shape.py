"""Shapes of plain rows: the template's literals around what the messages say, and the sequences that are joined from them.

Always true:
- a joined sequence is what `Sequence` would hold, made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from raysvc.chat.sequence import CLOSED_TURN, FREE, MediumPlace, Sequence, Span
from raysvc.chat.source.examples import ChatExample, TokensExample
from raysvc.chat.source.messages import Message


class Turn(NamedTuple):
    """A span: its ends among the literals' characters, and which text it is around.

    `alone`: no other message can have a part in it, as only a header stands before its text, and a token behind it.
    """

    start: int
    end: int
    place: int
    alone: bool


class Shape(NamedTuple):
    """What plain rows with the same roles have in common.

    Attributes:
        parts: literals, and None between them for the texts.
        owners: of each stretch that is written, the place of its message, -1 for nobody's.
        marks: of each stretch, whether it is inside `{% generation %}`.
        sizes: of each stretch the characters of literals and the places of the texts in it, where there are marks.
        openings: beginnings of tokens and tags in the literals; None when all tokens are trained.
        turns: under loss.
        alone: all of them are.
        example: the row that it was learned from.
        fills_in: its literals and texts are known to be the render, whatever words are in the texts.
    """

    parts: list[str | None]
    owners: tuple[int, ...]
    marks: tuple[bool, ...]
    sizes: list[tuple[int, tuple[int, ...]]]
    openings: int | None
    turns: tuple[Turn, ...]
    alone: bool
    example: ChatExample
    fills_in: bool = False

    def filled_in(self, said: list[str]) -> str:
        """The literals with texts between them."""
        parts = self.parts.copy()
        parts[1::2] = said
        return "".join(parts)  # type: ignore[arg-type]

    def has_sizes(self, said: list[str], texts: Iterable[str]) -> bool:
        """Whether stretches end where those of the shape do: the ends of marks are among them."""
        if not self.sizes:
            return True
        sizes = zip(self.sizes, texts, strict=True)
        return all(len(text) == size + sum(len(said[n]) for n in places) for (size, places), text in sizes)


class JoinedSequence(NamedTuple):
    """The sequence of a row that is built like an earlier one; attributes as of `Sequence`.

    Attributes:
        text: to encode.
        openings: as its shape has them.
        shape: of the row.
        messages: as the template gets them.
        said: the text of each.
    """

    text: str
    openings: int | None
    shape: Shape
    messages: list[Message]
    said: list[str]

    @property
    def spans(self) -> list[Span]:
        if self.openings is None:
            return [(0, len(self.text), FREE)]
        ends = [0, *accumulate(map(len, self.said))]
        return [
            (start + ends[place], end + ends[place + 1], CLOSED_TURN)
            for start, end, place, _ in self.shape.turns
        ]

    @property
    def example(self) -> ChatExample:
        like = self.shape.example
        return ChatExample(
            self.messages, None, like.trained, like.all_tokens, like.has_parts, changes=like.changes
        )

    @property
    def changes(self) -> frozenset[str]:
        return self.shape.example.changes

    @property
    def prefix(self) -> tuple[int, ...]:
        return ()

    @property
    def suffix(self) -> tuple[int, ...]:
        return ()

    @property
    def tokens(self) -> TokensExample | None:
        return None

    @property
    def media(self) -> tuple[MediumPlace, ...]:
        return ()

    @property
    def removed(self) -> int:
        return 0  # its messages have a role and a text, which is in the render

    @property
    def head(self) -> str:
        return ""


AnySequence = Sequence | JoinedSequence
