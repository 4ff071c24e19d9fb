"""Finds what a chat template can take, by rendering, and makes messages fit.

Always true:
- a template that shows the text of content parts gets parts, any other gets their texts joined;
- tools are given with their wrapping; only a template that shows a bare declaration and not all of a wrapped one gets them bare;
- an assistant's message with calls or reasoning and without a content gets an empty one only where the template fails without;
- tool calls get their `arguments` as objects, JSON text is parsed; only a template that fails on an object or shows its
  Python form, and shows text as it is, gets text: the source's own, or the JSON of its object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.content_parts import flatten_parts
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.json_rows import load_json
from raysvc.chat.source.messages import Message, refuse_deep
from raysvc.chat.source.tool_calls import arguments_of
from raysvc.chat.source.tools import TOOLS_WRAPPED, without_wrapping
from raysvc.errors import TokenizerError

ARGUMENTS_PARSED = "arguments that were JSON text made objects"
ARGUMENTS_WRITTEN = "arguments that were objects made JSON text"
CONTENT_ADDED = "absent contents beside calls or reasoning made empty texts"
TOOLS_BARE = "tool declarations given bare, as the template wants them"
PROBE = "raysvc_probe"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_TOLD = (f"{PROBE}_name", f"{PROBE}_says", f"{PROBE}_asks")  # a declaration is shown when all of these are
_DECLARED: dict[str, Any] = {
    "name": _TOLD[0],
    "description": _TOLD[1],
    "parameters": {"type": "object", "properties": {_TOLD[2]: {"type": "string", "description": "d"}}},
}
BESIDE_CONTENT = ("tool_calls", "reasoning_content")
MAX_DEPTH = 100  # of arguments
_SPEAKERS = (("user",), ("user", "assistant"), ("system", "user", "assistant"))
_EMPTY: Message = {"content": ""}
_FORMS = ("{'type'", '{"type"')


class AsksTemplate(Protocol):
    """Messages -> text; whatever it raises means that the template does not take them."""

    def __call__(self, messages: list[Message], tools: list[Any] | None = None, /) -> str: ...


@dataclass(frozen=True)
class TemplateFit:
    """Says what one template takes.

    Attributes:
        parts: contents that are lists of text parts.
        text_arguments: `arguments` as JSON text, and not as an object.
        only_parts: contents that are plain texts are not shown, or refused.
        bare_tools: declarations of tools without their wrapping.
        needs_content: beside which of `BESIDE_CONTENT` an assistant's message must have a content, if an empty one.
    """

    parts: bool
    text_arguments: bool
    only_parts: bool = False
    bare_tools: bool = False
    needs_content: frozenset[str] = frozenset()

    @classmethod
    def of(cls, render: AsksTemplate) -> TemplateFit:
        """Ask a template."""
        parts, as_text = _takes_parts(render), _wants_text(render)
        return cls(
            parts,
            as_text,
            parts and not _takes_text(render),
            _wants_bare_tools(render),
            _needs_content(render, '{"a": 1}' if as_text else {"a": 1}),
        )

    def fitted(self, example: ChatExample) -> ChatExample:
        """The same conversation as the template takes it.

        Raises:
            RowFault: arguments that are not the JSON text of an object, or nested too deep.
        """
        if example.has_parts and not self.parts:
            example = replace(example, messages=flatten_parts(example.messages), has_parts=False)
        if example.tools and self.bare_tools:
            changes = example.changes - {TOOLS_WRAPPED} | {TOOLS_BARE}
            example = replace(example, tools=without_wrapping(example.tools), changes=changes)
        if self.needs_content and any(map(self._lacks_content, example.messages)):
            filled = [{**one, "content": ""} if self._lacks_content(one) else one for one in example.messages]
            example = replace(example, messages=filled, changes=example.changes | {CONTENT_ADDED})
        if not example.has_calls:
            return example
        wanted = str if self.text_arguments else dict
        given = arguments_of(example.messages)
        for value in given:
            refuse_deep(value, MAX_DEPTH, "the arguments of a tool call")
        if all(type(value) is wanted for value in given):
            return example
        change = self._as_text if self.text_arguments else _as_object
        noted = {ARGUMENTS_WRITTEN if self.text_arguments else ARGUMENTS_PARSED}
        messages = [_with_arguments(message, change) for message in example.messages]
        return replace(example, messages=messages, changes=example.changes | noted)

    def _lacks_content(self, message: Message) -> bool:
        if "content" in message or message["role"] != "assistant":
            return False
        return next((key for key in BESIDE_CONTENT if key in message), "") in self.needs_content

    @staticmethod
    def _as_text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(_as_object(value), ensure_ascii=False)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_object(value: Any) -> Any:
    """Returns the object of a JSON text; an empty one of nothing."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise RowFault("the arguments of a tool call are not an object", f"they are {value!r}"[:80])
    try:
        found = load_json(value.encode())
    except (ValueError, RecursionError) as broken:
        raise RowFault("the arguments of a tool call are not JSON", f"{broken}: {value[:60]}") from None
    if not isinstance(found, dict):
        raise RowFault("the arguments of a tool call are not an object", f"they are {value[:60]}")
    refuse_deep(found, MAX_DEPTH, "the arguments of a tool call")
    return found


