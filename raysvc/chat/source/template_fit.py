"""What a chat template can take, found by rendering, and messages made to fit.

Always true:
- a template that shows the text of content parts gets parts, any other gets their texts joined;
- tool calls get their `arguments` as objects, JSON text is parsed; only a template that fails on an object or shows its
  Python form, and shows text as it is, gets text: the source's own, or the JSON of its object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.content_parts import flatten_parts
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.json_rows import load_json
from raysvc.chat.source.messages import Message, refuse_deep
from raysvc.chat.source.tool_calls import arguments_of

ARGUMENTS_PARSED = "arguments that were JSON text made objects"
ARGUMENTS_WRITTEN = "arguments that were objects made JSON text"
PROBE = "raysvc_probe"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
MAX_DEPTH = 100  # of arguments
_SPEAKERS = (("user",), ("user", "assistant"), ("system", "user", "assistant"))
_FORMS = ("{'type'", '{"type"')
Render = Callable[[list[Message]], str]


@dataclass(frozen=True)
class TemplateFit:
    """What one template takes.

    Attributes:
        parts: contents that are lists of text parts.
        text_arguments: `arguments` as JSON text, and not as an object.
        only_parts: contents that are plain texts are not shown, or refused.
    """

    parts: bool
    text_arguments: bool
    only_parts: bool = False

    @classmethod
    def of(cls, render: Render) -> TemplateFit:
        """Ask a template.

        Args:
            render: messages -> text; whatever it raises means that the template does not take them.
        """
        parts = _takes_parts(render)
        return cls(parts, _wants_text(render), parts and not _takes_text(render))

    def fitted(self, example: ChatExample) -> ChatExample:
        """The same conversation as the template takes it.

        Raises:
            RowFault: arguments that are not the JSON text of an object, or nested too deep.
        """
        if example.has_parts and not self.parts:
            example = replace(example, messages=flatten_parts(example.messages), has_parts=False)
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
    """Of JSON text, its object; of nothing, an empty one."""
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


def hides_role(render: Render, role: str) -> bool:
    """Whether a template takes messages of a role, and shows none of them."""
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


def _takes_parts(render: Render) -> bool:
    """Whether a template shows the text of content parts wherever it shows texts, and neither their Python form nor their JSON."""
    in_parts = [_try(render, [_in_parts(role) for role in roles]) for roles in _SPEAKERS]
    in_text = [_try(render, [_in_text(role) for role in roles]) for roles in _SPEAKERS]
    shown = [text.count(PROBE) for text in in_parts]
    as_texts = [text.count(PROBE) for text in in_text]  # none of a role that the template skips
    if not any(shown) or any(form in text for form in _FORMS for text in in_parts):
        return False
    return all(times in (shown[n], 0) for n, times in enumerate(as_texts))


def _takes_text(render: Render) -> bool:
    return any(PROBE in _try(render, [_in_text(role) for role in roles]) for roles in _SPEAKERS)


def _in_text(role: str) -> Message:
    return {"role": role, "content": PROBE}


def _in_parts(role: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": PROBE}]}


def _wants_text(render: Render) -> bool:
    given = {PROBE: "x"}
    shown = _call_shown(render, given)
    if PROBE in shown and f"{{'{PROBE}'" not in shown:
        return False
    return json.dumps(given) in _call_shown(render, json.dumps(given))


def _call_shown(render: Render, arguments: Any) -> str:
    """How a template shows one call; nothing when it refuses it."""
    call = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asks: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    answered: list[Message] = [
        *asks,
        {"role": "tool", "name": "f", "tool_call_id": "a12345678", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    return _try(render, asks) or _try(render, answered)


def _try(render: Render, messages: list[Message]) -> str:
    try:
        return render(messages)
    except Exception:  # noqa: BLE001  a template may raise anything, and then it does not take them
        return ""
