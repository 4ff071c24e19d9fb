"""Rows as the public data sets have them are read as what they are, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raysvc.chat.source.detect import resolve_format, seen
from raysvc.errors import ConfigError, SourceError
from raysvc.job.config import TextSpec, TokenizerConfig

CHATML = "chatml_default_system"
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}
HUMAN, GPT = {"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi there"}
SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def spec(**options: Any) -> TextSpec:
    return TextSpec(tokenizer=TokenizerConfig(name="none"), **options)


ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = {
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, [USER, ANSWER], 1),
    "ShareGPT with system and tools columns": (
        {"conversations": [HUMAN, GPT], "system": "Be brief.", "tools": "[]"},
        [SYSTEM, USER, ANSWER],
        1,
    ),
    "conversations with role and content": ({"conversations": [USER, ANSWER]}, [USER, ANSWER], 1),
    "prompt and response": ({"prompt": "hello", "response": "hi there"}, [USER, ANSWER], 1),
    "question and answer": ({"question": "hello", "answer": "hi there"}, [USER, ANSWER], 1),
    "query and response": ({"query": "hello", "response": "hi there"}, [USER, ANSWER], 1),
    "prompt messages and a response": (
        {"prompt": [SYSTEM, USER], "response": "hi there"},
        [SYSTEM, USER, ANSWER],
        1,
    ),
    "question, answer and history": (
        {"question": "hello", "answer": "hi there", "history": [["q", "a"]]},
        [*EARLIER, USER, ANSWER],
        2,
    ),
    "Alpaca with history and system": (
        {
            "instruction": "hello",
            "input": "",
            "output": "hi there",
            "history": [["q", "a"]],
            "system": "Be brief.",
        },
        [SYSTEM, *EARLIER, USER, ANSWER],
        2,
    ),
    "Alpaca with history as text": (
        {"instruction": "hello", "output": "hi there", "history": '[["q", "a"]]'},
        [*EARLIER, USER, ANSWER],
        2,
    ),
    "Dolly": (
        {"instruction": "hello", "context": "you", "response": "hi there", "category": "x"},
        [{"role": "user", "content": "hello\n\nyou"}, ANSWER],
        1,
    ),
    "OpenOrca": (
        {"id": "x", "system_prompt": "Be brief.", "question": "hello", "response": "hi there"},
        [SYSTEM, USER, ANSWER],
        1,
    ),
    "Bedrock": (
        {"system": [{"type": "text", "text": "Be "}, {"text": "brief."}], "messages": [USER, ANSWER]},
        [SYSTEM, USER, ANSWER],
        1,
    ),
    "OpenHermes": (
        {"conversations": [HUMAN, GPT], "system_prompt": "Be brief.", "category": None},
        [SYSTEM, USER, ANSWER],
        1,
    ),
    "input and output": ({"input": "hello", "output": "hi there"}, [USER, ANSWER], 1),
    "prompt and output": ({"prompt": "hello", "output": "hi there"}, [USER, ANSWER], 1),
    "UltraChat": ({"prompt": "hello", "prompt_id": "1", "messages": [USER, ANSWER]}, [USER, ANSWER], 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_conversation_that_it_says(name: str, slice_tokenizer: Any, tokenize: Any) -> None:
    row, messages, answers = ROWS[name]
    tokenizer = slice_tokenizer(CHATML)
    made, result = tokenize(tokenizer, row)
    assert result.row_counts.quarantined == {}
    assert made[0].ids == tokenizer.tokenizer.hf.apply_chat_template(messages, return_dict=False)
    assert len(made[0].trained) == answers
    assert made[0].trained[-1] == "hi there<|im_end|>"


BAD_GPT = {"from": "gpt", "value": "go away"}
PAIRS: dict[str, dict[str, Any]] = {
    "LLaMA-Factory ShareGPT": {"conversations": [HUMAN], "chosen": GPT, "rejected": BAD_GPT},
    "LLaMA-Factory Alpaca": {
        "instruction": "hello",
        "input": "",
        "chosen": "hi there",
        "rejected": "go away",
    },
    "LLaMA-Factory v1": {
        "chosen_messages": [USER, ANSWER],
        "rejected_messages": [USER, {"role": "assistant", "content": "go away"}],
    },
    "OpenAI": {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [ANSWER],
        "non_preferred_output": [{"role": "assistant", "content": "go away"}],
    },
    "UltraFeedback": {
        "prompt": "hello",
        "messages": [USER, ANSWER],
        "chosen": [USER, ANSWER],
        "rejected": [USER, {"role": "assistant", "content": "go away"}],
        "score_chosen": 8.0,
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_two_answers_to_one_prompt(name: str, slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer(CHATML)
    made, result = tokenize(tokenizer, PAIRS[name])
    assert [row.trained for row in made] == [["hi there<|im_end|>"], ["go away<|im_end|>"]]
    assert result.table["chosen"].to_pylist() == [1, 0]
    assert made[0].ids == tokenizer.tokenizer.hf.apply_chat_template([USER, ANSWER], return_dict=False)


@pytest.mark.parametrize(
    ("texts", "trained"),
    [
        (("\n\nHuman: hi\n\nAssistant: Thanks a lot", "\n\nHuman: hi\n\nAssistant: That is it"), (" Thanks a lot", " That is it")),
        (("Q: a b\nA: I think so", "Q: a b\nA: I do not"), (" think so", " do not")),
        (("Q: a\n\n b", "Q: a\n\n c"), ("\n\n b", "\n\n c")),
        (("say it", "say it again"), (" it", " it again")),
        (("say it", "say it"), (" it", " it")),
        (("say it ", "say it again"), (" it ", " it again")),
        (("yes", "yesterday"), ("yes", "yesterday")),
        (("one", "two"), ("one", "two")),
    ],
)  # fmt: skip
def test_the_words_that_two_texts_without_a_prompt_begin_with_are_the_prompt(
    texts: tuple[str, str], trained: tuple[str, str], slice_tokenizer: Any, tokenize: Any
) -> None:
    extract_prompt = pytest.importorskip("trl").extract_prompt

    row = dict(zip(("chosen", "rejected"), texts, strict=True))
    made, _ = tokenize(slice_tokenizer(CHATML), row)
    assert tuple("".join(side.trained).removesuffix("<|im_end|>") for side in made) == trained
    theirs = extract_prompt(row)
    for text, own, side in zip(texts, trained, ("chosen", "rejected"), strict=True):
        assert text.endswith(own)
        assert own.endswith(theirs[side]), "no less than TRL trains, which may cut inside a word"


def test_what_the_input_of_a_pair_says_has_a_place_or_is_refused(slice_tokenizer: Any, tokenize: Any) -> None:
    pair = PAIRS["OpenAI"]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    rows = [
        {**pair, "input": {"messages": [USER], "tools": [tool]}},
        {**pair, "input": json.dumps({"messages": [USER], "tools": [tool]})},  # as in a CSV file
        {**pair, "input": {"messages": [USER], "seed": 3}},
        {**pair, "input": "hello"},
    ]
    made, result = tokenize(slice_tokenizer("qwen3_like"), *rows)
    truth = made[0].hf.apply_chat_template([USER, ANSWER], tools=[tool], return_dict=False)
    assert [row.ids for row in made[::2]] == [truth, truth]
    assert sorted(result.row_counts.quarantined) == [
        "'input' has keys that have no place",
        "broken JSON in 'input'",
    ]


def test_functions_as_openai_had_them_are_tools(slice_tokenizer: Any, tokenize: Any) -> None:
    function = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    made, result = tokenize(
        slice_tokenizer("qwen3_like"), {"messages": [USER, ANSWER], "functions": [function]}
    )
    tools = [{"type": "function", "function": function}]
    assert made[0].ids == made[0].hf.apply_chat_template([USER, ANSWER], tools=tools, return_dict=False)
    assert (result.left_out, result.row_counts.normalized) == (
        (),
        {"bare tool declarations wrapped as functions": 1},
    )


@pytest.mark.parametrize("prompt", ["hello", [USER]])
def test_a_prompt_alone_ends_where_the_model_begins_and_nothing_is_trained(
    prompt: Any, slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer(CHATML)
    row = {"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "4"}}
    made, result = tokenize(tokenizer, row)
    truth = tokenizer.tokenizer.hf.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert made[0].ids == truth
    assert not any(made[0].mask)
    assert (result.row_counts.rows_written, result.row_counts.tokens_context) == (1, len(truth))
    with pytest.raises(ConfigError, match="truncation"):
        resolve_format(spec(max_length=5, truncation="keep_start"), row)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"instruction": "a", "output": "b", "label": False}, "label"),
    ({"messages": [USER, ANSWER], "weight": 0.5}, "weight"),
    ({"prompt": "a", "completion": "b", "pixel_values": [1]}, "pixel_values"),
    ({"text": "a", "history": [["q", "a"]]}, "history"),
    ({"chosen": "a", "rejected": "b", "margin": 2.0}, "margin"),
    ({"instruction": "a", "output": "b", "kto_tag": True}, "kto_tag"),
    ({"messages": [USER, ANSWER], "images": ["a.png"]}, "images"),
    ({"messages": [USER, ANSWER], "chosen": ANSWER}, "chosen"),
    ({"messages": [USER, ANSWER], "rejected_response": "go away"}, "rejected_response"),
    (
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
    ),
]


@pytest.mark.parametrize(("row", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_payload_that_cannot_be_carried_is_refused_by_name(
    row: dict[str, Any], name: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    with pytest.raises(SourceError, match=f"'{name}', which format .* does not use"):
        resolve_format(spec(), row)
    assert resolve_format(spec(ignore=(name,)), row)
    tokenizer = slice_tokenizer(CHATML)
    first = {key: value for key, value in row.items() if key != name}
    _, result = tokenize(tokenizer, first, row, {**first, "images": []})
    assert sorted(set(result.table["source_row"].to_pylist())) == [0, 2]
    [reason] = result.row_counts.quarantined
    assert reason.startswith(f"column '{name}' is not used by format ")


def test_labels_of_plain_text_mean_nothing_here(slice_tokenizer: Any, tokenize: Any) -> None:
    assert resolve_format(spec(), {"text": "a film", "label": 1}).name == "text"


def test_history_beside_messages_is_refused_and_not_ignored(slice_tokenizer: Any, tokenize: Any) -> None:
    row = {"messages": [USER, ANSWER], "history": [["q", "a"]]}
    _, result = tokenize(slice_tokenizer(CHATML), row, {"messages": [USER, ANSWER], "history": []})
    assert result.row_counts.quarantined == {"column 'history' beside messages": 1}


def test_what_was_seen_is_said() -> None:
    row = {"conversations": [HUMAN, GPT]}
    assert (
        seen(resolve_format(spec(), row), row)
        == "chat (messages = conversations, messages with from and value)"
    )
    row = {"messages": [USER, ANSWER], "tools": []}
    assert seen(resolve_format(spec(), row), row) == "chat (messages with role and content, tools)"
    asked = {"instruction": "Add 2 and 2.", "context": "Use digits.", "output": "4", "id": 7}
    assert seen(resolve_format(spec(), asked), asked) == "alpaca (instruction, output, input = context)"


def test_a_name_that_is_there_is_never_the_nearest_to_itself() -> None:
    with pytest.raises(SourceError) as caught:
        resolve_format(spec(), {"id": 1, "answers": "b"})
    assert "did you mean 'answers' for 'answer'" in str(caught.value)
    with pytest.raises(SourceError) as caught:
        resolve_format(spec(format="prompt_completion"), {"prompt": "a", "completions": "b"})
    assert "'prompt' for 'prompt'" not in str(caught.value)
    assert "did you mean 'completions' for 'completion'" in str(caught.value)


ASKED, ANSWERED = {"role": "user", "content": 'é "x"\n'}, {"role": "assistant", "content": "so [{"}
OTHER = {"role": "assistant", "content": "no"}
WITH_MESSAGES: dict[str, dict[str, Any]] = {
    "preference": {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [OTHER]},
    "preference without a prompt": {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]},
    "prompt_completion": {"prompt": [ASKED], "completion": [ANSWERED]},
    "question_answer": {"question": [ASKED], "answer": [ANSWERED]},
    "prompt": {"prompt": [ASKED]},
    "stepwise": {"prompt": [ASKED], "completions": ["one", "two"], "labels": [True, False]},
    "from and value": {
        "prompt": [{"from": "human", "value": "q"}],
        "completion": [{"from": "gpt", "value": "a"}],
    },
}


@pytest.mark.parametrize("name", WITH_MESSAGES)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_messages_that_are_json_text_are_the_messages(
    name: str, ascii_only: bool, slice_tokenizer: Any, tokenize: Any
) -> None:
    row = WITH_MESSAGES[name]
    as_text = {
        column: json.dumps(value, ensure_ascii=ascii_only) if isinstance(value[0], dict) else value
        for column, value in row.items()
    }
    made = slice_tokenizer("chatml_bare")
    wanted, result = tokenize(made, row)
    assert wanted, result.examples
    found, _ = tokenize(made, as_text)
    assert [(one.ids, one.mask) for one in found] == [(one.ids, one.mask) for one in wanted]


@pytest.mark.parametrize("text", ['[{"a": 1}]', "[]", '[{"role": "x"', '[{"role": "user"}, 1]', "[{'a': 1}]"])
def test_other_texts_that_look_like_json_stay_texts(text: str, slice_tokenizer: Any, tokenize: Any) -> None:
    made, _ = tokenize(slice_tokenizer("chatml_bare"), {"prompt": "q", "completion": text})
    assert made[0].trained == [text + "<|im_end|>"]


def test_messages_as_python_prints_them_are_set_aside(slice_tokenizer: Any, tokenize: Any) -> None:
    row = {"prompt": [ASKED], "chosen": str([ANSWERED]), "rejected": [OTHER]}
    made, result = tokenize(slice_tokenizer("chatml_bare"), row)
    assert not made
    assert dict(result.row_counts.quarantined) == {"'chosen' holds messages as Python prints them": 1}


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


PARTED = {
    "at the last answer": (said("p", "a"), said("p", "z")),
    "at the last of two answers": (said("p", "a", "q", "b"), said("p", "a", "q", "c")),
    "early": (said("p", "a", "q", "b"), said("p", "z", "q", "c")),
    "early, with one more turn": (said("p", "a"), said("p", "z", "q", "c")),
    "where the user answers otherwise too": (said("p", "a", "q", "b"), said("p", "z", "r", "c", "s", "d")),
    "with nothing that differs": (said("p", "a"), said("p", "a")),
    "behind two equal answers": (said("p", "a", "q", "b", "r", "c"), said("p", "a", "q", "z", "r", "c")),
}


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("name", PARTED)
def test_a_pair_without_a_prompt_is_split_where_trl_splits_it(
    name: str, with_text: bool, slice_tokenizer: Any, tokenize: Any
) -> None:
    trl = pytest.importorskip("trl.data_utils")
    chosen, rejected = PARTED[name]
    row = {"chosen": chosen, "rejected": rejected}
    if with_text:  # as UltraFeedback: the prompt is in both conversations as well
        row = {"prompt": "p", **row}
    parted = trl.maybe_extract_prompt(row)
    made, result = tokenize(slice_tokenizer("chatml_bare"), row)
    assert len(made) == 2, result.examples
    for one, side in zip(made, ("chosen", "rejected"), strict=True):
        answers = [m["content"] + "<|im_end|>" for m in parted[side] if m["role"] == "assistant"]
        assert one.trained == answers


UNPARTED = {
    "another question": ((said("p", "a"), said("x", "z")), "message 0 differs in content"),
    "another system prompt": (
        ([{"role": "system", "content": "s"}, *said("p", "a")], said("p", "z")),
        "message 0 differs in content, role",
    ),
    "a question more, and no answer": ((said("p", "a", "q"), said("p", "a", "r", "c")), "message 2 differs in content"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPARTED)
def test_a_pair_that_does_not_part_at_an_answer_is_refused_by_name(
    name: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    (chosen, rejected), why = UNPARTED[name]
    made, result = tokenize(slice_tokenizer("chatml_bare"), {"chosen": chosen, "rejected": rejected})
    assert not made
    assert dict(result.row_counts.quarantined) == {
        "'chosen' and 'rejected' do not part at an answer of the assistant": 1
    }
    assert why in result.examples[0].detail


JUDGED = [(said("p", "a"), True), (said("q", "b", "r", "c"), False), (said("s", "d"), True)]


@pytest.mark.parametrize("label", ["label", "kto_tag"])
@pytest.mark.parametrize("as_text", [False, True])
def test_messages_with_a_label_are_kto_whose_completion_is_the_last_message(
    label: str, as_text: bool, slice_tokenizer: Any, tokenize: Any
) -> None:
    apart = [{"prompt": m[:-1], "completion": m[-1:], "label": good} for m, good in JUDGED]
    given: list[dict[str, Any]] = [
        {"messages": json.dumps(m) if as_text else m, label: good} for m, good in JUDGED
    ]
    assert resolve_format(spec(), given[0]).name == "kto"
    assert label in seen(resolve_format(spec(), given[0]), given[0])
    made = slice_tokenizer("chatml_bare")
    _, wanted = tokenize(made, *apart)
    made = slice_tokenizer("chatml_bare")
    _, found = tokenize(made, *given)
    assert wanted.table.num_rows == 2 * len(JUDGED), wanted.examples
    assert found.table.to_pylist() == wanted.table.to_pylist()


def test_a_label_that_is_ignored_or_carried_makes_no_kto_of_messages() -> None:
    row = {"messages": said("p", "a"), "label": True}
    assert resolve_format(spec(ignore=("label",)), row).name == "chat"
    assert resolve_format(spec(carry={"label": {"dtype": "uint8"}}), row).name == "chat"


def test_messages_with_a_label_that_end_with_no_answer_are_set_aside(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    rows = [
        {"messages": m, "label": True}
        for m in (said("p", "a"), said("p", "a", "q"), said("p"), said("r", "b"))
    ]
    _, result = tokenize(slice_tokenizer("chatml_bare"), *rows)
    assert set(result.table["source_row"].to_pylist()) == {0, 3}
    assert dict(result.row_counts.quarantined) == {
        "'messages' does not end with an answer of the assistant": 1,
        "'messages' is not a question and an answer": 1,
    }


@pytest.mark.parametrize(
    "columns", [{"prompt": "messages", "completion": "messages"}, {"question": "answer"}]
)
def test_one_column_that_is_read_as_two_of_ours_is_refused(columns: dict[str, str]) -> None:
    row = {"messages": said("p", "a")} if "prompt" in columns else {"answer": "b"}
    with pytest.raises(
        ConfigError, match=r"source\.columns: '(messages|answer)' is read as '\w+' and as '\w+'"
    ):
        resolve_format(spec(columns=columns), row)
