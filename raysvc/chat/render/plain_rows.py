"""Rows of plain texts that are built like an earlier one: the template's literals around what the messages say.

1. What plain rows say is found for all rows of a chunk at once (`plain_columns`).
2. The first plain row with some roles goes the whole way: rendered, its turns found and verified. What stands around its
   texts is kept as the shape of these roles.
3. A later one walks through the automaton too. When it writes the shape's literals around its own texts, for the same
   messages, its spans are at the same literals.
4. When a row of a known shape is due for a real render, the shape is looked at closer. Where a trace shows that the words of
   the texts decide on nothing, later rows are the literals with their own texts in between, as long as these have no blanks
   at their ends. As many of these as stand side by side are made at once.

Always true:
- the text is what the template's automaton writes for this row, and the rows that are due for a real render get one;
- a span is the one that `TurnFinder` gives: no text holds the beginning of an added token or a tag, the generation prompt
  lies in the literals, and no other message's text can stand in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate, repeat, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.chat.render.plain_columns import PlainRow, given_to, plain_rows_of
from raysvc.chat.render.real_render import FREE_CHARS
from raysvc.chat.render.rendered import NOBODY, Render, Written, extents_of, render_of
from raysvc.chat.render.shape import JoinedRows, Sequences, Shape, Turn, kinds_of
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.turn_spans import TurnFinder, common_prefix
from raysvc.chat.sequence import CLOSED_TURN, Sequence
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.formats import USED, Format
from raysvc.chat.source.messages import Message
from raysvc.chat.text_batch import Batch, Bytes, Ints64
from raysvc.chat.trace.fast_render import FastRender

MAX_SHAPES = 1024
MAX_TRIES = 8  # rows of the same roles that leave no shape; some fail for what they say


Kind = tuple[bool, tuple[str, ...]]
"""Whether the texts of a row are parts, and its roles."""


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
        self._firsts = frozenset(opening[0] for opening in finder.openings)
        self._column = form.column("messages")
        self._others = frozenset((*map(form.column, USED), *form.refused)) - {self._column}
        self._shapes: dict[Kind, Shape] = {}
        self._safe: dict[Kind | None, Shape] = {}  # filled in by texts, without a look at the row
        self._may_fill_in = True  # no shape was found that texts do not fill in
        self._tries: Counter[Kind] = Counter()

    def sequences(self, rows: Many[Mapping[str, Any]]) -> Iterator[JoinedRows | None]:
        """Of each row, once it is asked for, the sequence of a plain one whose shape is known, None of any other.

        Those of rows side by side come together.
        """
        plain = self._plain(rows)
        if not any(plain):
            yield from repeat(None, len(plain))
            return
        kinds = [(row[3], row[1]) if row and not row[4] and not row[5] else None for row in plain]
        made, place = JoinedRows(), 0
        while place < len(plain):
            shapes = self._filled_in(kinds, place) if kinds[place] in self._safe else []
            own = plain[place : place + (len(shapes) or 1)]
            found = (shapes, [row[2] for row in own if row]) if shapes else self._looked_at(own[0])
            if found:
                made.rows += own
                made.shapes += found[0]
                made.said += found[1]
            else:
                if made:
                    yield made
                yield None
                made = JoinedRows()
            place += len(own)
        if made:
            yield made

    def _filled_in(self, kinds: list[Kind | None], first: int) -> list[Shape]:
        """From the first on shapes of as many rows as texts fill in, before one is due for a real render."""
        assert self._fast is not None
        own = kinds[first : first + self._fast.rows_to_go]
        shapes = [shape for shape in takewhile(bool, map(self._safe.get, own)) if shape]
        self._fast.counts["walked"] += len(shapes)
        return shapes

    def _plain(self, rows: Many[Mapping[str, Any]]) -> list[PlainRow | None]:
        return plain_rows_of(rows, self._column, self._others, self._firsts)

    def _looked_at(self, plain: PlainRow | None) -> tuple[list[Shape], list[list[str]]] | None:
        """(shape of one row, what it says), None where the shape is not known or cannot say it."""
        fast = self._fast
        if plain is None or fast is None:
            return None
        _, roles, said, in_parts, padded, opens = plain
        shape = self._shapes.get((in_parts, roles))
        if shape is None:
            return None
        if shape.fills_in and shape.openings is not None and not padded and fast.rows_to_go:
            fast.counts["walked"] += 1
            text = shape.filled_in(said)
        else:
            walked = self._walked(fast, shape, said, self._shown(given_to(plain, shape.example.has_parts)))
            if walked is None:
                return None
            text = walked
        if shape.openings is None:
            return [shape], [[text]]
        # alone, only what goes on as a token behind a text can be another message's
        seen = opens if shape.alone else any(text.count(words.strip()) > 1 for words in said)
        return None if seen else ([shape], [said])

    def _walked(self, fast: FastRender, shape: Shape, said: list[str], shown: list[Message]) -> str | None:
        """What the template writes for a row, None when that is not the shape's literals around its texts."""
        written = fast.stretches(shown)
        if written is None:
            return None
        marks, owners, texts = zip(*written, strict=True)
        text = "".join(texts)
        if len(text) > FREE_CHARS:
            return None
        if shape.openings is None:
            return text
        if text != shape.filled_in(said) or marks != shape.marks:
            return None
        them = [*shown, None]
        same = owners == tuple([them[place] for place in shape.owners])
        return text if same and shape.has_sizes(said, texts) else None

    def doubtful(self, sequences: Sequences, batch: Batch) -> list[int]:
        """Sequences of known shapes in which more tokens or tags may stand than the shape has."""
        expected = [one.openings for one in kinds_of(sequences)]
        if expected.count(None) == len(expected):
            return []
        found = np.diff(np.searchsorted(self._begins(batch.data), batch.offsets)).tolist()
        return [n for n, count in enumerate(expected) if count is not None and count != found[n]]

    def learn(self, row: Mapping[str, Any], sequence: Sequence) -> None:
        """Keep the shape of a row that went the whole way, when its spans depend on the literals alone."""
        example = sequence.example
        if self._fast is None or not isinstance(example, ChatExample) or example.tools or example.has_calls:
            return
        (plain,) = self._plain([row])
        if plain is None:
            return
        _, roles, said, in_parts, *_ = plain
        kind = in_parts, roles
        if kind in self._shapes:
            self._look_closer(kind)
        if kind in self._shapes or len(self._shapes) >= MAX_SHAPES:
            return
        if example.messages != given_to(plain, example.has_parts) or self._tries[kind] >= MAX_TRIES:
            return
        self._tries[kind] += 1
        shown = self._shown(example.messages)
        written = self._fast.stretches(shown)
        if written and "".join(text for _, _, text in written) == sequence.text:
            shape = self._shape(sequence, example, said, shown, written)
            if shape is not None:
                self._shapes[kind] = shape

    def _shape(
        self,
        sequence: Sequence,
        example: ChatExample,
        said: list[str],
        shown: list[Message],
        written: list[Written],
    ) -> Shape | None:
        if example.all_tokens:
            return Shape(["", None, ""], (), (), [], None, (), True, example)
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
        marks = tuple(mark for mark, _, _ in written)
        sizes = _sizes(said, [text for _, _, text in written]) if any(marks) else []
        alone = all(turn.alone for turn in turns)
        parts = _around_texts(literals)
        return Shape(parts, owners, marks, sizes, openings, turns, alone, example)

    def _look_closer(self, kind: Kind) -> None:
        """Trace whether texts fill in a shape that has been walked often: a row of it was due for a real render."""
        shape = self._shapes[kind]
        if shape.fills_in or shape.example.has_parts or not self._may_fill_in:
            return
        literals = self._literals(shape.example)
        parts = _around_texts(literals or [])
        self._may_fill_in = bool(literals) and (shape.openings is None or parts == shape.parts)
        if self._may_fill_in:
            self._shapes[kind] = replace(shape, fills_in=True)
            if shape.openings is None or shape.alone:
                self._safe[kind] = replace(shape, parts=parts, fills_in=True)

    def _literals(self, example: ChatExample) -> list[str] | None:
        """What is around the texts of all rows with these roles, None when the words of the texts decide on anything."""
        places = [str(place) for place in range(len(example.messages))]
        rows = zip(example.messages, places, strict=True)
        messages = [{"role": message["role"], "content": f"\ue000{place}\ue001"} for message, place in rows]
        text = self._fast.filled_in(self._shown(messages)) if self._fast else None
        pieces = re.split("\ue000(\\d+)\ue001", text or "")
        return pieces[::2] if pieces[1::2] == places else None

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
    ) -> tuple[Turn, ...] | None:
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
            turns.append(Turn(start - texts[place], end - texts[place + 1], place, alone))
        return tuple(turns)

    def _opens(self, prompt: str, literal: str) -> bool:
        """Whether a literal alone says how much of the prompt is repeated: a text cannot go on with a token or tag."""
        same = common_prefix(prompt, literal)
        return same < len(literal) or same == len(prompt) or prompt[same : same + 2] in self._finder.openings


def _around_texts(literals: list[str]) -> list[str | None]:
    """Literals with room for a text between each two."""
    parts: list[str | None] = [None] * max(2 * len(literals) - 1, 0)
    parts[::2] = literals
    return parts


def _sizes(said: list[str], texts: Iterable[str]) -> list[tuple[int, tuple[int, ...]]]:
    """Of each stretch the characters of its literals, and the places of the texts in it."""
    inside = [(text, tuple(place for place, part in enumerate(said) if part in text)) for text in texts]
    return [(len(text) - sum(len(said[place]) for place in places), places) for text, places in inside]


def _literals(text: str, said: list[str]) -> list[str] | None:
    """What stands around texts that follow each other, None when one of them is in it more than once."""
    literals = []
    for part in said:
        if text.count(part) != 1:
            return None
        before, _, text = text.partition(part)
        literals.append(before)
    return [*literals, text]
