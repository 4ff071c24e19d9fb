"""Tool calls against the schemas of their tools (`jsonschema`, an extra).

Always true:
- nothing is fetched: a reference that leaves the schema is no finding;
- no schema ends or holds up an audit: one that refers to itself without end is broken, and a pattern that takes long matches;
- a schema is looked at once, however many rows repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from raysvc.audit.audited_row import shown
from raysvc.audit.message_checks import declared_name
from raysvc.chat.source.examples import ChatExample

BROKEN = (RecursionError, TypeError, ValueError)  # of schemas that a library for schemas does not expect
PATIENCE_S = 0.1  # for a pattern


def can_check_arguments() -> bool:
    """Returns whether the library is installed."""
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        return False
    return True


def check_calls(example: ChatExample, has_library: bool) -> Iterator[tuple[str, str]]:
    """Defects of the calls of a conversation that declares its tools."""
    if not example.tools:
        return
    tools = {name: tool for tool in example.tools if (name := declared_name(tool))}
    for message in example.messages:
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            if name not in tools:
                if tools:
                    yield "undeclared_tool", f"{name}; declared are {', '.join(tools)}"[:120]
            elif has_library:
                yield from _against(tools[name], name, _parsed(arguments))


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _against(tool: Mapping[str, Any], name: str, arguments: Any) -> Iterator[tuple[str, str]]:
    schema = tool.get("function", tool).get("parameters")
    if not isinstance(schema, dict) or not schema:
        return
    validator, broken = _validator(json.dumps(schema, sort_keys=True))
    if broken:
        yield "broken_schema", f"{name}: {broken}"
        return
    from referencing.exceptions import Unresolvable

    try:
        error = next(validator.iter_errors(arguments), None)
    except Unresolvable:
        return
    except BROKEN as fault:
        yield "broken_schema", f"{name}: {type(fault).__name__}: {shown(str(fault))}"
        return
    if error is not None:
        place = "".join(f"{part}: " for part in error.absolute_path if isinstance(part, str))
        yield "arguments_against_schema", f"{name}: {place}{shown(error.message)}"


@lru_cache(maxsize=1024)
def _validator(text: str) -> tuple[Any, str]:
    """(validator, why there is none)."""
    import jsonschema
    from referencing import Registry

    schema = json.loads(text)
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        return None, shown(error.message)
    except BROKEN as error:
        return None, f"{type(error).__name__}: {shown(str(error))}"
    patient: dict[str, Any] = {"pattern": _pattern, "patternProperties": _pattern_properties}
    if "patternProperties" in text:
        patient["additionalProperties"] = lambda *_: ()  # it would search for the patterns itself
    return jsonschema.validators.extend(kind, patient)(schema, registry=Registry()), ""


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(value, "string") and not _found(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(value, "object"):
        for pattern, wanted in patterns.items():
            for name, each in value.items():
                if _found(pattern, name):
                    yield from validator.descend(each, wanted, path=name, schema_path=pattern)


def _found(pattern: str, text: str) -> bool:
    """Whether a pattern is in a text; a search that takes long, or is none that this library knows, is no finding."""
    import regex  # type: ignore[import-untyped]

    try:
        return regex.search(pattern, text, timeout=PATIENCE_S) is not None
    except (TimeoutError, regex.error):
        return True
