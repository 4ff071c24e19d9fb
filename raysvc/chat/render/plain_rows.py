"""Rows of plain texts that are built like an earlier one: the template's literals around what the messages say.

1. A row is plain when its messages have a role and a text and nothing else, and no other column has a part in it. All the
   texts may be lists of one text part.
2. The first plain row with some roles goes the whole way: rendered, its turns found and verified. What stands around its
   texts is kept as the shape of these roles.
3. A later one walks through the automaton too. When it writes the shape's literals around its own texts, for the same
   messages, its spans are at the same literals.

Always true:
- the text is what the template's automaton writes for this row, and the rows that are due for a real render get one;
- a span is the one that `TurnFinder` gives: no text holds the beginning of an added token or a tag, the generation prompt
  lies in the literals, and no other message's text can stand in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.chat.render.rendered import NOBODY, Render, Written, extents_of, render_of
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.turn_spans import TurnFinder, common_prefix
from raysvc.chat.sequence import CLOSED_TURN, FREE, Sequence, Span
from raysvc.chat.source.content_parts import text_of_part
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.formats import USED, Format
from raysvc.chat.source.messages import Message
from raysvc.chat.text_batch import Batch, Bytes, Ints64

MAX_SHAPES = 1024
MAX_TRIES = 8  # rows of the same roles that leave no shape; some fail for what they say
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


class _Plain(NamedTuple):
    """Messages of a plain row: those of the source, the role and text of each, and whether the texts are parts."""

    messages: list[Message]
    roles: tuple[str, ...]
    said: list[str]
    in_parts: bool

    @property
    def kind(self) -> tuple[bool, tuple[str, ...]]:
        """What rows of one shape have in common before they are rendered."""
        return self.in_parts, self.roles

    def given(self, has_parts: bool) -> list[Message]:
        """Messages for a template that takes parts, or texts."""
        if has_parts == self.in_parts:
            return self.messages
        return [{**message, "content": text} for message, text in zip(self.messages, self.said, strict=True)]


class _Turn(NamedTuple):
    """A span: its ends among the literals' characters, and which text it is around.

    `alone`: no other message can have a part in it, as only a header stands before its text, and a token behind it.
    """

    start: int
    end: int
    place: int
    alone: bool


class _Shape(NamedTuple):
    """What plain rows with the same roles have in common.

    Attributes:
        parts: literals, and None between them for the texts.
        owners: of each stretch that is written, the place of its message, -1 for nobody's.
        marks: of each stretch, whether it is inside `{% generation %}`.
        sizes: of each stretch the characters of literals and the places of the texts in it, where there are marks.
        openings: beginnings of tokens and tags in the literals.
        turns: under loss.
        alone: all of them are.
        example: the row that it was learned from.
    """

    parts: list[str | None]
    owners: tuple[int, ...]
    marks: tuple[bool, ...]
    sizes: list[tuple[int, tuple[int, ...]]]
    openings: int
    turns: tuple[_Turn, ...]
    alone: bool
    example: ChatExample


class PlainRows:
    """Shapes of the rows of one format.

    Args:
        template: of rows without tools, with a fast way.
        finder: of the same template.
        form: chat, one conversation a row.
    """

    def __init__(self, template: ChatTemplate, finder: TurnFinder, form: Format) -> None:
        self._fast, self._shown, self._finder = template.fast, template.shown, finder
        self._pairs: dict[
            int, npt.NDArray[np.bool_]
        ] = {}  # first byte of tokens -> which bytes may be their second
        for first, *second in {opening.encode()[:2] for opening in finder.openings}:
            allowed = self._pairs.setdefault(first, np.zeros(256, np.bool_))
            allowed[second or slice(None)] = True
        self._firsts = {opening[0] for opening in finder.openings}
        self._column = form.column("messages")
        self._others = {*map(form.column, USED), *form.refused} - {self._column}
        self._asked: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._shapes: dict[tuple[bool, tuple[str, ...]], _Shape] = {}
        self._tries: Counter[tuple[bool, tuple[str, ...]]] = Counter()

    def sequence(self, row: Mapping[str, Any]) -> Sequence | None:
        """The sequence of a plain row whose shape is known, None for any other."""
        plain = self._plain(row)
        shape = self._shapes.get(plain.kind) if plain else None
        if plain is None or shape is None or self._fast is None:
            return None
        known, said = shape.example, plain.said
        messages = plain.given(known.has_parts)
        shown = self._shown(messages)
        written = self._fast.stretches(shown)
        if written is None:
            return None
        marks, owners, texts = zip(*written, strict=True)
        text = "".join(texts)
        example = ChatExample(
            messages, None, known.trained, known.all_tokens, known.has_parts, changes=known.changes
        )
        if known.all_tokens:
            return Sequence(text, [(0, len(text), FREE)], example=example)
        parts = shape.parts.copy()
        parts[1::2] = said
        if text != "".join(parts) or marks != shape.marks:  # type: ignore[arg-type]
            return None
        them = [*shown, None]
        if owners != tuple([them[place] for place in shape.owners]) or not _same_sizes(shape, said, texts):
            return None
        if shape.alone:  # only what goes on as a token behind a text can be another message's
            seen = not self._firsts.isdisjoint([words.rstrip()[-1] for words in said])
        else:
            seen = any(text.count(words) > 1 for words in map(str.strip, said))
        if seen:
            return None
        return Sequence(text, _spans(shape, said), example=example, openings=shape.openings)

    def doubtful(self, sequences: list[Sequence], batch: Batch) -> list[int]:
        """Sequences of known shapes in which more tokens or tags may stand than the shape has."""
        expected = [sequence.openings for sequence in sequences]
        if expected.count(None) == len(expected):
            return []
        begins = self._begins(batch.data)
        rows = np.searchsorted(batch.offsets, begins, "right") - 1
        found = np.bincount(rows, minlength=len(sequences)).tolist()
        return [n for n, count in enumerate(expected) if count is not None and count != found[n]]

    def learn(self, row: Mapping[str, Any], sequence: Sequence) -> None:
        """Keep the shape of a row that went the whole way, when its spans depend on the literals alone."""
        plain, example = self._plain(row), sequence.example
        if plain is None or self._fast is None or not isinstance(example, ChatExample):
            return
        if plain.kind in self._shapes or len(self._shapes) >= MAX_SHAPES:
            return
        if example.messages != plain.given(example.has_parts) or self._tries[plain.kind] >= MAX_TRIES:
            return
        self._tries[plain.kind] += 1
        shown = self._shown(example.messages)
        written = self._fast.stretches(shown)
        if written and "".join(text for _, _, text in written) == sequence.text:
            shape = self._shape(sequence, example, plain.said, shown, written)
            if shape is not None:
                self._shapes[plain.kind] = shape

    def _plain(self, row: Mapping[str, Any]) -> _Plain | None:
        """Messages of a plain row, all of which say something."""
        names = tuple(row)
        if names not in self._asked:
            self._asked[names] = tuple(sorted(self._others.intersection(names)))
        for name in self._asked[names]:
            if row[name] not in (None, "", []):
                return None
        messages = row.get(self._column)
        if type(messages) is not list:
            return None
        try:
            roles, said = tuple(map(_ROLE, messages)), [*map(_CONTENT, messages)]
        except (KeyError, TypeError):
            return None
        in_parts = list in map(type, said)
        if in_parts:
            said = [*map(text_of_part, said)]
        if {*map(type, said), *map(type, roles)} != {str} or sum(map(len, messages)) != 2 * len(messages):
            return None
        if not all(said) or any(map(str.isspace, said)):
            return None
        return _Plain(messages, roles, said, in_parts)

    def _shape(
        self,
        sequence: Sequence,
        example: ChatExample,
        said: list[str],
        shown: list[Message],
        written: list[Written],
    ) -> _Shape | None:
        if example.all_tokens:
            return _Shape([], (), (), [], 0, (), True, example)
        literals = _literals(sequence.text, said)
        if literals is None or any(message["role"] == "tool" for message in example.messages):
            return None
        openings = self._count(sequence.text)
        if openings != sum(map(self._count, literals)):
            return None
        render = render_of(written, shown)
        turns = self._turns(sequence, example, render, said, literals)
        if turns is None:
            return None
        places = {id(message): place for place, message in enumerate(shown)}
        owners = tuple(places.get(id(owner), NOBODY) for _, owner, _ in written)
        parts: list[str | None] = [None] * (2 * len(literals) - 1)
        parts[::2] = literals
        marks = tuple(mark for mark, _, _ in written)
        sizes = _sizes(said, [text for _, _, text in written]) if any(marks) else []
        alone = all(turn.alone for turn in turns)
        return _Shape(parts, owners, marks, sizes, openings, turns, alone, example)

    def _begins(self, data: Bytes) -> Ints64:
        """Where tokens and tags may begin, by their first two bytes."""
        found = []
        for first, behind in self._pairs.items():
            at = np.flatnonzero(data == first)
            next_to = data[np.minimum(at + 1, len(data) - 1)]
            found.append(at[behind[next_to]])
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def _count(self, text: str) -> int:
        return len(self._begins(np.frombuffer(text.encode(), np.uint8)))

    def _turns(
        self,
        sequence: Sequence,
        example: ChatExample,
        render: Render,
        said: list[str],
        literals: list[str],
    ) -> tuple[_Turn, ...] | None:
        if len(sequence.spans) != len(example.trained):
            return None
        before = list(accumulate(map(len, literals)))
        texts = list(accumulate(map(len, said), initial=0))
        turns = []
        for (start, end, kind), place in zip(sequence.spans, example.trained, strict=True):
            extents, at = extents_of(render, place), before[place] + texts[place]
            behind = at + texts[place + 1] - texts[place]
            if len(extents) != 1 or kind != CLOSED_TURN or not start <= at < behind < end:
                return None
            header, begin, text = self._finder.header(render, example, place), extents[0][0], sequence.text
            opens = not header or (header.strip() and self._opens(header, text[begin:at]))
            if not opens:
                return None
            alone = not text[start:at].strip() and text[behind:end].lstrip()[:2] in self._finder.openings
            turns.append(_Turn(start - texts[place], end - texts[place + 1], place, alone))
        return tuple(turns)

    def _opens(self, prompt: str, literal: str) -> bool:
        """Whether a literal alone says how much of the prompt is repeated: a text cannot go on with a token or tag."""
        same = common_prefix(prompt, literal)
        return same < len(literal) or same == len(prompt) or prompt[same : same + 2] in self._finder.openings


def _sizes(said: list[str], texts: Iterable[str]) -> list[tuple[int, tuple[int, ...]]]:
    """Of each stretch the characters of its literals, and the places of the texts in it."""
    inside = [(text, tuple(place for place, part in enumerate(said) if part in text)) for text in texts]
    return [(len(text) - sum(len(said[place]) for place in places), places) for text, places in inside]


def _same_sizes(shape: _Shape, said: list[str], texts: Iterable[str]) -> bool:
    """Whether stretches end where those of the shape do: the ends of marks are among them."""
    if not shape.sizes:
        return True
    sizes = zip(shape.sizes, texts, strict=True)
    return all(len(text) == size + sum(len(said[n]) for n in places) for (size, places), text in sizes)


def _spans(shape: _Shape, said: list[str]) -> list[Span]:
    sizes = [0, *accumulate(map(len, said))]
    return [
        (start + sizes[place], end + sizes[place + 1], CLOSED_TURN) for start, end, place, _ in shape.turns
    ]


def _literals(text: str, said: list[str]) -> list[str] | None:
    """What stands around texts that follow each other, None when one of them is in it more than once."""
    literals = []
    for part in said:
        if text.count(part) != 1:
            return None
        before, _, text = text.partition(part)
        literals.append(before)
    return [*literals, text]
