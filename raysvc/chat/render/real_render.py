"""A conversation rendered by its template, as Jinja runs it.

Always true:
- what the template raises comes out as `RowFault`;
- a text has at most `FREE_CHARS` and `CHARS_OF_ROW` times what the template was given, in characters;
- text belongs to the message of the innermost loop over messages that the writing line stands in, or to nobody;
- outside of those, in loops over numbers whose bodies set one variable to a message, it belongs to that message; with two, to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import FrameType
from typing import Any

from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.chat.bounds.sizes import RenderTooCostly, size_of
from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.render.rendered import Render, Written, render_of
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message

FREE_CHARS = 1 << 18  # of a text; the fixed words of the longest template that we know are a tenth
CHARS_OF_ROW = 16  # that a template may write for each that it was given
MAX_ROW = 1 << 32
LONG_TEXT = f"it writes more than {FREE_CHARS:,} characters and {CHARS_OF_ROW} times what its row has"


def most_chars(*given: Any) -> int:
    """Characters that a template may write, for all that it was given."""
    return FREE_CHARS + CHARS_OF_ROW * size_of(given, MAX_ROW)


class RealRender:
    """One template.

    Args:
        text: Jinja source.
        variables: what the template sees beside messages and tools.
        now: what `strftime_now` shows.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], now: datetime) -> None:
        self._compiled = CompiledTemplate(text, now)
        self._compiled.on_generation(lambda caller: _Generated(caller()))
        self._variables = {"documents": None, **variables}

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        """Run the template.

        Args:
            messages: each an object of its own.
            tools: or None.
            prompt: add the generation prompt.

        Raises:
            RowFault: the template raised.
        """
        given = {**self._variables, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            return within_budget(self._written, given, messages)
        except OverBudget:
            raise
        except Exception as error:  # noqa: BLE001  a template may raise anything, and it is this row's fault
            raise _template_fault(error) from None

    def _written(self, given: dict[str, Any], messages: list[Message]) -> Render:
        root = self._compiled.root(self._compiled.context(given))
        places = {id(message) for message in messages}
        written: list[Written] = []
        left = FREE_CHARS
        for piece in root:
            owner = self._owner(root.gi_frame, places)
            text = str(piece)
            written.append((type(piece) is _Generated, owner, text))
            left -= len(text)
            if left < 0:
                left = most_chars(given) - sum(len(text) for _, _, text in written)
                if left < 0:
                    raise RenderTooCostly(LONG_TEXT)
        return render_of(written, messages)

    def _owner(self, frame: FrameType, places: set[int]) -> Any:
        seen, taken = frame.f_locals, []
        for line in reversed(self._compiled.loops_around(frame.f_lineno)):
            for target in self._compiled.targets(line):
                value = seen.get(target)
                if id(value) in places:
                    return value
                if type(value) is int:
                    taken += [each for each in self._compiled.set_in(line, seen) if id(each) in places]
        return taken[0] if len(taken) == 1 else None


class _Generated(str):
    """What a `{% generation %}` wraps."""

    __slots__ = ()


def _template_fault(error: Exception) -> RowFault:
    from jinja2.exceptions import TemplateError

    first = (str(error).strip().split("\n") or [""])[0][:200]
    if type(error) is TemplateError:
        return RowFault(f"the template refused the conversation: {first[:80]}")
    return RowFault(f"the template raised {type(error).__name__}", first)
