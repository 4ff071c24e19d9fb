"""One compiled chat template: renders a conversation and says which message wrote which characters.

Always true:
- the text is what `apply_chat_template(tokenize=False)` gives for the same messages, or the same error is raised;
- the blocks of a render, joined, are its text; each has one owner: a message's place, or -1 for none;
- `{% generation %}` spans are given as the template marks them, inside the block that holds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from types import FrameType
from typing import Any

from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.render.fast_render import FastRender
from raysvc.chat.render.rendered import NOBODY, Render, render_of
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message, is_plain

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """A template, compiled once.

    Args:
        text: Jinja source.
        variables: what the template sees beside messages and tools.
        fast: false renders every row for real.

    Attributes:
        text: Jinja source.
        marks_generation: it has `{% generation %}`.
        fast: the fast way, None when there is none.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], fast: bool = True) -> None:
        self.text = text
        self.marks_generation = bool(_MARK.search(text))
        self._compiled = CompiledTemplate(text)
        self._compiled.on_generation(lambda caller: _Generated(caller()))
        self._variables = {"documents": None, **variables}
        self.fast = FastRender(text, variables, self.render_really) if fast else None

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> Render:
        """Render one conversation.

        Args:
            messages: as `read_messages` gives them.
            tools: or None.
            prompt: add the generation prompt.

        Raises:
            RowFault: the template raised.
        """
        if len({*map(id, messages)}) != len(messages):
            messages = [dict(message) for message in messages]  # blocks find their message by identity
        render = self._render_once(messages, tools, prompt)
        if prompt or any(owner != NOBODY for owner in render.owners):
            return render
        return self._by_prefixes(render, messages, tools)

    def _render_once(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        if self.fast is not None:
            return self.fast.render(messages, tools, prompt)
        return self.render_really(messages, tools, prompt)

    def render_really(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        """Run the template.

        Raises:
            RowFault: the template raised.
        """
        given = {**self._variables, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        root, written = self._compiled.root(self._compiled.context(given)), []
        places = {id(message) for message in messages}
        try:
            for piece in root:
                owner = self._owner(root.gi_frame, places)
                written.append((type(piece) is _Generated, owner, str(piece)))
        except Exception as error:  # noqa: BLE001  a template may raise anything, and it is this row's fault
            raise _template_fault(error) from None
        return render_of(written, messages)

    def _owner(self, frame: FrameType, places: set[int]) -> Any:
        """The message for whom the root writes: that of the innermost loop over messages around its line."""
        for line in reversed(self._compiled.loops_around(frame.f_lineno)):
            for target in self._compiled.targets(line):
                value = frame.f_locals.get(target)
                if id(value) in places:
                    return value
        return None

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


class _Generated(str):
    """What a `{% generation %}` wraps."""

    __slots__ = ()


def plain_data(value: Any) -> Any:
    """Plain JSON types, as `apply_chat_template` makes them of anything else."""
    if is_plain(value):
        return value
    from transformers.utils import chat_template_utils as theirs

    return theirs._plain_template_data(value)


def _template_fault(error: Exception) -> RowFault:
    from jinja2.exceptions import TemplateError

    first = (str(error).strip().split("\n") or [""])[0][:200]
    if type(error) is TemplateError:
        return RowFault(f"the template refused the conversation: {first[:80]}")
    return RowFault(f"the template raised {type(error).__name__}", first)
