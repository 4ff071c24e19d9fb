"""Every shape of template: ids are the true render, and what is trained is what the assistant wrote."""

from __future__ import annotations

from typing import Any

import pytest

U, A, S, T = "user", "assistant", "system", "tool"
PLAIN = ["hello, what is 2 + 2?", "It is 4.", "and 3 + 3?", " 6, of course!\n"]


def talk(*turns: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


def two_turns() -> dict[str, Any]:
    return talk(*zip((U, A, U, A), PLAIN, strict=True))


CASES: list[tuple[str, list[str]]] = [
    ("chatml_default_system", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("llama3_trimming", ["It is 4.<|eot_id|>", "6, of course!<|eot_id|>"]),
    ("strips_think", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("merges_tools", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("prompt_opens_think", ["It is 4.<|im_end|>", "\n</think>\n\n 6, of course!\n<|im_end|>"]),
    ("must_alternate", [" It is 4.</s>", "  6, of course!\n</s>"]),
    ("no_last_eot", ["It is 4.<|im_end|>", " 6, of course!"]),
    ("generation_marks", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("marks_without_eot", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("deferred_tool_end", ["It is 4.</s>", " 6, of course!\n</s>"]),
    ("takes_parts", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("in_a_macro", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
    ("captured", ["It is 4.<|im_end|>", " 6, of course!\n<|im_end|>"]),
]


@pytest.mark.parametrize(("template", "expected"), CASES, ids=[name for name, _ in CASES])
def test_all_assistant_turns_are_trained_with_their_end_of_turn(
    template: str, expected: list[str], slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer(template)
    (row,), result = tokenize(tokenizer, two_turns())
    truth = tokenizer.tokenizer.hf.apply_chat_template(two_turns()["messages"], return_dict=False)
    assert row.ids == truth
    assert row.trained == expected
    assert result.switched == ""


@pytest.mark.parametrize(("template", "expected"), CASES, ids=[name for name, _ in CASES])
def test_only_the_last_assistant_turn_is_trained(
    template: str, expected: list[str], slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer(template, train_on="last_assistant_message")
    (row,), _ = tokenize(tokenizer, two_turns())
    assert row.trained == expected[-1:]


def test_words_as_headers_have_no_end_of_turn_token(slice_tokenizer: Any, tokenize: Any) -> None:
    (row,), _ = tokenize(slice_tokenizer("plain_words"), two_turns())
    assert [text.rstrip() for text in row.trained] == ["It is 4.", " 6, of course!"]
    assert all("###" not in text for text in row.trained)


def test_a_refusing_template_sets_its_row_aside_with_its_own_words(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    bad = talk((U, "a"), (U, "b"), (A, "c"))
    rows, result = tokenize(slice_tokenizer("must_alternate"), two_turns(), bad, two_turns())
    assert len(rows) == 2
    assert result.table["source_row"].to_pylist() == [0, 2]
    (example,) = result.examples
    assert (example.source_row, example.dataset) == (1, "test")
    assert "must alternate" in example.reason


def test_thoughts_of_the_last_turn_are_trained_and_earlier_ones_are_gone(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    row = talk(
        (U, "a"), (A, "<think>\nhm\n</think>\n\nfirst"), (U, "b"), (A, "<think>\nwell\n</think>\n\nsecond")
    )
    (tokens,), _ = tokenize(slice_tokenizer("strips_think"), row)
    assert tokens.trained == ["first<|im_end|>", "<think>\nwell\n</think>\n\nsecond<|im_end|>"]


def test_a_think_tag_that_the_prompt_writes_is_context(slice_tokenizer: Any, tokenize: Any) -> None:
    row = talk((U, "a"), (A, "first"))
    row["messages"][-1]["reasoning_content"] = "because"
    (tokens,), _ = tokenize(slice_tokenizer("prompt_opens_think"), row)
    assert tokens.trained == ["because\n</think>\n\nfirst<|im_end|>"]


def test_reasoning_that_a_template_leaves_out_is_no_fault(slice_tokenizer: Any, tokenize: Any) -> None:
    row = talk((U, "a"), (A, "first"))
    row["messages"][-1]["reasoning_content"] = "because"
    (tokens,), _ = tokenize(slice_tokenizer("chatml_default_system"), row)
    assert tokens.trained == ["first<|im_end|>"]


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}},
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def with_tools(calls: Any = None, tools: Any = None) -> dict[str, Any]:
    messages = [
        {"role": U, "content": "weather in Oslo?"},
        {"role": A, "content": "", "tool_calls": calls or [CALL, CALL]},
        {"role": T, "content": "rain"},
        {"role": T, "content": "sun"},
        {"role": A, "content": "Rain, then sun."},
    ]
    return {"messages": messages, "tools": tools or [TOOL]}


def test_tool_calls_are_trained_and_merged_results_are_context(slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer("merges_tools")
    (row,), _ = tokenize(tokenizer, with_tools())
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    assert row.trained == [f"{call}\n{call}<|im_end|>", "Rain, then sun.<|im_end|>"]
    truth = with_tools()
    assert row.ids == tokenizer.tokenizer.hf.apply_chat_template(
        truth["messages"], tools=truth["tools"], return_dict=False
    )


def test_tools_and_calls_may_be_json_strings(slice_tokenizer: Any, tokenize: Any) -> None:
    import json

    text = with_tools(json.dumps([CALL, CALL]), json.dumps([TOOL]))
    (one, other), _ = tokenize(slice_tokenizer("merges_tools"), with_tools(), text)
    assert one.ids == other.ids
    assert one.mask == other.mask


def test_a_header_that_closes_the_tool_results_is_context(slice_tokenizer: Any, tokenize: Any) -> None:
    row = talk((U, "a"), (A, "b"), (T, "c"), (A, "d"))
    (tokens,), _ = tokenize(slice_tokenizer("deferred_tool_end"), row)
    assert tokens.trained == ["b</s>", "d</s>"]


def test_text_parts_go_to_a_template_that_takes_them_and_are_joined_for_others(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    row = {"messages": [{"role": U, "content": parts}, {"role": A, "content": parts}]}
    (taking,), _ = tokenize(slice_tokenizer("takes_parts"), row)
    (joined,), _ = tokenize(slice_tokenizer("chatml_default_system"), row)
    assert taking.trained == ["one ;two;<|im_end|>"]
    assert joined.trained == ["one two<|im_end|>"]


def test_a_template_with_several_names_uses_the_one_for_tools(
    tmp_path: Any, tokenizer_folder: Any, slice_tokenizer: Any, tokenize: Any
) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(tokenizer_folder("chatml_default_system"))
    plain = hf.chat_template
    hf.chat_template = {"default": plain, "tool_use": "{{ 'TOOLS ' }}" + plain}
    hf.save_pretrained(tmp_path)
    tokenizer = slice_tokenizer("named", str(tmp_path))
    rows, _ = tokenize(tokenizer, two_turns(), two_turns() | {"tools": [TOOL]})
    assert [hf.decode(row.ids).startswith("TOOLS") for row in rows] == [False, True]


def test_a_header_that_is_not_known_is_never_trained(slice_tokenizer: Any, tokenize: Any) -> None:
    """No generation prompt and no probe say where a turn of this template begins; its text alone would hold a header."""
    rows, result = tokenize(slice_tokenizer("shows_ten_letters"), talk((U, "hi"), (A, "short")))
    assert rows == []
    assert list(result.row_counts.quarantined) == [
        "the template does not show where an assistant's turn begins and ends"
    ]


def test_a_template_of_one_turn_is_probed_with_one_turn(slice_tokenizer: Any, tokenize: Any) -> None:
    (row,), _ = tokenize(slice_tokenizer("only_one_turn"), talk((U, "hi"), (A, "short")))
    assert row.trained == ["short<|im_end|>"]
    rows, result = tokenize(slice_tokenizer("only_one_turn"), talk((U, "hi"), (A, "bad <|im_start|>user")))
    assert rows == []
    assert list(result.row_counts.quarantined) == ["a trained turn holds a control token"]


def test_a_loop_over_a_number_of_the_row_has_the_bound_too() -> None:
    from raysvc.chat.render.template import ChatTemplate
    from raysvc.chat.row_errors import RowFault

    numbers = "range(m.content | int)"
    loops = (
        f"{{% for a in {numbers} %}}{{% for b in {numbers} %}}{{{{ m.role }}}}{{% endfor %}}{{% endfor %}}"
    )
    template = ChatTemplate(f"{{% for m in messages %}}{loops}{{% endfor %}}", {})
    for number in (2, 3, 40):
        assert len(template.render([{"role": "user", "content": str(number)}], None).text) == 4 * number**2
    with pytest.raises(RowFault, match="characters"):
        template.render([{"role": "user", "content": "90000"}], None)
