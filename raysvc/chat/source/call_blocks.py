"""Messages whose contents hold `tool_use` and `tool_result` parts, as Anthropic spells them -> calls and the messages of tools.

1. The `tool_use` parts of a message are its `tool_calls`: `id`, `name`, and `input` as `arguments`. They stand behind all of
   its words, because templates write calls there.
2. Each `tool_result` part of a user is a message of the tool, with its `tool_use_id` as `tool_call_id`, and what stands before,
   between and behind them is messages of the user, in order.

Always true:
- nothing that says something is left out: a key that has no place in a call, or in a message of a tool, is refused by name;
- the other fields of a message, and `is_error` of a result, pass through untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.tool_calls import wrapped

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
