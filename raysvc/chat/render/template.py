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

from raysvc.chat.render.real_render import RealRender
from raysvc.chat.render.rendered import NOBODY, Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.media_parts import in_parts
from raysvc.chat.source.messages import Message, is_plain
from raysvc.chat.trace.fast_render import FastRender
from raysvc.chat.trace.self_test import tracing_works

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


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
        marks_generation: it has `{% generation %}`.
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
        self._in_parts = in_parts
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
        """
        messages = self.shown(messages)
        if len({*map(id, messages)}) != len(messages):
            messages = [dict(message) for message in messages]  # blocks find their message by identity
        render = self._render_once(messages, tools, prompt)
        if prompt or not messages:
            return render
        if render.owners in ([], [NOBODY]):
            return self._by_prefixes(render, messages, tools)
        return self._with_last(render, messages, tools)

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
        if self.fast is not None and self._learns:
            return self.fast.render(messages, tools, prompt)
        return self.render_really(messages, tools, prompt)

    def _with_last(self, render: Render, messages: list[Message], tools: list[Any] | None) -> Render:
        """With the end of the text as the last message's, where the template writes that one outside of its loop."""
        last = len(messages) - 1
        if not last or render.owners[-1] != NOBODY or last in render.owners:
            return render
        try:
            before = self._render_once(messages[:-1], tools, False).text
        except RowFault:
            return render
        if before != "".join(render.blocks[:-1]):
            return render
        return Render(render.blocks, [*render.owners[:-1], last], render.marks)

    def _by_prefixes(self, render: Render, messages: list[Message], tools: list[Any] | None) -> Render:
        """Blocks of a template that collects its text before it writes any: from renders of shorter conversations."""
        text, bounds = render.text, []
        for count in range(1, len(messages)):
            try:
                shorter = self._render_once(messages[:count], tools, False).text
            except RowFault:
                return render
            if not text.startswith(shorter):
                return render
            bounds.append(len(shorter))
        cuts = [0, *bounds, len(text)]
        blocks = [text[a:b] for a, b in pairwise(cuts)]
        owners = [place for place, block in enumerate(blocks) if block]
        return Render([block for block in blocks if block], owners)


def plain_data(value: Any) -> Any:
    """Plain JSON types, as `apply_chat_template` makes them of anything else."""
    if is_plain(value):
        return value
    from transformers.utils import chat_template_utils as theirs

    return theirs._plain_template_data(value)
