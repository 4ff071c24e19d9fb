"""The generation prompt: what a template adds before an answer when it is asked for one."""

from __future__ import annotations

from typing import Any

from raysvc.chat.render.rendered import Render
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.turns.turn_probes import QUIET, say


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
