"""Messages as a row spells them -> messages as the template gets them.

Always true:
- no object stands for two places of a conversation, and what came in is not changed;
- keys whose value is None are left out, as `apply_chat_template` does;
- fields we do not know pass through untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from raysvc.chat.faults import RowFault

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
_PLAIN = (str, int, float, bool)


def read_messages(value: Any, column: str = "messages") -> list[Message]:
    """Messages from a list of dicts, or from a JSON string of one.

    Raises:
        RowFault: not a list of dicts with a role.
    """
    if isinstance(value, str):
        value = parse_json(value, column)
    if not isinstance(value, list) or not value:
        raise RowFault(f"{column!r} is not a list of messages", f"it is {_kind(value)}")
    odd = _odd_places(value)
    if odd:
        value = list(value)
        for place in odd:
            value[place] = _message(value[place], place, column)
    if len(set(map(id, value))) != len(value):
        return [dict(message) for message in value]
    messages: list[Message] = value
    return messages


def _odd_places(items: list[Any]) -> Sequence[int]:
    """Places of messages that are more than a text for role and one for content."""
    try:
        texts = [item["role"] for item in items] + [item["content"] for item in items]
        sizes = list(map(len, items))
    except (KeyError, TypeError):
        return range(len(items))
    if not {str}.issuperset(map(type, texts)) or not {dict}.issuperset(map(type, items)):
        return range(len(items))
    if max(sizes) == 2:
        return ()
    return [n for n, size in enumerate(sizes) if size != 2 and not _only_texts(items[n])]


def _only_texts(item: Message) -> bool:
    """Whether a message has nothing but texts, none of them tool calls."""
    return "tool_calls" not in item and {str}.issuperset(map(type, item.values()))


def _message(item: Any, place: int, column: str) -> Message:
    if not isinstance(item, dict):
        raise RowFault(f"{column!r} holds something that is not a message", f"[{place}] is {_kind(item)}")
    if type(item.get("role")) is not str:
        raise RowFault("a message has no role", f"{column}[{place}] has the keys {sorted(map(str, item))}")
    if "tool_calls" not in item and None not in item.values() and type(item.get("content")) is str:
        return item
    message = {key: value for key, value in item.items() if value is not None}
    if "tool_calls" in message:
        _put_tool_calls(message, message["tool_calls"])
    content = message.get("content")
    if content is not None and type(content) is not str:
        message["content"] = _content(content, f"{column}[{place}]")
    return message


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
