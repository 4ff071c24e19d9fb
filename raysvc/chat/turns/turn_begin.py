"""Finds where the model begins to write in a block: rule 2 of `turn_spans`."""

from __future__ import annotations

from raysvc.chat.render.rendered import Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.turns.prompts import Prompts
from raysvc.chat.turns.turn_signs import TurnSigns, follows_itself


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
