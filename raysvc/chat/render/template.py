"""One compiled chat template: renders a conversation and says which message wrote which characters.

Always true:
- the text is what `apply_chat_template(tokenize=False)` gives for the same messages, or the same error is raised;
- the blocks of a render, joined, are its text; each has one owner: a message's place, or -1 for none;
- `{% generation %}` spans are given as the template marks them, inside the block that holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from typing import Any

from raysvc.chat.bounds.budget import OverBudget
from raysvc.chat.render.compiled import costly_template
from raysvc.chat.render.prompt_words import words_decide
from raysvc.chat.render.real_render import RealRender
from raysvc.chat.render.rendered import NOBODY, Render, marks_within
from raysvc.chat.render.turn_check import is_empty
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.media_parts import in_parts
from raysvc.chat.source.messages import Message, is_plain
from raysvc.chat.trace.fast_render import FastRender
from raysvc.chat.trace.self_test import tracing_works

MAX_COSTLY = 3  # renders
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}(?!\s*\{%[-+]?\s*endgeneration\b)")


class ChatTemplate:
    """A template, compiled once.

    Args:
        text: Jinja source.
        variables: what the template sees beside messages and tools.
        fast: false renders every row for real, as where tracing does not work.
        now: what `strftime_now` shows in all renders; the time of this call when not given.
        in_parts: give it every text as a content part, because it takes nothing else.

    Attributes:
        text: Jinja source.
        marks_generation: it has `{% generation %}` around something.
        words_decide_prompt: the generation prompt may be another one with other words in the messages.
        fast: the fast way, None when there is none.
        render_really: renders (messages, tools, prompt) by the template itself.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(
        self,
        text: str,
        variables: Mapping[str, Any],
        fast: bool = True,
        now: datetime | None = None,
        in_parts: bool = False,
    ) -> None:
        self.text = text
        self.marks_generation = bool(_MARK.search(text))
        now = now or datetime.now()
        self.render_really = RealRender(text, variables, now).render
        self.words_decide_prompt = words_decide(text)
        self._in_parts = in_parts
        self._ended = self._costly = 0  # renders, but for plain rows that were walked
        self._learns = True
        fast = fast and tracing_works()
        self.fast = FastRender(text, variables, self.render_really, now) if fast else None

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
        if prompt or not messages:
            return render
        render = self._with_last(render, messages, tools)
        if all(place in render.owners for place, message in enumerate(messages) if _speaks(message)):
            return render
        return self._by_prefixes(render, messages, tools)

    def rendered_text(self, messages: list[Message], tools: list[Any] | None) -> str:
        """The text of `render`, without the question of who wrote what.

        Raises:
            RowFault: the template raised.
        """
        written = self.fast.stretches(self.shown(messages), tools) if self.fast else None
        if written is None:
            return self.render(messages, tools).text
        return "".join([text for _, _, text in written])

    @contextmanager
    def only_asked(self) -> Iterator[None]:
        """Render for real within it: to learn the way of a conversation that no row is like costs five renders."""
        self._learns = False
        try:
            yield
        finally:
            self._learns = True

    def shown(self, messages: list[Message]) -> list[Message]:
        """Messages as the template sees them."""
        return in_parts(messages) if self._in_parts else messages

    def _render_once(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        by_trace = self.fast.render if self.fast is not None and self._learns else None
        try:
            made = (by_trace or self.render_really)(messages, tools, prompt)
        except OverBudget as fault:
            self._costly += 1
            walked = self.fast.counts["walked"] if self.fast else 0
            if self._costly >= MAX_COSTLY and self._costly > max(self._ended, walked):
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
        if before != "".join(render.blocks[:-1]):
            return render
        return Render(render.blocks, [*render.owners[:-1], last], render.marks)

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
        blocks: list[str] = []
        owners: list[int] = []
        for (first, start), (last, end) in pairwise([*bounds, (len(messages), len(text))]):
            owner = first if last == first + 1 else NOBODY
            if start == end:
                continue
            if owners[-1:] == [owner]:
                blocks[-1] += text[start:end]
            else:
                blocks.append(text[start:end])
                owners.append(owner)
        return Render(blocks, owners, _marks_of(render, blocks))


def _speaks(message: Message) -> bool:
    return message.get("role") == "assistant" and not is_empty(message)


def _marks_of(render: Render, blocks: list[str]) -> list[tuple[int, int, int]]:
    """The marks of a render whose text is cut into other blocks."""
    marks, begin = [], 0
    given = marks_within(render, [(0, len(render.text))])
    for number, block in enumerate(blocks):
        end = begin + len(block)
        inside = ((max(a, begin), min(b, end)) for a, b in given)
        marks += [(number, a - begin, b - begin) for a, b in inside if a < b]
        begin = end
    return marks


def plain_data(value: Any) -> Any:
    """Plain JSON types, as `apply_chat_template` makes them of anything else."""
    if is_plain(value):
        return value
    from transformers.utils import chat_template_utils as theirs

    return theirs._plain_template_data(value)
