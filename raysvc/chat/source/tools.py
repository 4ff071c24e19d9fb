"""Tools of a row -> a list for the template, or None; and their JSON, which templates write in every row.

Rows repeat a few sets of tools, so a text is parsed once, and what is in it is written as JSON once.

Always true:
- rows with the same text get the same objects, which nobody changes: templates run in a sandbox that forbids it;
- an object whose JSON is kept is kept itself, so its `id` is no other object's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.call_blocks import TOOLS_READ, as_function
from raysvc.chat.source.messages import Changes, kind_of, parse_json, refuse_deep

MAX_TEXTS = 1024
MAX_DEPTH = 250  # a schema of some 120 objects
MAX_OBJECTS = 1 << 17
_written: dict[
    int, tuple[Any, dict[str, str]]
] = {}  # id of a list or dict in tools -> it, its JSON in some forms


def read_tools(value: Any, changes: Changes) -> list[Any] | None:
    """Tools from a list or a JSON string; an empty one means no tools.

    Args:
        value: what the column holds.
        changes: what was changed is added here.

    Raises:
        RowFault: they are not a list of tools.
    """
    given = _tools_of(value) if isinstance(value, str) else _as_tools(value)
    if given is None or not any("input_schema" in tool for tool in given):
        return given
    made = [*map(as_function, given)]
    if made != given:
        changes.add(TOOLS_READ)
    return made


def written_forms(value: Any) -> dict[str, str] | None:
    """JSON of a list or dict in tools that rows share, by its form, to be added to; None of any other value."""
    kept = _written.get(id(value))
    return kept[1] if kept else None


@lru_cache(maxsize=MAX_TEXTS)
def _tools_of(text: str) -> list[Any] | None:
    tools = _as_tools(parse_json(text, "tools")) if text.strip() else None
    if len(_written) > MAX_OBJECTS:
        _written.clear()
    _share(tools)
    return tools


def _share(tools: Any) -> None:
    left = [tools]
    while left:
        value = left.pop()
        if type(value) in (list, dict):
            _written[id(value)] = value, {}
            left += value.values() if type(value) is dict else value


def _as_tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        return _tools_of(value)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault("'tools' is not a list of tools", f"it is {kind_of(value)}")
    refuse_deep(value, MAX_DEPTH, "the tools")
    return value or None
