"""Finds what in the blocks of a message is its own: rule 6 of `turn_spans`, and the look for text of others."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import cached_property

from raysvc.chat.render.rendered import Extent, Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.turns.turn_check import all_said, texts_of, unescaped
from raysvc.chat.turns.turn_signs import TurnSigns, common_prefix

NEAR = 8  # messages
LONG = 12  # characters that no two messages say by chance


class SaidTexts:
    """Holds what the messages of one row say, looked for in the trained text of others.

    Args:
        render: of the row.
        example: the row.
    """

    def __init__(self, render: Render, example: ChatExample) -> None:
        self.example, self._owners = example, render.owners

    @cached_property
    def _words(self) -> list[tuple[int, str, bool]]:
        """(place of a message, a text of it, whether that is long) of each."""
        found = (
            (place, text.strip()) for place, one in enumerate(self.example.messages) for text in texts_of(one)
        )
        return [(place, words, len(words) >= LONG) for place, words in found if words]

    def _near(self, place: int) -> list[tuple[int, str, bool]]:
        """Those of `_words` whose messages are `NEAR`, of a row of any length."""
        first, behind = (bisect_left(self._words, (edge,)) for edge in (place - NEAR, place + NEAR + 1))
        return self._words[first:behind]

    @cached_property
    def _unowned(self) -> set[int]:
        """Places of the messages without a block."""
        return {*range(len(self.example.messages))}.difference(self._owners)

    def foreign(self, stretch: str, place: int) -> str:
        """Returns what another message says and the trained text of this one holds, unless this one says it too; empty without."""
        own = ""
        for other, words, is_long in self._near(place):
            if not is_long or other == place or words not in stretch:
                continue
            own = own or all_said(self.example.messages[place])
            if unescaped(words) not in own:
                return words
        return ""

    def meets_others(self, stretch: str, place: int) -> bool:
        """Returns whether what another message says has to be looked for."""
        if self._unowned or self._answers(place):
            return True
        return any(
            words in stretch for other, words, is_long in self._near(place) if is_long and other != place
        )

    def _answers(self, place: int) -> bool:
        """Returns whether the result of a call follows."""
        after = self.example.messages[place + 1 : place + 2]
        return bool(after) and after[0].get("role") == "tool"

    def unowned(self, stretch: str, place: int) -> list[tuple[int, str]]:
        """(message without a block, the first of its texts that the trained text of this one holds)."""
        found: dict[int, str] = {}
        for other, words, _ in self._words if self._unowned else ():
            if other in self._unowned and other != place and words in stretch:
                found.setdefault(other, words)
        return [*found.items()]


def own_parts(signs: TurnSigns, render: Render, example: ChatExample, place: int) -> list[Extent]:
    """Rule 6: the blocks of a message without the tool results that the template writes into them.

    1. Where the results have blocks of their own, the message's blocks are its own; nothing may stand behind a result.
    2. Else the row is rendered without the results. What its block begins and ends with alike in both is its own.

    Raises:
        RowFault: the two cannot be told apart, or the template writes a text behind the results.
    """
    messages, text, extents = example.messages, render.text, render.extents_of(place)
    after = place + 1
    while after < len(messages) and messages[after].get("role") == "tool":
        after += 1
    results = [render.extents_of(other) for other in range(place + 1, after)]
    if len(extents) > 1 or all(results):
        first = min((begin for shown in results for begin, _ in shown), default=len(text))
        _refuse_behind_results(signs, "".join([text[a:b] for a, b in extents if a > first]))
        return [(a, b) for a, b in extents if not text[a:b].isspace()]
    start, end = extents[0]
    without = signs.template.render([*messages[: place + 1], *messages[after:]], example.tools)
    other = without.extents_of(place)
    if len(other) != 1:
        raise RowFault("a trained message and the results of its calls cannot be told apart")
    mine, bare = text[start:end], without.text[other[0][0] : other[0][1]]
    prefix = common_prefix(mine, bare)
    prefix = min(signs.tokens.around(each, prefix)[0] for each in (mine, bare))
    suffix = common_prefix(mine[prefix:][::-1], bare[prefix:][::-1])
    suffix = len(mine) - signs.tokens.around(mine, len(mine) - suffix)[1]
    _refuse_behind_results(signs, bare[prefix:])
    parts = [(start, start + prefix), (end - suffix, end)]
    return [(a, b) for a, b in parts if text[a:b].strip()]


def _refuse_behind_results(signs: TurnSigns, text: str) -> None:
    if signs.tokens.one.sub("", text).strip():
        raise RowFault("the template writes a text behind the results of its calls", repr(text[:60]))


def with_content(example: ChatExample, place: int, content: str) -> ChatExample:
    """The row with other words of one message."""
    messages = example.messages
    changed = {**messages[place], "content": content}
    return replace(example, messages=[*messages[:place], changed, *messages[place + 1 :]])
