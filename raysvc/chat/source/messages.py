"""Messages as a row spells them -> messages as the template gets them.

Always true:
- what came in is not changed;
- keys whose value is None are left out, as `apply_chat_template` does;
- reasoning is there under every name that templates read it by;
- fields we do not know pass through untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from raysvc.chat.row_errors import RowFault

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
_PLAIN = (str, int, float, bool)
_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as the template gets them; `has_parts` says that some content is a list of text parts."""

    messages: list[Message]
    has_parts: bool = False


def read_messages(value: Any, column: str = "messages") -> Conversation:
    """Messages from a list of dicts, or from a JSON string of one.

    Raises:
        RowFault: not a list of dicts with a role.
    """
    if isinstance(value, str):
        value = parse_json(value, column)
    if not isinstance(value, list) or not value:
        raise RowFault(f"{column!r} is not a list of messages", f"it is {_kind(value)}")
    all_texts = _all_texts(value)
    odd = [n for n, item in enumerate(value) if len(item) != 2] if all_texts else range(len(value))
    if not odd:
        return Conversation(value)
    messages = list(value)
    for place in odd:
        messages[place] = _message(value[place], place, column)
    has_parts = not all_texts and any(type(message.get("content")) is list for message in messages)
    return Conversation(messages, has_parts)


def _all_texts(items: list[Any]) -> bool:
    """Whether all messages have a text for role and content; one that has nothing else is fine as it is."""
    try:
        kinds = {*map(type, map(_ROLE, items)), *map(type, map(_CONTENT, items))}
    except (KeyError, TypeError):
        return False
    return kinds == {str}


def _message(item: Any, place: int, column: str) -> Message:
    if not isinstance(item, dict):
        raise RowFault(f"{column!r} holds something that is not a message", f"[{place}] is {_kind(item)}")
    if type(item.get("role")) is not str:
        raise RowFault("a message has no role", f"{column}[{place}] has the keys {sorted(map(str, item))}")
    if (
        type(item.get("content")) is not str
        or None in item.values()
        or type(item.get("tool_calls", [])) is not list
    ):
        item = _mended(item, f"{column}[{place}]")
    return item if _REASONING.isdisjoint(item) else _with_aliases(item)


def _mended(item: Message, place: str) -> Message:
    """Without what is None, tool calls as a list, and parts as dicts."""
    message = {key: value for key, value in item.items() if value is not None}
    if "tool_calls" in message:
        _put_tool_calls(message, message["tool_calls"])
    content = message.get("content")
    if content is not None and type(content) is not str:
        message["content"] = _content(content, place)
    return message


def _with_aliases(message: Message) -> Message:
    """Reasoning under all the names that templates read it by, as `apply_chat_template` gives it to them."""
    from transformers.utils import chat_template_utils as theirs

    aliased: Message = theirs._alias_reasoning_fields([message])[0]
    return aliased


def _put_tool_calls(message: Message, calls: Any) -> None:
    """Some data sets keep `tool_calls` as a JSON string, since Arrow has no free-form structs."""
    if isinstance(calls, str):
        if not calls.strip():
            del message["tool_calls"]
            return
        calls = parse_json(calls, "tool_calls")
        if calls is None:
            del message["tool_calls"]
            return
        message["tool_calls"] = [calls] if isinstance(calls, dict) else calls
    if not isinstance(message["tool_calls"], list):
        raise RowFault("'tool_calls' is not a list", f"it is {_kind(message['tool_calls'])}")


def _content(content: Any, place: str) -> Any:
    if not isinstance(content, list):
        raise RowFault("a content is neither text nor parts", f"{place} is {_kind(content)}")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif (
            isinstance(part, dict)
            and part.get("type", "text") == "text"
            and isinstance(part.get("text"), str)
        ):
            parts.append({key: value for key, value in part.items() if value is not None})
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowFault("a content part is not text", f"{place} has a part of type {kind!r}")
    return parts


def flatten_parts(messages: list[Message]) -> list[Message]:
    """The same messages with text parts joined, without a separator: for templates that know only string contents."""
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if type(message.get("content")) is list
        else message
        for message in messages
    ]


def read_tools(value: Any) -> list[Any] | None:
    """Tools from a list or a JSON string; an empty one means no tools."""
    if isinstance(value, str):
        return _tools_of(value)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault("'tools' is not a list of tools", f"it is {_kind(value)}")
    return value or None


@lru_cache(maxsize=1024)
def _tools_of(text: str) -> list[Any] | None:
    """Rows repeat a few sets of tools; nobody changes what comes out."""
    return read_tools(parse_json(text, "tools")) if text.strip() else None


def parse_json(text: str, column: str) -> Any:
    """Parsed text of a column that holds JSON strings."""
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as broken:
        raise RowFault(f"broken JSON in {column!r}", str(broken)) from None


def is_plain(value: Any) -> bool:
    """Whether a value is made of JSON types only."""
    kind = type(value)
    if kind in _PLAIN or value is None:
        return True
    if kind is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return kind is list and all(is_plain(item) for item in value)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {type(value[0]).__name__}"
    return "missing" if value is None else type(value).__name__
