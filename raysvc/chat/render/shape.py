"""Shapes of plain rows: the template's literals around what the messages say, and the sequences that are joined from them.

Axes: N rows side by side, M messages of a row.
Always true:
- rows side by side give the sequences that each of them would give alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from raysvc.chat.render.plain_columns import PlainRow, given_to
from raysvc.chat.sequence import CLOSED_TURN, FREE, Sequence
from raysvc.chat.source.examples import ChatExample

PieceSpans = list[tuple[int, int, int, int, int]]
"""Spans of a text in pieces: a piece and bytes from its beginning, where one starts; the same for its end; its kind."""


class Turn(NamedTuple):
    """A span: its ends among the literals' characters, and which text it is around.

    `alone`: no other message can have a part in it, as only a header stands before its text, and a token behind it.
    """

    start: int
    end: int
    place: int
    alone: bool


@dataclass(frozen=True)
class Shape:
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
        removed: none, as its messages have a role and a text, which is in the render.
        head: none.
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
    removed: int = 0
    head: str = ""

    @property
    def changes(self) -> frozenset[str]:
        return self.example.changes

    @cached_property
    def literals(self) -> list[bytes]:
        """M + 1, in UTF-8."""
        return [(part or "").encode() for part in self.parts[::2]]

    @cached_property
    def spans(self) -> PieceSpans:
        """Of a row, whose pieces are literals and texts in turn, and an empty text at the end."""
        if self.openings is None:
            return [(0, 0, 2 * len(self.literals), 0, FREE)]
        found, whole = [], "".join(part or "" for part in self.parts)
        for start, end, place, _ in self.turns:
            at = len("".join(part or "" for part in self.parts[: 2 * place + 1]))
            before, behind = len(whole[start:at].encode()), len(whole[at:end].encode())
            found.append((2 * place + 1, -before, 2 * place + 2, behind, CLOSED_TURN))
        return found

    def joined(self, row: PlainRow | None, said: list[str]) -> Sequence:
        """The sequence of a plain row with these texts."""
        assert row
        text, like, ends = self.filled_in(said), self.example, [0, *accumulate(map(len, said))]
        spans = [(a + ends[n], b + ends[n + 1], CLOSED_TURN) for a, b, n, _ in self.turns]
        if self.openings is None:
            spans = [(0, len(text), FREE)]
        messages = given_to(row, like.has_parts)
        example = ChatExample(
            messages, None, like.trained, like.all_tokens, like.has_parts, changes=like.changes
        )
        return Sequence(text, spans, example=example, openings=self.openings)

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


@dataclass(slots=True)
class JoinedRows:
    """Rows side by side of known shapes; each is one sequence, made when it is asked for.

    Attributes:
        rows: N, plain ones.
        shapes: of each.
        said: of each what stands between the literals of its shape.
    """

    rows: list[PlainRow | None] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, part: slice) -> JoinedRows:
        return JoinedRows(self.rows[part], self.shapes[part], self.said[part])

    def __iter__(self) -> Iterator[Sequence]:
        return map(Shape.joined, self.shapes, self.rows, self.said)

    def pieces(self) -> list[bytes]:
        """Of all rows, in order, in UTF-8: literals and texts in turn, and an empty text at the end of a row."""
        texts = [*map(str.encode, chain.from_iterable([(*own, "") for own in self.said]))]
        pieces = [b""] * (2 * len(texts))
        pieces[::2] = chain.from_iterable([shape.literals for shape in self.shapes])
        pieces[1::2] = texts
        return pieces


Sequences = list[Sequence | JoinedRows]
"""Of some rows, in order."""


def count_of(one: Sequence | JoinedRows) -> int:
    """How many sequences it is."""
    return len(one) if isinstance(one, JoinedRows) else 1


def kinds_of(sequences: Sequences) -> Iterator[Sequence | Shape]:
    """What says of each sequence its openings, changes, removed reasoning and head."""
    return chain.from_iterable(one.shapes if isinstance(one, JoinedRows) else (one,) for one in sequences)


def one_by_one(some: Iterable[Sequence | JoinedRows | None]) -> Iterator[Any]:
    """All of them, made when they are asked for."""
    return chain.from_iterable(one if isinstance(one, JoinedRows) else (one,) for one in some)


def apart(sequences: Sequences, places: set[int]) -> Sequences:
    """The same, those at some places by themselves."""
    made: Sequences = []
    first = 0
    for one in sequences:
        inside = {place - first for place in places.intersection(range(first, first + count_of(one)))}
        if isinstance(one, JoinedRows) and inside:
            cuts = sorted({0, len(one), *inside, *(place + 1 for place in inside)})
            made += [one[a:b] for a, b in pairwise(cuts)]
        else:
            made.append(one)
        first += count_of(one)
    return made


def nth(sequences: Sequences, place: int) -> Sequence:
    """One of them, made."""
    for one in sequences:
        if place < count_of(one):
            break
        place -= count_of(one)
    return next(iter(one[place : place + 1])) if isinstance(one, JoinedRows) else one
