"""A chat template: compiled once, with notes of for which message it writes (`owner_notes`), and run for a conversation by Jinja.

Always true:
- what the template raises comes out as `RowFault`;
- a text has at most `FREE_CHARS` and `CHARS_OF_ROW` times what the template was given, in characters;
- text belongs to the message that the notes of the template name;
- the environment is its own: what is changed in it changes no other template.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, pairwise
from types import CodeType
from typing import Any

from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.chat.bounds.sizes import RenderTooCostly, size_of
from raysvc.chat.render.owner_notes import Note, blocks_of, note_filters, with_notes
from raysvc.chat.render.rendered import Extent, Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message
from raysvc.errors import TokenizerError

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
        from jinja2.exceptions import TemplateError

        environment = self._environment = _environment(now)
        try:
            code = within_budget(_code_of, text)
        except OverBudget as fault:
            raise costly_template(fault) from None
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            raise TokenizerError(
                "tokenizer.chat_template",
                f"the template does not compile ({type(error).__name__}: {error})",
                "fix the template",
            ) from error
        given = environment.make_globals(None)
        template = environment.template_class.from_code(environment, code, given)
        self._root, self._blocks = template.root_render_func, template.blocks
        self._given = {**given, "documents": None, **variables}
        self._variables = variables
        self._marks_generation = "endgeneration" in text
        for extension in environment.extensions.values():
            if "generation" in extension.tags:
                extension._generation_support = lambda caller: _GenerationText(caller())

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
        environment, pieces, notes = self._environment, list[str](), list[Note]()
        context = environment.context_class(environment, {**self._given, **row}, None, self._blocks)
        context.pieces, context.notes, add, size, most = pieces, notes, pieces.append, 0, FREE_CHARS
        for piece in self._root(context):
            add(piece)
            size += len(piece)
            if size > most:
                most = most_chars(row, self._variables)
                if size > most:
                    raise RenderTooCostly(LONG_TEXT)
        ends = [0, *accumulate(map(len, pieces))]
        begins, owners = blocks_of(notes, ends, messages)
        marks = self._marks(pieces, ends, begins) if self._marks_generation else []
        return Render("".join(pieces), [*begins, size], owners, marks)

    @staticmethod
    def _marks(pieces: list[str], ends: list[int], begins: list[int]) -> list[Extent]:
        """Returns what is inside `{% generation %}`, each in one block; neighbours are joined."""
        marks, firsts = list[Extent](), set(begins)
        for piece, (start, end) in zip(pieces, pairwise(ends), strict=True):
            if type(piece) is not _GenerationText or not piece:
                continue
            goes_on = marks and marks[-1][1] == start and start not in firsts
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


def costly_template(fault: OverBudget) -> TokenizerError:
    """Returns the error of a template that takes too much, whatever the row."""
    return TokenizerError(
        "tokenizer.chat_template",
        str(fault),
        "set tokenizer.chat_template to another one, and look where this one is from",
    )


def _environment(now: datetime | None) -> Any:
    from raysvc.chat.render.chat_environment import chat_environment

    environment = chat_environment(now)
    environment.filters.measured(**note_filters())
    return environment


@lru_cache(maxsize=256)
def _code_of(text: str) -> CodeType:
    """Each process needs it of the same few templates again and again."""
    environment = _environment(None)
    source = environment.compile(with_notes(environment.parse(text)), raw=True)
    return compile(source, "<chat template>", "exec")
