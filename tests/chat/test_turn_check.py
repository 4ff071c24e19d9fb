"""A turn is accepted when all of its message stands in it, and refused when a part is missing."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.chat.row_errors import RowFault
from raysvc.chat.turns import turn_check
from raysvc.chat.turns.turn_check import (
    is_empty,
    reasoning_of,
    tags_of,
    thoughts_of,
    unescaped,
    verify_turn,
)

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


UNSORTED = {"B": [{"d": 1, "c": "x"}], "a": 2}


@pytest.mark.parametrize(
    ("arguments", "stretch", "fine"),
    [
        (UNSORTED, "f a: 2, B: c: x, d: 1", True),  # as Jinja's `dictsort` has the keys, at every depth
        (UNSORTED, "f B: d: 1, c: x, a: 2", True),
        (UNSORTED, "f B: c: x, d: 1, a: 2", False),  # in no order that a template writes
        (UNSORTED, 'f {broken} {"B": [{"c": "x", "d": 1}], "a": 2}', True),  # JSON behind what is none
        ({"a": 1}, "f " + "[" * 12_000 + " a: 1", True),  # nested too deeply to be JSON
        ({"a": "  "}, "f a:  ", True),
        ({"a": "  "}, "f a:", False),
    ],
)
def test_the_parts_of_a_call_have_an_order(arguments: Any, stretch: str, fine: bool) -> None:
    if fine:
        verify_turn(stretch, calling(arguments), (), ())
        return
    with pytest.raises(RowFault, match="does not hold its tool call"):
        verify_turn(stretch, calling(arguments), (), ())


def test_a_control_token_is_looked_for_in_texts_beside_numbers() -> None:
    verify_turn("f n: 3, x: y<end>", calling({"n": 3, "x": "y"}), (), ("<end>",))
    with pytest.raises(RowFault, match="holds a control token"):
        verify_turn("f n: 3, x: <end>", calling({"n": 3, "x": "<end>"}), (), ("<end>",))


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


def test_tags_are_the_pairs_that_a_template_closes_the_longest_first() -> None:
    template = "{{ '</think>' }} [/THINK] <b> [B] </s> </a.b:c-d> </not this>"
    expected = {"<think>", "</think>", "[THINK]", "[/THINK]", "<a.b:c-d>", "</a.b:c-d>"}
    found = tags_of(template, ["</s>", "<s>"])
    assert set(found) == expected
    assert len(found) == len(expected)
    assert list(map(len, found)) == sorted(map(len, expected), reverse=True)


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("message", "thought", "says_nothing"),
    [
        ({"content": "hello"}, "", False),
        ({"content": ""}, "", True),
        ({"content": " \n"}, "", True),
        ({"content": None}, "", True),
        ({}, "", True),
        ({"content": [{"type": "text", "text": " "}, {"type": "image"}]}, "", True),
        ({"content": [{"type": "text", "text": " "}, {"type": "text", "text": "a"}]}, "", False),
        ({"content": "", "tool_calls": []}, "", True),
        ({"content": "", "tool_calls": [{"function": {"name": "f"}}]}, "", False),
        ({"content": "", "reasoning_content": " hm "}, "hm", False),
        ({"content": " ", "reasoning": "hm"}, "hm", False),
        ({"content": [], "thinking": "hm\n"}, "hm", False),
        ({"content": "", "reasoning_content": " ", "thinking": "hm"}, "hm", False),
        ({"content": "", "reasoning_content": None, "reasoning": 7}, "", True),
        ({"content": "a", "thinking": "c", "reasoning": "b", "reasoning_content": "a"}, "a", False),
        ({"content": THOUGHT + "so"}, "hm", False),
        ({"content": "hm</think>so</think>no"}, "hm", False),
        ({"content": "no<think>so<think>hm</think>"}, "hm", False),
        ({"content": "<think>hm"}, "", False),
        ({"content": THOUGHT, "reasoning": "of a field"}, "of a field", False),
        ({"content": [{"type": "text", "text": THOUGHT}]}, "", False),
    ],
)
def test_what_a_message_thinks_and_whether_it_says_anything(
    message: dict[str, Any], thought: str, says_nothing: bool
) -> None:
    assert reasoning_of(message) == thought
    assert is_empty(message) == says_nothing


def test_the_reasoning_of_messages_is_that_of_those_that_have_some() -> None:
    thinking = [{"content": "a", "reasoning": thought} for thought in ("one", "two")]
    assert thoughts_of([*thinking, {"content": "b"}, {"content": "<think>c</think>d"}]) == ["one", "two", "c"]


@pytest.mark.parametrize("control", ["<end>", "<start>"])
def test_a_control_token_in_any_part_of_a_message_is_refused(control: str) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": f"you {control}"}]
    stretch = f"hello you {control}"
    with pytest.raises(RowFault, match="holds a control token") as fault:
        verify_turn(stretch, {"content": parts}, (), [control], [control])
    assert repr(control) in str(fault.value)
    assert stretch in str(fault.value)
    verify_turn(stretch, {"content": [parts[0]]}, (), [control], [control])


@pytest.mark.parametrize(
    ("content", "stretch", "tags", "fine"),
    [
        ("  hello  ", "hello", (), True),
        ("<think>so</think>", "", ("<think>", "</think>"), False),
        ("<think>so</think> ", "so", ("<think>", "</think>"), True),
        ("a<b>c", "a", ("<b>",), False),
        ("a<b> c ", "c", ("<b>",), True),
        ("a<b>c", "c", (), False),
        ("<b>  <c>", "anything", ("<b>", "<c>"), False),
    ],
)
def test_a_text_may_be_trimmed_and_cut_at_tags_of_the_template(
    content: str, stretch: str, tags: tuple[str, ...], fine: bool
) -> None:
    if fine:
        verify_turn(stretch, {"content": content}, tags, ())
    else:
        with pytest.raises(RowFault, match="does not hold its message"):
            verify_turn(stretch, {"content": content}, tags, ())


def test_a_fault_shows_both_ends_of_a_long_text() -> None:
    with pytest.raises(RowFault) as fault:
        verify_turn("s" * 60, {"content": "a" * 40 + "b" * 40}, (), ())
    assert f"'{'a' * 30}…{'b' * 30}' not in '{'s' * 60}'" in str(fault.value)
    with pytest.raises(RowFault) as fault:
        verify_turn("", calling({"a": "b"}), (), ())
    assert "'f' is missing" in str(fault.value)
    with pytest.raises(RowFault) as fault:
        verify_turn("f", calling({"a": {"b"}}), (), ())
    assert "the call of 'f' with {\"a\": \"{'b'}\"} is missing" in str(fault.value)


SAID = st.text(st.sampled_from("ab é😀\"'<&\\\n"), max_size=5).map(lambda text: f"{text}b")
SCALAR = SAID | st.integers(-99, 99) | st.booleans() | st.none() | st.floats(0, 1)
GIVEN = st.dictionaries(SAID, SCALAR | st.lists(SCALAR, max_size=2), min_size=1, max_size=3)
WRITERS: list[Callable[[Any], str]] = [
    json.dumps,
    lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    repr,
    lambda value: html.escape(str(value)),
    lambda value: str(value).strip(),
    lambda value: json.dumps(value, ensure_ascii=False).replace("'", "\\'"),
]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for pair in value.items() for one in pair for leaf in leaves(one)]
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("write", WRITERS)
@given(arguments=GIVEN, name=st.sampled_from(["f", "a", "get.b"]), around=st.sampled_from(["", " ", "[{("]))
@settings(max_examples=25)
def test_a_call_that_is_written_leaf_by_leaf_is_found_and_one_without_a_leaf_is_not(
    write: Callable[[Any], str], arguments: Any, name: str, around: str
) -> None:
    call = {"function": {"name": name, "arguments": arguments}}
    whole = [write(leaf) for leaf in leaves(arguments)]
    verify_turn(f"{around}{name}" + ", ".join(["", *whole]), {"tool_calls": [call]}, (), ())
    lost = {"function": {"name": name, "arguments": {**arguments, "zz": "nowhere"}}}
    for missing in (lost, {"function": {"name": "nobody", "arguments": arguments}}):
        with pytest.raises(RowFault, match="does not hold its tool call"):
            verify_turn(f"{around}{name}" + ", ".join(["", *whole]), {"tool_calls": [missing]}, (), ())


@pytest.mark.parametrize(
    ("function", "stretch", "fine"),
    [
        ({"name": "f", "arguments": {}}, "f", True),
        ({"name": "f"}, "f", True),
        ({"name": "f", "arguments": {}}, "g", False),
        ({"name": None, "arguments": {"a": 1}}, "a 1", True),
        ({"name": None, "arguments": {"a": 1}}, "1 a", False),
        ({"name": None, "arguments": {"a": {"b": 1, "c": 2}}}, '{"a": {"c": 2, "b": 1}}', True),
        ({"name": "f", "arguments": {"a": 1}}, "f f {a} f a 1", True),
        ({"name": "f", "arguments": {"a": 1}}, "f a 1 then f of nothing", True),
        ({"name": "f", "arguments": {"a": 1}}, '[{"a": 1}, "f"]', True),
        ({"name": "f", "arguments": [1, 2]}, "f {broken [1, 2]", True),
        ({"name": "f", "arguments": [1, 2]}, "f [2, 1]", False),
        ({"name": "f", "arguments": {"a": "b", "c": "b"}}, "f a b c", False),
        ({"name": "f", "arguments": {"a": ""}}, "f a", True),
        ({"name": "f", "arguments": {"a": " b "}}, "f a b", True),
        ({"name": "f", "arguments": '{"a": 1}'}, "f a 1", True),
        ({"name": "f", "arguments": '{"a": 1}'}, "f a 2", False),
        ({"name": "f.g", "arguments": {"a": 1}}, "a 1 fxg", False),
    ],
)
def test_names_and_arguments_stand_in_their_order(function: dict[str, Any], stretch: str, fine: bool) -> None:
    if fine:
        verify_turn(stretch, {"tool_calls": [{"function": function}]}, (), ())
    else:
        with pytest.raises(RowFault, match="does not hold its tool call"):
            verify_turn(stretch, {"tool_calls": [{"function": function}]}, (), ())


@pytest.mark.parametrize("value", ['ab"cd', "abécdé", "é'a\nb"])
@pytest.mark.parametrize("write", WRITERS[:3])
def test_a_text_that_lost_a_character_is_not_found(write: Callable[[Any], str], value: str) -> None:
    written = write(value)[1:-1]
    verify_turn(f"f k {written}", calling({"k": value}), (), ())
    for broken in (f"Z{written[1:]}", f"{written[:-1]}Z"):
        with pytest.raises(RowFault, match="does not hold its tool call"):
            verify_turn(f"f k {broken}", calling({"k": value}), (), ())


def test_the_end_of_turn_is_no_text_of_a_call_that_does_not_say_it() -> None:
    verify_turn("f a b<end>", calling({"a": "b"}), (), ["<end>"])
    with pytest.raises(RowFault, match="a trained turn holds a control token: "):
        verify_turn("f a b<end>", calling({"a": ["b", {"c": "b<end>"}]}), (), ["<end>"])


ESCAPES: list[Callable[[str], str]] = [
    str,
    json.dumps,
    repr,
    html.escape,
    lambda text: json.dumps(text, ensure_ascii=False),
    lambda text: json.dumps(json.dumps({"a": text})),
    lambda text: json.dumps(text).replace("<", "\\u003c").replace("&", "\\u0026"),
    lambda text: (
        text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    ),  # LFM2's
    lambda text: html.escape(json.dumps(text)),
]


@pytest.mark.parametrize("escape", ESCAPES)
@given(text=st.text(st.sampled_from("ab \n\t\r\x1b\x00é\U0001f600'\"\\<>/0u") | st.characters(codec="utf-8")))
@settings(max_examples=60)
def test_a_text_is_found_however_it_is_escaped(escape: Callable[[str], str], text: str) -> None:
    assert unescaped(text) in unescaped(f'write("{escape(text)}")')
    verify_turn(f'f a="{escape(text)}"', calling({"a": text}), (), ())


@pytest.mark.parametrize("text", ["a\\nb", "&lt;b&gt;", "\\" * 3000, "&" + "amp;" * 3000])
def test_texts_that_look_escaped_are_found_and_others_are_not(text: str) -> None:
    verify_turn(f"f {json.dumps({'x': text})[1:]}", calling({"x": text}), (), ())
    with pytest.raises(RowFault, match="does not hold its tool call"):
        verify_turn("f x: a nb lt b gt", calling({"x": text + "c"}), (), ())


def test_a_pair_of_surrogates_is_one_character_and_a_lone_one_is_itself() -> None:
    assert unescaped("\\ud83d\\ude00 \\uD83D \\x41 \\q") == "\U0001f600 \ud83d A q"


def test_brackets_are_not_tried_one_by_one_where_they_are_nested_too_deep(monkeypatch: Any) -> None:
    class Counting(json.JSONDecoder):
        def raw_decode(self, text: str, at: int = 0) -> Any:
            tried.append(at)
            return super().raw_decode(text, at)

    tried: list[int] = []
    monkeypatch.setattr(turn_check, "_DECODER", Counting())
    said = {"code": "[" * 30_000}
    verify_turn(f"f code: {said['code']}", calling(said), (), ())
    assert len(tried) < 10


@pytest.mark.parametrize(
    ("content", "fine"),
    [
        ("<think>\nmaybe\n</think>\n\n", True),
        ("maybe\n</think>", True),  # the prompt wrote the beginning
        ("<think>maybe</think> I look", False),
        ("<think>maybe</think><think>not</think>", False),
        ("<think>maybe", False),
    ],
)
def test_a_content_that_only_thinks_may_be_stripped_beside_calls(content: str, fine: bool) -> None:
    stretch, tags = 'call f with {"a": 1}', ("<think>", "</think>")
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    message = {"role": "assistant", "content": content}
    with pytest.raises(RowFault, match="does not hold its message"):
        verify_turn(stretch, message, tags, ())
    if fine:
        verify_turn(stretch, {**message, "tool_calls": calls}, tags, ())
        assert thoughts_of([message])[0] not in stretch
    else:
        with pytest.raises(RowFault, match="does not hold its message"):
            verify_turn(stretch, {**message, "tool_calls": calls}, tags, ())


@pytest.mark.parametrize(
    "stretch",
    [
        'f {"city": "Oslo", "days": null}',
        'f {"city": "Oslo"}',
        "f <city>Oslo</city>",
        "f <city>Oslo</city><days></days>",
        "f <city>Oslo</city><days>None</days>",
    ],
)
def test_a_null_argument_may_be_left_out(stretch: str) -> None:
    verify_turn(stretch, calling({"city": "Oslo", "days": None}), (), ())
    verify_turn(stretch, calling('{"city": "Oslo", "days": null}'), (), ())
    with pytest.raises(RowFault, match="does not hold its tool call"):
        verify_turn(stretch, calling({"city": "Oslo", "days": 3}), (), ())
    with pytest.raises(RowFault, match="does not hold its tool call"):
        verify_turn(stretch, calling({"city": "Rome", "days": None}), (), ())


def test_a_call_of_nulls_alone_may_show_its_name_alone() -> None:
    verify_turn("f()", calling({"days": None}), (), ())
