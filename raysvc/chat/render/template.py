"""One compiled chat template: renders a conversation and says which message wrote which characters.

Always true:
- the text is what `apply_chat_template(tokenize=False)` gives for the same messages, or the same error is raised;
- the blocks of a render, joined, are its text; each has one owner: a message's place, or -1 for none;
- `{% generation %}` spans are given as the template marks them, inside the block that holds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from raysvc.chat.bounds.budget import OverBudget
from raysvc.chat.render.prompt_words import words_decide
from raysvc.chat.render.real_render import RealRender, costly_template
from raysvc.chat.render.rendered import NOBODY, Extent, Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.media_parts import in_parts
from raysvc.chat.source.messages import Message
from raysvc.chat.turns.turn_check import is_empty

MAX_COSTLY = 3  # renders
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}(?!\s*\{%[-+]?\s*endgeneration\b)")


class ChatTemplate:
    """A template, compiled once.

    Args:
        text: Jinja source.
        variables: what the template sees beside messages and tools.
        now: what `strftime_now` shows in all renders; the time of this call when not given.
        in_parts: give it every text as a content part, because it takes nothing else.

    Attributes:
        text: Jinja source.
        marks_generation: it has `{% generation %}` around something.
        words_decide_prompt: the generation prompt may be another one with other words in the messages.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(
        self,
        text: str,
        variables: Mapping[str, Any],
        now: datetime | None = None,
        in_parts: bool = False,
    ) -> None:
        self.text = text
        self.marks_generation = bool(_MARK.search(text))
        now = now or datetime.now()
        self._render = RealRender(text, variables, now).render
        self.words_decide_prompt = words_decide(text)
        self._in_parts = in_parts
        self._ended = self._costly = 0  # renders

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> Render:
        """Render one conversation.

        Args:
            messages: as `read_messages` gives them.
            tools: or None.
            prompt: add the generation prompt.

        Raises:
            RowFault: the template raised.
            TokenizerError: it takes more than a render may, of most rows.
        """
        messages = self.shown(messages)
        if len({*map(id, messages)}) != len(messages):
            messages = [dict(message) for message in messages]  # blocks find their message by identity
        render = self._render_once(messages, tools, prompt)
        if prompt or {*render.owners}.issuperset(range(len(messages))):
            return render
        render = self._with_last(render, messages, tools)
        if all(place in render.owners for place, message in enumerate(messages) if _speaks(message)):
            return render
        return self._by_prefixes(render, messages, tools)

    def shown(self, messages: list[Message]) -> list[Message]:
        """Messages as the template sees them."""
        return in_parts(messages) if self._in_parts else messages

    def _render_once(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        try:
            made = self._render(messages, tools, prompt)
        except OverBudget as fault:
            self._costly += 1
            if self._costly >= MAX_COSTLY and self._costly > self._ended:
                raise costly_template(fault) from None
            raise
        self._ended += 1
        return made

    def _with_last(self, render: Render, messages: list[Message], tools: list[Any] | None) -> Render:
        """With the end of the text as the last message's, where the template writes that one outside of its loop."""
        last = len(messages) - 1
        if not last or render.owners[-1:] != [NOBODY] or last in render.owners:
            return render
        try:
            before = self._render_once(messages[:-1], tools, False).text
        except RowFault:
            return render
        if before != render.text[: render.bounds[-2]]:
            return render
        return Render(render.text, render.bounds, [*render.owners[:-1], last], render.marks)

    def _by_prefixes(self, render: Render, messages: list[Message], tools: list[Any] | None) -> Render:
        """Blocks of a template that writes from a list of its own: from renders of shorter conversations.

        Where a shorter one is written differently, the messages around its end share a block of nobody's.
        """
        text, bounds = render.text, [(0, 0)]
        for count in range(1, len(messages)):
            try:
                shorter = self._render_once(messages[:count], tools, False).text
            except RowFault:
                continue
            if text.startswith(shorter) and len(shorter) >= bounds[-1][1]:
                bounds.append((count, len(shorter)))
        begins: list[int] = []
        owners: list[int] = []
        for (first, start), (last, end) in pairwise([*bounds, (len(messages), len(text))]):
            owner = first if last == first + 1 else NOBODY
            if start < end and owners[-1:] != [owner]:
                begins.append(start)
                owners.append(owner)
        cuts = [*begins, len(text)]
        return Render(text, cuts, owners, _cut(render.marks, cuts))


def _speaks(message: Message) -> bool:
    return message.get("role") == "assistant" and not is_empty(message)


def _cut(marks: list[Extent], cuts: list[int]) -> list[Extent]:
    """Marks of a text that is cut into blocks, each inside of one."""
    pieces = ((max(a, begin), min(b, end)) for begin, end in pairwise(cuts) for a, b in marks)
    return [(a, b) for a, b in pieces if a < b]
