"""A conversation rendered by its template, as Jinja runs it.

Always true:
- what the template raises comes out as `RowFault`;
- a text has at most `FREE_CHARS` and `CHARS_OF_ROW` times what the template was given, in characters;
- text belongs to the message that the notes of the template name (`owner_notes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any

from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.chat.bounds.sizes import RenderTooCostly, size_of
from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.render.owner_notes import Log, owners_of
from raysvc.chat.render.rendered import NOBODY, Extent, Render
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
        self._compiled = CompiledTemplate(text, {"documents": None, **variables}, now)
        self._compiled.on_generation(lambda caller: _GenerationText(caller()))
        self._variables = variables
        self._marks_generation = "endgeneration" in text

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        """Run the template.

        Args:
            messages: each an object of its own.
            tools: or None.
            prompt: add the generation prompt.

        Raises:
            RowFault: the template raised.
        """
        row = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            return within_budget(self._written, row, messages)
        except OverBudget:
            raise
        except Exception as error:  # noqa: BLE001  a template may raise anything, and it is this row's fault
            raise _template_fault(error) from None

    def _written(self, row: dict[str, Any], messages: list[Message]) -> Render:
        log, size, most = Log(), 0, FREE_CHARS
        add = log.pieces.append
        for piece in self._compiled.root(self._compiled.context(row, log)):
            add(piece)
            size += len(piece)
            if size > most:
                most = most_chars(row, self._variables)
                if size > most:
                    raise RenderTooCostly(LONG_TEXT)
        ends = [0, *accumulate(map(len, log.pieces))]
        begins, owners = [0], [NOBODY]
        for pieces, owner in owners_of(log, messages):
            at = ends[pieces]
            if begins[-1] == at:  # nothing was written for whom was named before
                begins.pop()
                owners.pop()
            if owners[-1:] != [owner]:
                begins.append(at)
                owners.append(owner)
        if begins[-1] == size:
            begins.pop()
            owners.pop()
        marks = self._marks(log.pieces, ends, begins) if self._marks_generation else []
        return Render("".join(log.pieces), [*begins, size], owners, marks)

    @staticmethod
    def _marks(pieces: list[str], ends: list[int], begins: list[int]) -> list[Extent]:
        """Returns what is inside `{% generation %}`, each in one block; neighbours are joined."""
        marks: list[Extent] = []
        for piece, (start, end) in zip(pieces, pairwise(ends), strict=True):
            if type(piece) is not _GenerationText or not piece:
                continue
            goes_on = marks and marks[-1][1] == start and start not in begins
            marks.append((marks.pop()[0] if goes_on else start, end))
        return marks


class _GenerationText(str):
    """Marks what a `{% generation %}` wraps."""

    __slots__ = ()


def _template_fault(error: Exception) -> RowFault:
    from jinja2.exceptions import TemplateError

    first = (str(error).strip().split("\n") or [""])[0][:200]
    if type(error) is TemplateError:
        return RowFault(f"the template refused the conversation: {first[:80]}")
    return RowFault(f"the template raised {type(error).__name__}", first)
