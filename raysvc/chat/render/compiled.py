"""A chat template compiled, with the Python that Jinja wrote for it.

Always true:
- the environment is its own: what is changed in it changes no other template;
- a line of the template's root lies inside the `for` statements that `loops_around` names, outermost first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any

from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.errors import TokenizerError

_FOR = re.compile(r"\s*for (.+?) in ")
_TARGET = re.compile(r"l_(\d+)_\w+")


class CompiledTemplate:
    """One template in an environment of its own.

    Args:
        text: Jinja source.
        now: what `strftime_now` shows; None reads the clock.
        generator: of Jinja's code, another one than its own.

    Attributes:
        environment: that it was compiled in; compiled code looks its methods up when it runs.
        root: the generator function that renders, given a context.
        code: its code object.
        blank: a context without variables.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(self, text: str, now: datetime | None = None, generator: type[Any] | None = None) -> None:
        from jinja2.exceptions import TemplateError

        from raysvc.chat.render.chat_environment import chat_environment

        self.environment: Any = chat_environment(now)
        try:
            self._source = within_budget(_source_of, text, generator)
        except OverBudget as fault:
            raise costly_template(fault) from None
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            raise TokenizerError(
                "tokenizer.chat_template",
                f"the template does not compile ({type(error).__name__}: {error})",
                "fix the template",
            ) from error
        self.environment.tests = dict(self.environment.tests)
        self._template = self.environment.template_class.from_code(
            self.environment, self._source.code, self.environment.make_globals(None)
        )
        self.root: Any = self._template.root_render_func
        self.code: CodeType = self.root.__code__
        self.blank = self.context({})

    def context(self, given: dict[str, Any]) -> Any:
        """A context to render with, once."""
        return self._template.new_context(given)

    def on_generation(self, listener: Callable[[Any], Any]) -> None:
        """Let `listener(caller)` write what a `{% generation %}` wraps."""
        for extension in self.environment.extensions.values():
            if "generation" in extension.tags:
                extension._generation_support = listener

    def targets(self, line: int) -> tuple[str, ...]:
        """Variables that a `for` on a line binds."""
        return self._source.targets(line)

    def loops_around(self, line: int) -> tuple[int, ...]:
        """Lines of the `for` statements that a line is inside of, outermost first."""
        return self._source.loops_around(line)

    def set_in(self, line: int, variables: Mapping[str, Any]) -> list[Any]:
        """Values of the variables that were set in the body of the `for` on a line."""
        levels = tuple(target[: target.index("_", 2) + 1] for target in self.targets(line))
        return [value for name, value in variables.items() if name.startswith(levels)]


def costly_template(fault: OverBudget) -> TokenizerError:
    """Of a template that takes too much whatever the row."""
    return TokenizerError(
        "tokenizer.chat_template",
        str(fault),
        "set tokenizer.chat_template to another one, and look where this one is from",
    )


class _Source:
    """The Python that Jinja writes for a template, and what is known of its lines."""

    def __init__(self, text: str) -> None:
        self.code = compile(text, "<chat template>", "exec")
        self._lines = text.split("\n")
        self._around: dict[int, tuple[int, ...]] = {}

    def targets(self, line: int) -> tuple[str, ...]:
        """As `CompiledTemplate.targets`."""
        found = _FOR.match(self._lines[line - 1])
        return tuple(match.group() for match in _TARGET.finditer(found.group(1))) if found else ()

    def loops_around(self, line: int) -> tuple[int, ...]:
        """As `CompiledTemplate.loops_around`."""
        if line not in self._around:
            found: list[int] = []
            least = _indent(self._lines[line - 1])
            for number in range(line - 1, 0, -1):
                above = self._lines[number - 1]
                if above.strip() and _indent(above) < least:
                    least = _indent(above)
                    found += [number] if above.lstrip().startswith("for ") else []
            self._around[line] = tuple(reversed(found))
        return self._around[line]


@lru_cache(maxsize=256)
def _source_of(text: str, generator: type[Any] | None) -> _Source:
    """Each process needs it of the same few templates again and again."""
    from raysvc.chat.render.chat_environment import chat_environment

    environment: Any = chat_environment(None)
    environment.code_generator_class = generator or environment.code_generator_class
    return _Source(environment.compile(text, raw=True))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