def hides_role(render: AsksTemplate, role: str) -> bool:
    """Returns whether a template takes messages of a role, and shows none of them."""
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {}}}
    probe = {"role": role, "name": "f", "tool_call_id": "a12345678", "content": PROBE}
    tries: list[list[Message]] = [
        [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, probe, said],
        [probe, asked, said],
        [asked, probe, said],
        [asked, said, probe, asked, said],
        [probe, said],
    ]
    shown = [_try(render, messages) for messages in tries]
    return any(shown) and not any(PROBE in text for text in shown)


def _takes_parts(render: AsksTemplate) -> bool:
    """Returns whether a template shows the text of content parts wherever it shows texts, and neither their Python form nor their JSON."""
    in_parts = [_try(render, [_in_parts(role) for role in roles]) for roles in _SPEAKERS]
    in_text = [_try(render, [_in_text(role) for role in roles]) for roles in _SPEAKERS]
    shown = [text.count(PROBE) for text in in_parts]
    as_texts = [text.count(PROBE) for text in in_text]  # none of a role that the template skips
    if not any(shown) or any(form in text for form in _FORMS for text in in_parts):
        return False
    return all(times in (shown[n], 0) for n, times in enumerate(as_texts))


def _takes_text(render: AsksTemplate) -> bool:
    return any(PROBE in _try(render, [_in_text(role) for role in roles]) for roles in _SPEAKERS)


def _in_text(role: str) -> Message:
    return {"role": role, "content": PROBE}


def _in_parts(role: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": PROBE}]}


def _wants_text(render: AsksTemplate) -> bool:
    given = {PROBE: "x"}
    shown = _call_shown(render, given)
    if PROBE in shown and f"{{'{PROBE}'" not in shown:
        return False
    return json.dumps(given) in _call_shown(render, json.dumps(given))


def _wants_bare_tools(render: AsksTemplate) -> bool:
    """Returns whether a template shows all of a bare declaration, and not all of a wrapped one."""

    def is_shown(tool: dict[str, Any]) -> bool:
        texts = (_try(render, [_in_text(role) for role in roles], [tool]) for roles in _SPEAKERS)
        return any(all(words in text for words in _TOLD) for text in texts)

    return not is_shown({"type": "function", "function": _DECLARED}) and is_shown(_DECLARED)


def _needs_content(render: AsksTemplate, arguments: Any) -> frozenset[str]:
    """Beside which keys a template fails somewhere without a content, where it takes an empty text."""

    def fails(beside: tuple[list[Message], ...], alone: tuple[list[Message], ...]) -> bool:
        pairs = zip(beside, alone, strict=True)
        return any(_try(render, with_it) and not _try(render, without) for with_it, without in pairs)

    calls = fails(_calling(arguments, _EMPTY), _calling(arguments, {}))
    return frozenset(compress(BESIDE_CONTENT, (calls, fails(_reasoning(_EMPTY), _reasoning({})))))


def _call_shown(render: AsksTemplate, arguments: Any) -> str:
    """How a template shows one call; nothing when it refuses it."""
    return next(filter(None, (_try(render, one) for one in _calling(arguments, _EMPTY))), "")


def _calling(arguments: Any, content: Message) -> tuple[list[Message], ...]:
    """A call as the last message, and one that was answered."""
    call = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asks: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", **content, "tool_calls": [call]},
    ]
    result = {"role": "tool", "name": "f", "tool_call_id": "a12345678", "content": "b"}
    return asks, [*asks, result, {"role": "assistant", "content": "c"}]


def _reasoning(content: Message) -> tuple[list[Message], ...]:
    """Reasoning without an answer, as the last message, and before another turn."""
    asked: Message = {"role": "user", "content": "a"}
    thinks: list[Message] = [asked, {"role": "assistant", **content, "reasoning_content": "r"}]
    return thinks, [*thinks, asked, {"role": "assistant", "content": "c"}]


def _try(render: AsksTemplate, messages: list[Message], tools: list[Any] | None = None) -> str:
    try:
        return render(messages, tools)
    except TokenizerError:
        raise  # the template takes too much, and would for each question
    except Exception:  # noqa: BLE001  a template may raise anything, and then it does not take them
        return ""
