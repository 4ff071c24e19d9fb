"""Turns that differ from the usual one in a head have the spans that the rules give, on any conversation: masks and faults."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow

FAST = [
    "chatml_default_system",
    "llama3_trimming",
    "strips_think",
    "merges_tools",
    "must_alternate",
    "generation_marks",
    "marks_without_eot",
    "deferred_tool_end",
    "no_last_eot",
    "qwen3_like",
    "prompt_opens_think",
    "plain_words",
    "takes_parts",
    "first_is_a_title",
]
SLOW = ["in_a_macro", "captured", "lists_users_first"]
PIECES = [
    "a",
    "hello world",
    "Yes",
    " ",
    "\n",
    "\n\n",
    "\t",
    "é",
    "e\u0301",
    "你好",
    "😀",
    "1 + 1 = 2",
    "assistant",
    "user",
]
TRICKS = [
    "<think>",
    "</think>",
    "<think>\nhm\n</think>\n\n",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "</s>",
    "<tool_response>",
    "### assistant:",
    "\x00",
    "\x1c",
    "\xa0",
]
content = st.lists(st.sampled_from(PIECES + TRICKS), max_size=5).map("".join)
call = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["f", "get_weather"]),
                "arguments": st.dictionaries(
                    st.sampled_from(["a", "b"]),
                    st.none() | st.integers(-5, 5) | content | st.booleans(),
                    max_size=2,
                ),
            }
        )
    }
)


@st.composite
def message(draw: Any) -> dict[str, Any]:
    role = draw(st.sampled_from(["user", "assistant", "assistant", "tool"]))
    made: dict[str, Any] = {"role": role, "content": draw(content)}
    if role == "assistant" and draw(st.integers(0, 5)) == 0:
        made["tool_calls"] = draw(st.lists(call, max_size=2))
    if role == "assistant" and draw(st.integers(0, 5)) == 0:
        made[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = draw(content)
    if draw(st.integers(0, 9)) == 0:
        made["name"] = draw(st.none() | content)
    return made


@st.composite
def conversation(draw: Any) -> dict[str, Any]:
    messages = draw(st.lists(message(), min_size=1, max_size=6))
    if draw(st.booleans()):
        roles = ["user", "assistant"] * 4
        messages = [{**made, "role": role} for made, role in zip(messages, roles, strict=False)]
    if draw(st.integers(0, 3)) == 0:
        messages = [{"role": "system", "content": draw(content)}, *messages]
    row: dict[str, Any] = {"messages": messages}
    if draw(st.integers(0, 4)) == 0:
        row["tools"] = [{"type": "function", "function": {"name": "f"}}]
    return row


@pytest.fixture(scope="module")
def pairs(slice_tokenizer: Any) -> Any:
    """Template -> (tokenizer with everything, one without `_decides_alone` and with the reference encoder)."""
    made: dict[str, tuple[SliceTokenizer, SliceTokenizer]] = {}

    def pair(name: str, **options: Any) -> tuple[SliceTokenizer, SliceTokenizer]:
        key = name + json.dumps(options)
        if key not in made:
            fast, slow = slice_tokenizer(name, **options), slice_tokenizer(name, **options)
            for has_tools in (False, True):
                finder = slow._rows.renderer._template(has_tools)[1]
                finder._decides_alone = lambda *_: False
            slow._encoder = slow._reference
            made[key] = (fast, slow)
        return made[key]

    return pair


def run(tokenizer: SliceTokenizer, rows: list[dict[str, Any]]) -> Any:
    result = tokenizer.run([SourceRow(number, row) for number, row in enumerate(rows)])
    assert result.switched == "" or result.encoder == "tokenizers"
    return result


def same(one: Any, other: Any) -> None:
    assert one.table.to_pydict() == other.table.to_pydict()
    assert one.row_counts == other.row_counts


@pytest.mark.parametrize("template", FAST + SLOW)
@given(rows=st.lists(conversation(), min_size=1, max_size=4))
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_turns_are_found_as_by_the_rules(template: str, pairs: Any, rows: list[dict[str, Any]]) -> None:
    fast, slow = pairs(template)
    same(run(fast, rows), run(slow, rows))


@pytest.mark.parametrize("template", ["merges_tools", "qwen3_like", "llama3_trimming", "deferred_tool_end"])
@given(rows=st.lists(conversation(), min_size=1, max_size=4))
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_turns_are_cut_alike(template: str, pairs: Any, rows: list[dict[str, Any]]) -> None:
    fast, slow = pairs(template, max_length=60, truncation="keep_end_turns")
    same(run(fast, rows), run(slow, rows))


plain_message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": content})
plain = st.lists(plain_message, min_size=1, max_size=5).map(lambda made: {"messages": made})
with_system = st.tuples(content, plain).map(
    lambda made: {"messages": [{"role": "system", "content": made[0]}, *made[1]["messages"]]}
)


@pytest.mark.parametrize("template", FAST + SLOW)
@given(rows=st.lists(plain | with_system, min_size=1, max_size=6))
@example(rows=[{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\x1c"}]}])
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_json_lines_give_what_rows_give(template: str, pairs: Any, rows: list[dict[str, Any]]) -> None:
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    for train_on in ("all_assistant_messages", "last_assistant_message", "all_tokens"):
        fast, slow = pairs(template, train_on=train_on)
        same(fast.run_json_lines(lines, 0), run(slow, rows))


def test_tools_that_json_cannot_spell_stay_their_rows_own(pairs: Any) -> None:
    def with_tool(described: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        return {"messages": messages, "tools": [{"name": "f", "description": described}]}

    fast, slow = pairs("merges_tools")
    rows = [with_tool(odd) for odd in (None, float("nan"), "\ud800", 2**70, "plain")]
    same(run(fast, rows), run(slow, rows))
    assert run(fast, rows).row_counts.rows_written == 4


def test_a_trained_message_outside_of_every_loop_is_refused(pairs: Any) -> None:
    said = [("assistant", "title"), ("user", "a"), ("assistant", "b")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    fast, slow = pairs("first_is_a_title")
    usual = {"messages": row["messages"][1:]}
    lines = "\n".join(json.dumps(each) for each in [usual, row]).encode()
    for result in (run(fast, [usual, row]), run(slow, [usual, row]), fast.run_json_lines(lines, 0)):
        assert list(result.row_counts.quarantined) == ["a trained turn does not begin with a known header"]
        assert result.table["source_row"].to_pylist() == [0]


@pytest.mark.parametrize("template", ["generation_marks", "marks_without_eot"])
def test_a_turn_of_a_long_row_takes_as_many_calls_as_one_of_a_short_row(template: str, pairs: Any) -> None:
    fast, _ = pairs(template)

    def calls(turns: int) -> int:
        said = [
            {"role": role, "content": f"{turn} is what I say"}
            for turn in range(turns)
            for role in ("user", "assistant")
        ]
        row, counted = SourceRow(0, {"messages": said}), 0

        def count(_: Any, event: str, __: Any) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            result = fast.run([row])
        finally:
            sys.setprofile(before)
        assert result.table.num_rows == 1, "the row was left out"
        return counted

    calls(20)  # what is made once
    assert calls(320) < 2.2 * calls(160)
