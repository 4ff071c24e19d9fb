"""Spans of turns that are built like an earlier one: what the template writes around a message is found once.

A turn is remembered as the literals around what its message says: `literal content literal`, or with calls
`literal content literal name literal arguments literal`. A later turn whose block is exactly that, with its own content,
names and arguments, has its span at the same literals.

Always true:
- a span is the one that `TurnFinder` gives: only what it looks at in such a turn decides, and all of it is in the key, in
  the literals, or asked again;
- a row goes to `TurnFinder` when one of its texts holds the first two characters of an added token or a tag, or ends with
  the first of them; so does a message with other fields than role, content and calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, compress, count
from typing import NamedTuple

from raysvc.chat.render.chat_environment import json_writer
from raysvc.chat.render.rendered import Render
from raysvc.chat.render.turn_check import is_empty
from raysvc.chat.render.turn_spans import ALL_EMPTY, TurnFinder, TurnSpan
from raysvc.chat.row_errors import RowDropped
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import Message

MAX_KINDS = 1024
_CALLING = {"role", "content", "tool_calls"}
_to_json = json_writer(allow_nan=False)
Key = tuple[object, ...]
_FOLLOWING, _GOES_ON = 3, 4  # where a key holds them


class _Turn(NamedTuple):
    """Literals around what is said, where the span begins, and how far before the block's end it ends.

    `alone`: whether no other message can have a part in it: only a header stands before its text, and only tokens behind it.
    """

    literals: tuple[str, ...]
    start: int
    left: int
    alone: bool


class _Row:
    """One render: where its blocks begin, and which one a message owns; -1 when it owns several.

    Attributes:
        words: what each message says, without blanks at its ends.
    """

    def __init__(self, render: Render, messages: list[Message], contents: list[str]) -> None:
        self.render, self._messages = render, messages
        self.words = [*map(str.strip, contents)]
        self.starts = [0, *accumulate(map(len, render.blocks))]
        self.block_of = dict(zip(render.owners, count()))
        if len(self.block_of) < len(render.owners):
            self.block_of |= {owner: -1 for owner, times in Counter(render.owners).items() if times > 1}
        self._sought: list[int] | None = None

    def meets_others(self, place: int, block: str) -> bool:
        """Whether a block may hold what another message says that `TurnFinder` looks for in the turns of others."""
        if self._sought is None:
            said = zip(self._messages, self.words, strict=True)
            self._sought = [
                n
                for n, (message, words) in enumerate(said)
                if len(words) >= 12 or (words and message["role"] == "tool")
            ]
            self._sought_words = [self.words[n] for n in self._sought]
        return [*compress(self._sought, map(block.__contains__, self._sought_words))] not in ([], [place])


class TurnMemory:
    """Remembers turns of one template.

    Args:
        finder: of the same template; finds every turn that is not remembered.
    """

    def __init__(self, finder: TurnFinder) -> None:
        self._finder = finder
        self._known: dict[Key, _Turn] = {}
        self._alone: dict[Key, _Turn] = {}  # of these, plain ones between two messages, by a part of the key
        self._openings = tuple(sorted(finder.openings))
        self._firsts = frozenset(opening[0] for opening in self._openings)
        self._json_hides = any(_to_json(text) != f'"{text}"' for text in self._openings)

    def spans(self, render: Render, example: ChatExample) -> list[TurnSpan]:
        """`TurnFinder.spans`.

        Raises:
            RowFault: a turn cannot be found or verified.
            RowDropped: all trained messages are empty.
        """
        messages = example.messages
        contents = [message.get("content", "") for message in messages]
        if not self._finder.ends_in_block or {*map(type, contents)} != {str} or not self._are_clean(contents):
            return self._finder.spans(render, example)
        row = _Row(render, messages, contents)
        spans: list[TurnSpan] = []
        for place in example.trained:
            if not row.words[place] and is_empty(messages[place]):
                continue
            known = self._plain_turn(row, example, place, contents[place])
            spans += self._turn(row, example, place) if known is None else (known,)
        if not spans:
            raise RowDropped(ALL_EMPTY)
        return spans

    def _plain_turn(self, row: _Row, example: ChatExample, place: int, content: str) -> TurnSpan | None:
        """The span of a text between two messages, where an earlier one was remembered as standing alone."""
        messages = example.messages
        if not content or not 0 < place < len(messages) - 1 or len(messages[place]) != 2:
            return None
        if self._finder.words_decide_prompt:
            return None
        before, block = messages[place - 1], row.block_of.get(place, -1)
        known = self._alone.get((before.get("role"), not before.get("tool_calls"), example.tools is None))
        if known is None or block < 0:
            return None
        text, start, (before_it, behind_it) = row.render.blocks[block], row.starts[block], known.literals
        if text != f"{before_it}{content}{behind_it}":
            return None
        return TurnSpan(start + known.start, start + len(text) - known.left, True)

    def _are_clean(self, texts: list[str]) -> bool:
        whole = "".join(texts)
        return not any(first in whole for first in self._firsts) or all(map(self._is_clean, texts))

    def _is_clean(self, text: str) -> bool:
        for opening in self._openings:
            if opening in text:
                return False
        return text[-1:] not in self._firsts and (not text[-1:].isspace() or self._is_clean(text.rstrip()))

    def _turn(self, row: _Row, example: ChatExample, place: int) -> list[TurnSpan]:
        block, said = row.block_of.get(place, -1), self._said(example.messages[place])
        if block < 0 or said is None:
            return self._finder.turn(row.render, example, place)
        text, start = row.render.blocks[block], row.starts[block]
        is_last = place == len(example.messages) - 1
        following = "".join(row.render.blocks[block + 1 :]) if is_last else None
        prompt = self._finder.prompt_by_words(row.render, example, place, start)
        key = _key(example, place, len(said), following, prompt)
        known = self._known.get(key)
        is_known = known is not None and text == _joined(known.literals, said)
        if known is not None and is_known and (known.alone or not row.meets_others(place, text)):
            return [TurnSpan(start + known.start, start + len(text) - known.left, True)]
        found = self._finder.turn(row.render, example, place)
        if len(found) == 1 and found[0].closed and not row.meets_others(place, text):
            header = self._finder.header(row.render, example, place)
            self._keep(key, text, said, (found[0].start - start, found[0].end - start), header)
        return found

    def _said(self, message: Message) -> list[str] | None:
        """What of a message its block shows, in order; None when it is more than text and calls."""
        content = message.get("content", "")
        if len(message) == 2 and content:
            return [content]
        calls = message.get("tool_calls")
        if not calls or self._json_hides or not message.keys() <= _CALLING:
            return None
        said = [content] if content else []
        for call in calls:
            function = call.get("function") if type(call) is dict else None
            if type(function) is not dict or type(function.get("arguments")) is not dict:
                return None
            name = function.get("name")
            if type(name) is not str or not name:
                return None
            try:
                said += [name, _to_json(function["arguments"])]
            except (ValueError, TypeError):
                return None
        return said if self._are_clean(said) else None

    def _keep(self, key: Key, text: str, said: list[str], span: tuple[int, int], header: str) -> None:
        """Remember a turn when its span depends on the literals alone."""
        literals = _literals(text, said)
        if literals is None or len(self._known) >= MAX_KINDS:
            return
        (start, end), first, last = span, literals[0], literals[-1]
        tail = text[len(text) - len(last) : end]
        opens = (not header or header.strip()) and first.startswith(header)
        whole = not any(literal[-1:] in self._firsts for literal in literals[:-1])
        if opens and whole and end <= len(text):
            alone = len(said) == 1 and not first[start:].strip() and self._finder.is_end(tail)
            turn = self._known[key] = _Turn(literals, start, len(text) - end, alone)
            if alone and key[_FOLLOWING] is None and not key[_GOES_ON]:
                self._alone[key[:_FOLLOWING]] = turn


def _key(example: ChatExample, place: int, pieces: int, following: str | None, prompt: str | None) -> Key:
    """All that decides on a span beside the text of the block; what follows it, where no other message does.

    The turn of a message may go on with the next one, if that is the assistant's too.
    """
    messages = example.messages
    before = messages[place - 1] if place else {}
    return (
        before.get("role"),
        not before.get("tool_calls"),
        example.tools is None,
        following,
        following is None and messages[place + 1].get("role") == messages[place].get("role"),
        pieces,
        prompt,
    )


def _joined(literals: tuple[str, ...], said: list[str]) -> str:
    if len(said) == 1:
        return f"{literals[0]}{said[0]}{literals[1]}"
    return literals[0] + "".join([part for pair in zip(said, literals[1:], strict=True) for part in pair])


def _literals(text: str, said: Iterable[str]) -> tuple[str, ...] | None:
    """What stands around texts that follow each other, None when that is not clear."""
    literals = []
    for part in said:
        before, found, text = text.partition(part)
        if not found:
            return None
        literals.append(before)
    return (*literals, text)
