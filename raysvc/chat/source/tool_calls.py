"""Tool calls of messages -> a list of `{type: function, function: {name, arguments}}`, and the messages of tools that answer them.

1. A message without calls has no `tool_calls`: `[]`, `"[]"`, `""` and null are placeholders and are left out.
2. A call that comes flat, `{name, arguments}`, is wrapped, and keeps its id; arguments that are called `parameters` or `input` are
   `arguments`. A `function_call` beside a content, as OpenAI had it before `tool_calls`, is one of them.
3. `tool_use` parts of a content, as Anthropic spells them, are calls: `id`, `name`, and `input` as `arguments`. They stand behind
   all words of their message, because templates write calls there.
4. Each `tool_result` part of a user is a message of the tool, with its `tool_use_id` as `tool_call_id`, and what stands before,
   between and behind them is messages of the user, in order.

Always true:
- `arguments` stay as they are here, text or object: which of them a template takes is `template_fit`'s;
- nothing that says something is left out: a part's key that has no place in a call, or in a message of a tool, is refused by name;
- the other fields of a message, and `is_error` of a result, pass through untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.json_rows import load_json

CALLS_WRAPPED = "flat tool calls wrapped"
CALLS_PARSED = "tool_calls that were JSON text"
ARGUMENTS_NAMED = "arguments under another name"
LEGACY_CALLS = "function_call made tool_calls"
PLACEHOLDERS = "empty tool_calls left out"
_OUTER = ("id", "type", "index")
_ARGUMENTS = ("parameters", "input")  # other names of them


def read_calls(message: dict[str, Any], changes: set[str]) -> dict[str, Any]:
    """A message that has a key `tool_calls`, in normal form.

    Raises:
        RowFault: the calls are not a list, or one has no name.
    """
    calls = message["tool_calls"]
    if type(calls) is list and calls and all(map(_is_normal, calls)):
        return message
    if isinstance(calls, str):
        calls = calls_of_text(calls, "'tool_calls'")
        changes.add(CALLS_PARSED if calls else PLACEHOLDERS)
    if isinstance(calls, dict):
        calls = [calls]
        changes.add(CALLS_WRAPPED)
    if not isinstance(calls, list):
        raise RowFault("'tool_calls' is not a list", f"it is a {type(calls).__name__}")
    if not calls:
        changes.add(PLACEHOLDERS)
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [wrapped(call, changes) for call in calls]}


def wrapped(call: Any, changes: set[str]) -> dict[str, Any]:
    """One call as OpenAI spells it.

    Raises:
        RowFault: it has no name.
    """
    if not isinstance(call, dict):
        raise RowFault("a tool call is not an object", f"it is a {type(call).__name__}")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault("a tool call has no name", f"it has the keys {sorted(map(str, call))}")
    if function is not call:
        named = _named(function, changes)
        return call if named is function else {**call, "function": named}
    changes.add(CALLS_WRAPPED)
    outer = {key: call[key] for key in _OUTER if key in call}
    inner = {key: value for key, value in _named(call, changes).items() if key not in _OUTER}
    return {**outer, "type": "function", "function": inner}


def with_legacy_call(message: dict[str, Any], changes: set[str]) -> dict[str, Any]:
    """A message that has a key `function_call`, with `tool_calls` for it.

    Raises:
        RowFault: it has both, or the call has no name.
    """
    rest = {key: value for key, value in message.items() if key != "function_call"}
    changes.add(LEGACY_CALLS)
    if not message["function_call"]:
        return rest
    if message.get("tool_calls"):
        raise RowFault("a message has both tool_calls and a function_call", "keep one of them")
    calls = calls_of_text(message["function_call"], "'function_call'")
    return {**rest, "tool_calls": [wrapped(call, set()) for call in calls]}


def _named(function: dict[str, Any], changes: set[str]) -> dict[str, Any]:
    """With its arguments under `arguments`."""
    other = next((name for name in _ARGUMENTS if name in function), None)
    if "arguments" in function or other is None:
        return function
    changes.add(ARGUMENTS_NAMED)
    return {"arguments" if key == other else key: value for key, value in function.items()}


def calls_of_text(text: Any, what: str) -> list[Any]:
    """Calls from JSON text: one object or a list; blank text and `null` are none.

    Raises:
        RowFault: it is not JSON, or of another type.
    """
    if not isinstance(text, str):
        text = [] if text is None else text
        return text if isinstance(text, list) else [text]
    try:
        value = load_json(text.encode()) if text.strip() else None
    except (ValueError, RecursionError) as broken:
        raise RowFault(f"broken JSON in {what.strip(chr(39))!r}", str(broken)) from None
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def arguments_of(messages: Iterable[dict[str, Any]]) -> list[Any]:
    """The arguments of every call, in order, None where a call has none."""
    called = [message["tool_calls"] for message in messages if "tool_calls" in message]
    return [call["function"].get("arguments") for calls in called for call in calls]


def _is_normal(call: Any) -> bool:
    function = call.get("function") if type(call) is dict else None
    return type(function) is dict and type(function.get("name")) is str and "arguments" in function


BLOCKS_READ = "tool_use and tool_result parts made calls and messages of tools"
_SPEAKERS = {"tool_use": "assistant", "tool_result": "user"}
_UNSAID = {"type", "cache_control"}  # keys without meaning for a template


def read_blocks(messages: Iterable[Any], roles: Mapping[str, str], changes: set[str]) -> list[Any]:
    """The messages with their calls and results in normal form; what has none stays as it is.

    Args:
        messages: as the row has them.
        roles: their role -> ours.
        changes: what was changed is added here.

    Raises:
        RowFault: another speaker, words behind a call, a call beside `tool_calls`, or a part that is not read whole.
    """
    made: list[Any] = []
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        there = {*map(_kind, parts)} if type(parts) is list else set()
        kinds = [kind for kind in _SPEAKERS if kind in there]
        for kind in kinds:
            role = message.get("role", message.get("from"))
            if roles.get(role, role) != _SPEAKERS[kind]:
                raise RowFault(f"a {kind} part in a message that is not the {_SPEAKERS[kind]}'s", repr(role))
            changes.add(BLOCKS_READ)
        made += [_calling(message)] if "tool_use" in kinds else _with_results(message) if kinds else [message]
    return made


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _calling(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    first = next(place for place, part in enumerate(content) if _kind(part) == "tool_use")
    if any(_kind(part) != "tool_use" for part in content[first:]):
        raise RowFault(
            "a message goes on behind its tool_use parts", "templates write calls behind the words"
        )
    if message.get("tool_calls"):
        raise RowFault("a message has both tool_calls and tool_use parts", "keep one of them")
    names = {"id": "id", "name": "name", "input": "arguments"}
    calls = [wrapped(_told(part, names), set()) for part in content[first:]]
    return {**message, "content": content[:first] or "", "tool_calls": calls}


def _with_results(message: dict[str, Any]) -> list[dict[str, Any]]:
    names = {"tool_use_id": "tool_call_id", "content": "content", "is_error": "is_error"}
    made: list[dict[str, Any]] = []
    for is_result, parts in groupby(message["content"], lambda part: _kind(part) == "tool_result"):
        if is_result:
            told = ({**message, "role": "tool", "content": "", **_told(part, names)} for part in parts)
            made += told
        else:
            made.append({**message, "content": list(parts)})
    return made


def _told(part: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns what a part says, under our names."""
    said = {key: value for key, value in part.items() if key not in _UNSAID and value is not None}
    odd = sorted(said.keys() - names.keys())
    if odd:
        raise RowFault(f"a {part['type']} part has keys that have no place", ", ".join(odd))
    return {names[key]: value for key, value in said.items()}
