"""One compiled chat template: renders a conversation and says which message wrote which characters.

Always true:
- the text is what `apply_chat_template(tokenize=False)` gives for the same messages, or the same error is raised;
- the blocks of a render, joined, are its text; each has one owner: a message's place, or -1 for none;
- `{% generation %}` spans are given as the template marks them, inside the block that holds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MethodType
from typing import Any

from jinja2 import nodes

from raysvc.chat.render.answers import to_json
from raysvc.chat.render.values import Messages
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message, is_plain
from raysvc.errors import TokenizerError

NOBODY = -1
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(slots=True)
class Render:
    """Text of one conversation in blocks.

    Attributes:
        blocks: text pieces, in order; none is empty.
        owners: for each block the place of its message, or -1.
        marks: (block, start, end), characters of that block inside `{% generation %}`.
    """

    blocks: list[str]
    owners: list[int]
    marks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole render."""
        return "".join(self.blocks)


class ChatTemplate:
    """A template, compiled once.

    Args:
        text: Jinja source.
        variables: what the template sees beside messages and tools.
        fast: with short lookups; false is Jinja's own code.

    Raises:
        TokenizerError: the text is not a template.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], fast: bool = True) -> None:
        self.text = text
        self.environment, self._template = _compile(text, fast)
        self.tree: nodes.Template = self.environment.parse(text)
        self.environment.enter_item = self._enter
        self.environment.leave_loop = self._leave
        self._root = self._template.root_render_func
        self._variables = dict(variables)
        self._pieces: list[str] = []
        self._entered: list[tuple[int, int]] = []
        self._generated: list[tuple[int, int]] = []
        self.marks_generation = bool(_MARK.search(text))
        _listen_to_marks(self.environment, self._generation)

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
        if any(owner != NOBODY for owner in render.owners) or prompt:
            return render
        return self._by_prefixes(render, messages, tools)

    def _render_once(self, messages: list[Message], tools: list[Any] | None, prompt: bool) -> Render:
        pieces, entered, generated = [], [], []  # type: ignore[var-annotated]
        self._pieces, self._entered, self._generated = pieces, entered, generated
        given = {"documents": None, **self._variables}
        given.update(messages=messages, tools=tools, add_generation_prompt=prompt)
        context = self._template.new_context(given)
        try:
            for piece in self._root(context):
                pieces.append(piece)
        except Exception as error:  # noqa: BLE001  a template may raise anything, and it is this row's fault
            raise _template_fault(error) from None
        return _blocks(pieces, entered, generated, messages)

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

    def scope(self, tools: list[Any] | None) -> dict[str, Any]:
        """What the template sees of a conversation, messages as something to ask about."""
        given = {"documents": None, **self._variables}
        return {**given, "messages": Messages(), "tools": tools, "add_generation_prompt": False}

    def _enter(self, item: Any) -> None:
        self._entered.append((len(self._pieces), id(item)))

    def _leave(self) -> None:
        self._entered.append((len(self._pieces), 0))

    def _generation(self, caller: Any) -> str:
        text: str = caller()
        self._generated.append((len(self._pieces), len(text)))
        return text


def _blocks(
    pieces: list[str],
    entered: list[tuple[int, int]],
    generated: list[tuple[int, int]],
    messages: list[Message],
) -> Render:
    owner_of = {id(message): place for place, message in enumerate(messages)}
    blocks: list[str] = []
    owners: list[int] = []
    starts: list[int] = []
    owner, at = NOBODY, 0
    for position, item in entered:
        entering = owner_of.get(item, NOBODY)
        if entering == NOBODY and item:
            continue
        if position > at:
            _append(blocks, owners, starts, "".join(pieces[at:position]), owner, at)
            at = position
        owner = entering
    if at < len(pieces):
        _append(blocks, owners, starts, "".join(pieces[at:]), owner, at)
    render = Render(blocks, owners)
    if generated:
        render.marks = _marks(pieces, starts, generated)
    return render


def _append(blocks: list[str], owners: list[int], starts: list[int], text: str, owner: int, at: int) -> None:
    if text:
        blocks.append(text)
        owners.append(owner)
        starts.append(at)


def _marks(
    pieces: list[str], starts: list[int], generated: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    marks = []
    for position, length in generated:
        block = max(index for index, start in enumerate(starts) if start <= position)
        begin = sum(map(len, pieces[starts[block] : position]))
        marks.append((block, begin, begin + length))
    return marks


def _compile(text: str, fast: bool) -> tuple[Any, Any]:
    """A template in an environment of its own, with our code generator."""
    from jinja2.exceptions import TemplateError

    from raysvc.chat.render.chat_environment import chat_environment
    from raysvc.chat.render.jinja_codegen import ChatCodeGenerator, MarkingCodeGenerator, item_at

    try:
        environment: Any = chat_environment()
        environment.code_generator_class = ChatCodeGenerator if fast else MarkingCodeGenerator
        if fast:
            environment.item_at = MethodType(item_at, environment)
            environment.filters = {**environment.filters, "tojson": _tojson}
        return environment, environment.from_string(text)
    except TemplateError as error:
        raise TokenizerError(
            "tokenizer.chat_template",
            f"the template does not compile ({type(error).__name__}: {error})",
            "fix the template",
        ) from error


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`transformers`' filter, with the encoder of the usual case made once."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return to_json(x)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _listen_to_marks(environment: Any, listener: Any) -> None:
    """Send what `{% generation %}` wraps to `listener`."""
    for extension in environment.extensions.values():
        if "generation" in extension.tags:
            extension._generation_support = listener


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
