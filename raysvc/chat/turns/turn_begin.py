"""Finds where the model begins to write in a block (rule 2 of `turn_spans`), by the generation prompt: what a template adds before an
answer when it is asked for one.
"""

from __future__ import annotations

from typing import Any

from raysvc.chat.render.rendered import Render
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.turns.turn_signs import QUIET, TurnSigns, follows_itself, say


class TurnBegin:
    """Finds where the turns of one template begin.

    Args:
        signs, prompts: of it.
    """

    def __init__(self, signs: TurnSigns, prompts: Prompts) -> None:
        self._signs, self._prompts, self._tokens = signs, prompts, signs.tokens

    def of(self, render: Render, example: ChatExample, place: int) -> int:
        """Returns where the repeated part of the generation prompt ends in the first block of a message.

        1. Behind what of the prompt is there.
        2. Else at the beginning of the block, where the header was written with the message before.
        3. Else behind the header of a plain turn.
        4. Else at the beginning, where the turn goes on, or the template writes no header.

        Raises:
            RowFault: the block begins with a header that is not known.
        """
        text, (begin, stop) = render.text, render.extents_of(place)[0]
        prompt = self._prompts.before(render, example, place, begin)
        if (
            not place and prompt and self._signs.has_prompt
        ):  # text before any message may begin the first block
            begin = self._tokens.place_of(prompt, text, begin, stop)
        repeated = self._tokens.repeated(prompt or "", text, begin)
        if repeated:
            return begin + repeated
        if self._signs.is_open(text, begin):
            return begin
        heads = self._signs.heads
        head = next((head for head in heads if text.startswith(head, begin)), "")
        if head:
            return begin + len(head)
        has_header = bool((prompt or "").strip() or heads)
        if self._signs.template.marks_generation or not has_header:
            return begin
        if self._goes_on(prompt, text, begin, example, place):
            return begin
        raise RowFault("a trained turn does not begin with a known header", repr(text[begin : begin + 60]))

    def _goes_on(self, prompt: str | None, text: str, begin: int, example: ChatExample, place: int) -> bool:
        """Returns whether there is no header because the turn of before goes on."""
        signs = self._signs
        if prompt is not None and signs.has_prompt and not signs.opens(prompt):
            return True
        lead = self._tokens.lead.match(text, begin)
        first = self._tokens.one.search(lead.group()) if lead else None
        if first is not None and first.group() in signs.inner - signs.opening:
            return True
        return follows_itself(example, place) and not self._tokens.closes(text, len(text[:begin].rstrip()))


class Prompts:
    """Knows the generation prompts of one template.

    Args:
        template: that is asked.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[tuple[str, bool, bool], str | None] = {}

    def before(self, render: Render, example: ChatExample, place: int, begin: int) -> str | None:
        """Returns what is added before a message, asked once for each kind of message before it unless words decide on it.

        Where that cannot be told, what is added behind a user's message; None: that neither.

        Args:
            render: of the example.
            place: of the message.
            begin: of its block.
        """
        before = example.messages[place - 1] if place else {}
        key = (str(before.get("role", "")), bool(before.get("tool_calls")), example.tools is not None)
        if key not in self._known or (place and self._template.words_decide_prompt):
            asked = self._asked(render, example, place, begin) if place else None
            self._known[key] = self._usual(example.tools) if asked is None else asked
        return self._known[key]

    def _usual(self, tools: list[Any] | None) -> str | None:
        plain = ChatExample([say("user", "a"), say("assistant", QUIET)], tools, ())
        try:
            render = self._template.render(plain.messages, tools)
        except RowFault:
            return None
        extents = render.extents_of(1)
        return self._asked(render, plain, 1, extents[0][0]) if extents else None

    def _asked(self, render: Render, example: ChatExample, place: int, begin: int) -> str | None:
        before = example.messages[:place]
        try:
            prompted = self._template.render(before, example.tools, prompt=True).text
            written = render.text[:begin]
            if prompted.startswith(written):
                return prompted[len(written) :]
            bare = self._template.render(before, example.tools)
        except RowFault:
            return None
        if prompted.startswith(bare.text):
            return prompted[len(bare.text) :]
        # a template that also writes something else before its last block, when it is asked
        _, found, added = prompted.rpartition(bare.blocks[-1])
        return added if found and added.strip() else None
