"""Tools of a row -> their normal form for the template, or None; and their JSON, which templates write in every row.

1. The column holds a list, JSON text of one, a list of JSON texts, or one declaration.
2. A bare declaration, `{name, description, parameters}`, becomes `{"type": "function", "function": {...}}`, as servers with
   OpenAI's protocol give it to the template: `type` first, then the name, the description and the parameters. So does one
   of OpenAI's Responses (`type` beside the name), of Anthropic (`input_schema`) and of MCP (`inputSchema`).
3. Any other declaration stays as it is, among them tools without a function (`{"type": "web_search"}`). One that has neither a
   name nor a type (Gemini's, Bedrock's) is counted; an object of such in the place of the list is refused.

Rows repeat a few sets of tools, so a text is parsed once, and what is in it is written as JSON once.

Always true:
- rows with the same text get the same objects, which nobody changes: templates run in a sandbox that forbids it;
- an object whose JSON is kept is kept itself, so its `id` is no other object's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Changes, kind_of, parse_json, refuse_deep

TOOLS_PARSED = "tools that were JSON text"
TOOLS_LISTED = "one tool declaration made a list of one"
TOOLS_UNKNOWN = "tool declarations without a name or a type, given as they are"
TOOLS_WRAPPED = "bare tool declarations wrapped as functions"
SCHEMAS = {"input_schema": "parameters", "inputSchema": "parameters"}
FUNCTION_TYPES = (None, "function")  # of a bare declaration; Anthropic's may also say custom
ORDER = ("name", "description", "parameters")
NO_TOOLS: tuple[None, frozenset[str]] = (None, frozenset())
_UNSAID = ("type", "cache_control")  # without meaning for a template
MAX_TEXTS = 1024
MAX_DEPTH = 250  # a schema of some 120 objects
MAX_OBJECTS = 1 << 17
_written: dict[
    int, tuple[Any, dict[str, str]]
] = {}  # id of a list or dict in tools -> it, its JSON in some forms


def read_tools(value: Any, changes: Changes) -> list[Any] | None:
    """Declarations of tools from a list, JSON text of one, or a list of JSON texts; an empty one means no tools.

    Args:
        value: what the column holds.
        changes: what was changed is added here.

    Raises:
        RowFault: they are not a list of tools.
    """
    tools, noted = _tools_of(value) if isinstance(value, str) else _as_tools(value)
    changes |= noted
    return tools


def without_wrapping(tools: list[Any]) -> list[Any]:
    """The functions alone, for a template that wants them so."""
    return [tool["function"] if _is_wrapped(tool) else tool for tool in tools]


def written_forms(value: Any) -> dict[str, str] | None:
    """JSON of a list or dict in tools that rows share, by its form, to be added to; None of any other value."""
    kept = _written.get(id(value))
    return kept[1] if kept else None


@lru_cache(maxsize=MAX_TEXTS)
def _tools_of(text: str) -> tuple[list[Any] | None, frozenset[str]]:
    """(the tools of a text, what was changed)."""
    tools, noted = _as_tools(parse_json(text, "tools")) if text.strip() else NO_TOOLS
    if len(_written) > MAX_OBJECTS:
        _written.clear()
    _share(tools)
    return tools, noted | {TOOLS_PARSED} if tools else noted


def _share(tools: Any) -> None:
    left = [tools]
    while left:
        value = left.pop()
        if type(value) in (list, dict):
            _written[id(value)] = value, {}
            left += value.values() if type(value) is dict else value


def _as_tools(value: Any) -> tuple[list[Any] | None, frozenset[str]]:
    if isinstance(value, str):
        return _tools_of(value)
    if value is None or value in ([], {}):
        return NO_TOOLS
    given = value if isinstance(value, list) else [value]
    if isinstance(value, dict) and not _is_declared(value):
        raise RowFault("'tools' is an object that declares no tool", f"it has the keys {sorted(value)}"[:80])
    read = [parse_json(tool, "tools") if isinstance(tool, str) else tool for tool in given]
    if not all(isinstance(tool, dict) for tool in read):
        raise RowFault("'tools' is not a list of tools", f"it is {kind_of(value)}")
    refuse_deep(read, MAX_DEPTH, "the tools")
    made = [*map(_declared, read)]
    changed = {
        TOOLS_PARSED: any(isinstance(tool, str) for tool in given),
        TOOLS_LISTED: isinstance(value, dict),
        TOOLS_WRAPPED: any(new is not old for new, old in zip(made, read, strict=True)),
        TOOLS_UNKNOWN: not all(map(_is_declared, read)),
    }
    return made, frozenset(change for change, is_so in changed.items() if is_so)


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    """One declaration in normal form; itself where it has it already, or declares no function."""
    if isinstance(tool.get("function"), dict):
        return tool if "type" in tool else {"type": "function", **tool}
    types = (*FUNCTION_TYPES, "custom") if "input_schema" in tool else FUNCTION_TYPES
    if tool.get("type") not in types or not isinstance(tool.get("name"), str):
        return tool
    said = {SCHEMAS.get(key, key): value for key, value in tool.items() if key not in _UNSAID}
    ordered = [*(key for key in ORDER if key in said), *(key for key in said if key not in ORDER)]
    return {"type": "function", "function": {key: said[key] for key in ordered}}


def _is_declared(tool: dict[str, Any]) -> bool:
    """Returns whether it says what it is: a function, or a tool of another type."""
    return isinstance(tool.get("function"), dict) or any(
        isinstance(tool.get(key), str) for key in ("type", "name")
    )


def _is_wrapped(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function" and isinstance(tool.get("function"), dict)
