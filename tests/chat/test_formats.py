"""Every format gives the sequences and the loss that its columns say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.detect import resolve_format
from raysvc.chat.source.examples import TokensExample
from raysvc.chat.source.formats import Format
from raysvc.errors import ConfigError, SourceError
from raysvc.job.config import TextSpec, TokenizerConfig

CHATML = "chatml_default_system"
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}


def spec(**options: Any) -> TextSpec:
    return TextSpec(tokenizer=TokenizerConfig(name="none"), **options)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [], "id": 3}, "chat"),
        ({"instruction": "", "output": "", "input": ""}, "alpaca"),
        ({"prompt": "", "completion": ""}, "prompt_completion"),
        ({"prompt": "", "chosen": "", "rejected": ""}, "preference"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "pretokenized"),
    ],
)
def test_the_format_is_found_by_columns(row: dict[str, Any], name: str) -> None:
    assert resolve_format(spec(), row).name == name


def test_a_misspelled_column_is_named_with_the_nearest_and_all_that_are_there() -> None:
    with pytest.raises(SourceError) as caught:
        resolve_format(spec(format="chat"), {"mesages": [], "id": 1})
    assert "the rows have the columns id, mesages (did you mean 'mesages' for 'messages'?)" in str(
        caught.value
    )
    with pytest.raises(SourceError, match="no format fits"):
        resolve_format(spec(), {"mesages": [], "id": 1})


def test_columns_are_mapped_and_checked() -> None:
    form = resolve_format(spec(columns={"messages": "talk"}), {"talk": []})
    assert (form.name, form.column("messages")) == ("chat", "talk")
    with pytest.raises(SourceError, match="names 'talks'"):
        resolve_format(spec(columns={"messages": "talks"}), {"talk": []})
    with pytest.raises(ConfigError, match="did you mean 'messages'"):
        resolve_format(spec(columns={"mesages": "talk"}), {"talk": []})


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": []}, {"train_on": "completion"}),
        ({"text": ""}, {"train_on": "message_weight"}),
        ({"text": ""}, {"max_length": 5, "truncation": "keep_end_turns"}),
    ],
)
def test_a_policy_that_the_format_cannot_have_is_refused(
    row: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        resolve_format(spec(**options), row)


def test_alpaca_is_one_question_and_one_answer(slice_tokenizer: Any, tokenize: Any) -> None:
    rows = [
        {"instruction": "Add.", "input": "2 + 2", "output": "4"},
        {"instruction": "Say hello.", "input": "", "output": "hello"},
    ]
    made, _ = tokenize(slice_tokenizer(CHATML, format="alpaca"), *rows)
    assert [row.trained for row in made] == [["4<|im_end|>"], ["hello<|im_end|>"]]
    assert "<|im_start|>user\nAdd.\n\n2 + 2<|im_end|>" in made[0].hf.decode(made[0].ids)
    assert "<|im_start|>user\nSay hello.<|im_end|>" in made[1].hf.decode(made[1].ids)


def test_plain_text_is_trained_whole_and_ends_once(slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer("no template at all")
    made, _ = tokenize(tokenizer, {"text": "hello there"}, {"text": "hello there<|im_end|>"})
    assert made[0].ids == made[1].ids
    assert made[0].trained == ["hello there<|im_end|>"]
    assert all(made[0].mask)


def test_what_the_tokenizer_puts_before_a_text_is_context(
    special_folder: Any, slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer("", special_folder("adds_bos", CHATML))
    made, _ = tokenize(tokenizer, {"text": "hello there"})
    hf = tokenizer.tokenizer.hf
    assert made[0].ids == [*hf("hello there")["input_ids"], hf.eos_token_id]
    assert made[0].mask == [0] + [1] * (len(made[0].ids) - 1)


def test_a_string_prompt_is_context_and_its_completion_is_trained(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    rows = [{"prompt": "What is 2 + 2?\n", "completion": "The answer is 4."}]
    for train_on in ("completion", "all_assistant_messages", "last_assistant_message"):
        made, _ = tokenize(slice_tokenizer("no template", train_on=train_on), *rows)
        assert made[0].trained == ["The answer is 4.<|im_end|>"]
    made, _ = tokenize(slice_tokenizer("no template", train_on="all_tokens"), *rows)
    assert all(made[0].mask)


def test_a_token_over_prompt_and_completion_sets_the_row_aside(slice_tokenizer: Any, tokenize: Any) -> None:
    made, result = tokenize(slice_tokenizer("no template"), {"prompt": "The ans", "completion": "wer is 4."})
    assert made == []
    (reason,) = result.row_counts.quarantined
    assert reason.startswith("a token spans the prompt and its completion")
    blank_in_prompt, in_completion, line_break = (
        {"prompt": prompt, "completion": completion}
        for prompt, completion in [("is ", "four"), ("is", " four"), ("is\n", "four")]
    )
    assert not tokenize(slice_tokenizer("no template"), blank_in_prompt)[0], "the reason says what to do"
    assert len(tokenize(slice_tokenizer("no template"), in_completion, line_break)[0]) == 2


def test_prompt_messages_are_context_under_completion(slice_tokenizer: Any, tokenize: Any) -> None:
    row = {"prompt": [USER, ANSWER, USER], "completion": [{"role": "assistant", "content": "again"}]}
    made, _ = tokenize(slice_tokenizer(CHATML, train_on="completion"), row)
    assert made[0].trained == ["again<|im_end|>"]
    made, _ = tokenize(slice_tokenizer(CHATML), row)
    assert made[0].trained == ["hi there<|im_end|>", "again<|im_end|>"]


def test_a_preference_is_two_sequences_of_one_row(slice_tokenizer: Any, tokenize: Any) -> None:
    good, bad = ANSWER, {"role": "assistant", "content": "go away"}
    rows = [
        {"prompt": [USER, ANSWER, USER], "chosen": [good], "rejected": [bad]},
        {"prompt": "hello", "chosen": [USER, good], "rejected": [USER, bad]},
        {"prompt": [USER], "chosen": [good], "rejected": [{"role": "nobody"}]},
    ]
    made, result = tokenize(slice_tokenizer(CHATML), *rows)
    assert [row.trained for row in made] == [["hi there<|im_end|>"], ["go away<|im_end|>"]] * 2
    assert result.table["chosen"].to_pylist() == [1, 0, 1, 0]
    assert result.table["source_row"].to_pylist() == [0, 0, 1, 1]
    assert (result.row_counts.rows_in, result.row_counts.rows_written) == (3, 2)
    assert made[2].hf.decode(made[2].ids).count("<|im_start|>user") == 1


def test_weights_of_messages_choose_what_is_trained(slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer(CHATML, train_on="message_weight")

    def row(*weights: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [part for weight in weights for part in (USER, {**ANSWER, **weight})]}

    rows = [
        row({"weight": 0}, {"weight": 1}),
        row({"train": True}, {"train": False}),
        row({}, {"weight": 0}),
        row({"weight": 0}),
        row({"weight": 0.5}),
        {"messages": [{**USER, "weight": 1}, ANSWER]},
    ]
    made, result = tokenize(tokenizer, *rows)
    whole = [row.hf.decode(row.ids).index("hi there") for row in made]
    first = [row.mask.index(1) for row in made]
    assert len(made) == 3
    assert first[0] > first[1] == first[2]
    assert whole[0] == whole[1]
    assert result.row_counts.dropped == {"every message has weight 0": 1}
    assert sum(result.row_counts.quarantined.values()) == 2


def test_a_row_without_an_assistant_is_dropped(slice_tokenizer: Any, tokenize: Any) -> None:
    _, result = tokenize(slice_tokenizer(CHATML), {"messages": [USER]}, {"messages": [USER, ANSWER]})
    assert result.row_counts.dropped == {"no assistant message": 1}


def test_an_empty_answer_is_not_trained(slice_tokenizer: Any, tokenize: Any) -> None:
    silent = {"role": "assistant", "content": " \n"}
    rows = [{"messages": [USER, silent, USER, ANSWER]}, {"messages": [USER, silent]}]
    made, result = tokenize(slice_tokenizer(CHATML), *rows)
    assert [row.trained for row in made] == [["hi there<|im_end|>"]]
    assert result.row_counts.dropped == {"every trained message is empty": 1}


def test_the_system_column_comes_first_unless_there_is_a_system_message(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [USER, ANSWER], "system": "Be brief."},
        {"messages": [system, USER, ANSWER], "system": "Be long."},
        {"messages": [system, USER, ANSWER], "system": None},
    ]
    made, result = tokenize(slice_tokenizer(CHATML), *rows)
    assert made[0].ids == made[1].ids == made[2].ids
    assert result.row_counts.normalized == {"system columns left out beside another system message": 1}


def test_messages_may_be_a_json_string_and_unknown_columns_change_nothing(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    rows = [{"messages": json.dumps([USER, ANSWER])}, {"messages": [USER, ANSWER], "score": 3, "tags": ["x"]}]
    made, _ = tokenize(slice_tokenizer(CHATML), *rows)
    assert made[0].ids == made[1].ids


BAD_ROWS: list[tuple[Any, str]] = [
    ({"messages": None}, "no value in column 'messages'"),
    ({"messages": []}, "'messages' is not a list of messages"),
    ({"messages": "not json"}, "broken JSON in 'messages'"),
    ({"messages": ["hello"]}, "'messages' holds something that is not a message"),
    ({"messages": [USER, {"content": "x"}]}, "a message has no role"),
    ({"messages": [USER, {"role": "assistant", "content": 5}]}, "a content is neither text nor parts"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]},
        "a content part is not text",
    ),
    ({"messages": [USER, {**ANSWER, "tool_calls": "{"}]}, "broken JSON in 'tool_calls'"),
    ({"messages": [USER, {**ANSWER, "tool_calls": 5}]}, "'tool_calls' is not a list"),
    ({"messages": [USER, ANSWER], "tools": "[1]"}, "'tools' is not a list of tools"),
    ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "a text holds a lone surrogate"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[reason for _, reason in BAD_ROWS])
def test_a_bad_field_sets_aside_its_row_alone(
    row: dict[str, Any], reason: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    good = {"messages": [USER, ANSWER]}
    made, result = tokenize(slice_tokenizer(CHATML), good, row, good)
    assert len(made) == 2
    assert list(result.row_counts.quarantined) == [reason]
    assert result.examples[0].source_row == 1


BAD_FIELDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "b"}, {"history": [["q", "a"]]}, "column 'history' beside a prompt"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"history": "x"}, "column 'history' beside a prompt"),
    (
        {"prompt": "a", "completion": "b", "label": True},
        {"label": "maybe"},
        "'label' is neither true nor false",
    ),
    ({"instruction": "a", "output": "b"}, {"output": 5}, "'output' is not text"),
    (
        {"instruction": "a", "output": "b"},
        {"history": ["a", "b"]},
        "'history' is not a list of pairs of texts",
    ),
    ({"text": "a"}, {"text": ""}, "the text is empty"),
    ({"input_ids": [1], "loss_mask": [1]}, {"input_ids": [], "loss_mask": []}, "input_ids is empty"),
]


@pytest.mark.parametrize(("good", "change", "reason"), BAD_FIELDS)
def test_a_bad_field_of_any_format_sets_aside_its_row_alone(
    good: dict[str, Any], change: dict[str, Any], reason: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    _, result = tokenize(slice_tokenizer(CHATML), good, good | change, good)
    assert sorted(set(result.table["source_row"].to_pylist())) == [0, 2]
    assert list(result.row_counts.quarantined) == [reason]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), {1}, b"a"])
def test_a_value_that_json_does_not_have_is_a_fault_wherever_it_stands(value: Any) -> None:
    for tools in (value, [{"x": [1, value]}]):
        with pytest.raises(RowFault, match="JSON does not have"):
            Format("chat", {}, "all_assistant_messages").check_values(
                {"messages": [USER, ANSWER], "tools": tools}
            )
    Format("chat", {}, "all_assistant_messages").check_values(
        {"messages": [USER], "tools": [{"x": [1, None, 2.5, "a", True]}]}
    )


def pretokenized(row: dict[str, Any], train_on: str = "all_assistant_messages") -> TokensExample:
    (made,) = Format("pretokenized", {}, train_on).normalize(row)
    assert isinstance(made, TokensExample)
    return made


def test_tokens_may_come_with_a_mask_or_with_labels() -> None:
    assert pretokenized({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}).mask == [0, 1, 1]
    assert pretokenized({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}).mask == [0, 1, 1]
    assert pretokenized({"input_ids": [1, 2]}, "all_tokens").mask == [1, 1]


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [0, 2]},
        {"input_ids": [1, 2], "labels": [2, -100]},
        {"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 0]},
        {"input_ids": "12", "loss_mask": [0, 1]},
    ],
)
def test_tokens_that_contradict_themselves_are_a_fault(row: dict[str, Any]) -> None:
    with pytest.raises(RowFault):
        pretokenized(row)


def test_tokens_are_written_as_they_are_when_the_vocabulary_has_them(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    import numpy as np

    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": np.array([5, 6]), "labels": np.array([-100, 6])},
        {"input_ids": [5, 10**6], "loss_mask": [0, 1]},
        {"input_ids": [5, 6], "loss_mask": [0, 0]},
    ]
    made, result = tokenize(slice_tokenizer("no template"), *rows)
    assert [(row.ids, row.mask) for row in made] == [([5, 6, 7], [0, 1, 1]), ([5, 6], [0, 1])]
    assert result.row_counts.quarantined == {"a token id is not in the vocabulary": 1}
    assert result.row_counts.dropped == {"no trained token": 1}
