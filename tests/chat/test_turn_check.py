"""A turn is accepted when all of its message stands in it, and refused when a part is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raysvc.chat.render.turn_check import verify_turn
from raysvc.chat.row_errors import RowFault

NESTED = {"cities": ["Oslo", "Bergen"], "days": 3, "deep": {"a": [None, True]}}
WAYS: dict[str, str] = {
    "JSON behind the name": f"f {json.dumps(NESTED)}",
    "JSON before the name": f"{json.dumps(NESTED)} f",
    "keys sorted": f"f {json.dumps(NESTED, sort_keys=True)}",
    "parts in order": "f cities: Oslo, Bergen; days: 3; deep: a: None, True",
    "quoted": "f('cities', 'Oslo', 'Bergen', 'days', 3, 'deep', 'a', null, true)",
}
LOST: dict[str, str] = {
    "another name": f"g {json.dumps(NESTED)}",
    "a value": f"f {json.dumps({**NESTED, 'days': 4})}",
    "an item": "f cities: Oslo; days: 3; deep: a: None, True",
    "a key": "f Oslo, Bergen; days: 3; deep: a: None, True",
    "all before the name, and not as JSON": "cities: Oslo, Bergen; days: 3; deep: a: None, True f",
}


def calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_written_whole_is_accepted(way: str, as_text: bool) -> None:
    verify_turn(WAYS[way], calling(json.dumps(NESTED) if as_text else NESTED), (), ())


@pytest.mark.parametrize("way", LOST)
def test_a_call_that_lacks_something_is_refused(way: str) -> None:
    with pytest.raises(RowFault, match="does not hold its tool call"):
        verify_turn(LOST[way], calling(NESTED), (), ())


def test_arguments_that_are_no_json_are_looked_for_as_they_are() -> None:
    verify_turn("f say hello", calling("say hello"), (), ())
    with pytest.raises(RowFault, match="does not hold its tool call"):
        verify_turn("f say", calling("say hello"), (), ())


@pytest.mark.parametrize(
    ("stretch", "inner", "fine"),
    [
        ("hello<end>", (), True),
        ("hello<end>\n", (), False),
        ("<start>hello", (), False),
        ("<start>hello<end>", ("<start>",), True),
        ("hello", (), True),
    ],
)
def test_control_tokens_stand_at_the_end_or_where_the_template_writes_them(
    stretch: str, inner: tuple[str, ...], fine: bool
) -> None:
    message, controls = {"role": "assistant", "content": "hello"}, ("<start>", "<end>")
    if fine:
        verify_turn(stretch, message, (), controls, inner)
    else:
        with pytest.raises(RowFault, match="holds a control token"):
            verify_turn(stretch, message, (), controls, inner)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "tool_calls"])
def test_a_control_token_that_the_message_says_is_refused_even_at_the_end(field: str) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "hello"}
    message |= calling({"a": "<end>"}) if field == "tool_calls" else {field: "hello <end>"}
    with pytest.raises(RowFault, match="holds a control token"):
        verify_turn('hello f {"a": "<end>"}<end>', message, (), ("<end>",), ("<end>",))


@pytest.mark.parametrize(
    ("content", "stretch", "fine"),
    [
        (" hello \n", "hello<end>", True),
        ("<think>so</think>hello", "hello", True),
        ("<think>so</think>hello", "so", False),
        ("hello", "hell", False),
        ([{"type": "text", "text": "hello"}, {"type": "image"}], "hello", True),
        ([{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}], "hello", False),
    ],
)
def test_the_text_of_a_message_stands_in_its_turn(content: Any, stretch: str, fine: bool) -> None:
    message, tags = {"role": "assistant", "content": content}, ("<think>", "</think>")
    if fine:
        verify_turn(stretch, message, tags, ())
    else:
        with pytest.raises(RowFault, match="does not hold its message"):
            verify_turn(stretch, message, tags, ())
