"""A chat template compiled, with notes of for which message it writes (`owner_notes`).

Always true:
- the environment is its own: what is changed in it changes no other template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.errors import TokenizerError

if TYPE_CHECKING:
    from raysvc.chat.render.owner_notes import Log


class CompiledTemplate:
    """One template in an environment of its own.

    Args:
        text: Jinja source.
        variables: what it sees in each render.
        now: what `strftime_now` shows; None reads the clock.

    Attributes:
        root: the generator function that renders, given a context.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], now: datetime | None = None) -> None:
        from jinja2.exceptions import TemplateError

        self._environment = _environment(now)
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
        given = self._environment.make_globals(None)
        template = self._environment.template_class.from_code(self._environment, code, given)
        self._given = {**given, **variables}
        self.root: Any = template.root_render_func
        self._blocks = template.blocks

    def context(self, row: dict[str, Any], log: Log) -> Any:
        """A context to render a row with, once."""
        environment = self._environment
        made = environment.context_class(environment, {**self._given, **row}, None, self._blocks)
        made.log = log
        return made

    def on_generation(self, listener: Callable[[Any], Any]) -> None:
        """Let `listener(caller)` write what a `{% generation %}` wraps."""
        for extension in self._environment.extensions.values():
            if "generation" in extension.tags:
                extension._generation_support = listener


def costly_template(fault: OverBudget) -> TokenizerError:
    """Returns the error of a template that takes too much, whatever the row."""
    return TokenizerError(
        "tokenizer.chat_template",
        str(fault),
        "set tokenizer.chat_template to another one, and look where this one is from",
    )


def _environment(now: datetime | None) -> Any:
    from raysvc.chat.render.chat_environment import chat_environment
    from raysvc.chat.render.owner_notes import note_filters

    environment = chat_environment(now)
    environment.filters.measured(**note_filters())
    return environment


@lru_cache(maxsize=256)
def _code_of(text: str) -> CodeType:
    """Each process needs it of the same few templates again and again."""
    from raysvc.chat.render.owner_notes import with_notes

    environment = _environment(None)
    source = environment.compile(with_notes(environment.parse(text)), raw=True)
    return compile(source, "<chat template>", "exec")
