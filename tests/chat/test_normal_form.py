"""However a row spells a conversation, the template gets one form of it, and the report counts what was changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.chat.row_errors import RowFault
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow, has_long_numbers
from raysvc.chat.source.messages import MessageReader
from raysvc.chat.source.template_fit import TemplateFit
from raysvc.job.config import TextSpec, TokenizerConfig

TOOLS = "merges_tools"
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}
ARGUMENTS = {"city": "Oslo", "days": 3}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "name": "get_weather", "content": "rain"}
NORMAL = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER]

CONCATENATES = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"""


def talk(call: Any, *rest: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": call},
            *(rest or (RESULT, ANSWER)),
        ]
    }


SPELLINGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "arguments as JSON text": (
        talk([{"type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}]),
        {"arguments that were JSON text made objects"},
    ),
    "a flat call": (talk([{"name": "get_weather", "arguments": ARGUMENTS}]), {"flat tool calls wrapped"}),
    "a flat call with text arguments": (
        talk([{"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}]),
        {"flat tool calls wrapped", "arguments that were JSON text made objects"},
    ),
    "parameters for arguments": (
        talk([{"name": "get_weather", "parameters": ARGUMENTS}]),
        {"flat tool calls wrapped", "arguments under another name"},
    ),
    "input for arguments": (
        talk([{"type": "function", "function": {"name": "get_weather", "input": ARGUMENTS}}]),
        {"arguments under another name"},
    ),
    "a function_call as OpenAI had it": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {**RESULT, "role": "function"},
                ANSWER,
            ]
        },
        {"function_call made tool_calls"},
    ),
    "a content called value": (
        {"messages": [{"role": "user", "value": "hello"}, *NORMAL[1:]]},
        {"messages with other keys than role and content"},
    ),
    "calls as JSON text": (talk(json.dumps([CALL])), {"tool_calls that were JSON text"}),
    "one call and no list": (talk(CALL), {"flat tool calls wrapped"}),
    "a call whose content is an object": (
        {"messages": [USER, {"role": "function_call", "content": CALL["function"]}, RESULT, ANSWER]},
        {"messages that are calls made tool_calls", "roles mapped"},
    ),
    "parts that are bare texts": (
        {"messages": [*NORMAL[:-1], {"role": "assistant", "content": ["hi ", "there"]}]},
        {"contents that were lists of parts"},
    ),
    "ShareGPT": (
        {
            "messages": [
                {"from": "human", "value": "hello"},
                {
                    "from": "function_call",
                    "value": json.dumps({"name": "get_weather", "arguments": ARGUMENTS}),
                },
                {"from": "observation", "value": "rain", "name": "get_weather"},
                {"from": "gpt", "value": "hi there"},
            ]
        },
        {
            "messages with other keys than role and content",
            "roles mapped",
            "messages that are calls made tool_calls",
        },
    ),
    "LLaMA-Factory v1 parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "hello"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_call", "value": json.dumps(CALL["function"])}],
                },
                {"role": "tool", "name": "get_weather", "content": [{"type": "text", "value": "rain"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "hi there"}], "loss_weight": 1.0},
            ]
        },
        {"contents that were lists of parts"},
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_call_gives_the_ids_of_its_normal_form(
    name: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer(TOOLS)
    row, changes = SPELLINGS[name]
    before = json.dumps(row)
    made, result = tokenize(tokenizer, row)
    truth = tokenizer.tokenizer.hf.apply_chat_template(NORMAL, return_dict=False)
    assert made[0].ids == truth
    assert set(result.row_counts.normalized) == changes
    assert json.dumps(row) == before, "what came in is not changed"


def test_the_usual_form_is_left_alone_and_counted_nowhere(slice_tokenizer: Any, tokenize: Any) -> None:
    made, result = tokenize(slice_tokenizer(TOOLS), {"messages": NORMAL}, {"messages": [USER, ANSWER]})
    assert len(made) == 2
    assert result.row_counts.normalized == {}


@pytest.mark.parametrize("empty", [[], "[]", "", None, "null"])
def test_placeholders_are_no_calls(empty: Any, slice_tokenizer: Any, tokenize: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{{ raise_exception('one call a message') }}"
        "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    )
    name = slice_tokenizer(TOOLS).spec.tokenizer.name
    config = TokenizerConfig(name=name, chat_template=template)
    made, _ = tokenize(
        SliceTokenizer(TextSpec(tokenizer=config)), {"messages": [USER, {**ANSWER, "tool_calls": empty}]}
    )
    assert made[0].trained == ["hi there<|im_end|>"]


def test_a_template_that_concatenates_gets_the_text_of_the_source(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    config = TokenizerConfig(name=slice_tokenizer(TOOLS).spec.tokenizer.name, chat_template=CONCATENATES)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=config))
    odd = '{"city":"Oslo"  }'
    made, result = tokenize(
        tokenizer,
        talk([{"type": "function", "function": {"name": "f", "arguments": odd}}]),
        talk([{"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}]),
    )
    assert [row.trained[0] for row in made] == [f"f {odd}<|im_end|>", 'f {"city": "Oslo"}<|im_end|>']
    assert result.row_counts.normalized == {"arguments that were objects made JSON text": 1}


@pytest.mark.parametrize(
    ("template", "text_arguments"),
    [
        ("{{ (messages[-1].tool_calls or messages[1].tool_calls)[0].function.arguments | tojson }}", False),
        (
            "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
            False,
        ),
        ("{{ 'x' + messages[1].tool_calls[0].function.arguments }}", True),
        ("{{ messages[1].tool_calls[0].function.arguments }}", True),
        (
            "{% set a = messages[1].tool_calls[0].function.arguments %}"
            "{{ a if a is string else a | tojson }}",
            False,
        ),
        ("{{ messages[0].content }}", False),
    ],
)
def test_what_a_template_does_with_arguments_decides_what_it_gets(
    template: str, text_arguments: bool, slice_tokenizer: Any
) -> None:
    hf = slice_tokenizer(TOOLS).tokenizer.hf
    fit = TemplateFit.of(
        lambda m, tools=None: hf.apply_chat_template(m, tools=tools, tokenize=False, chat_template=template)
    )
    assert fit.text_arguments is text_arguments


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{broken", "the arguments of a tool call are not JSON"),
        ("[1]", "the arguments of a tool call are not an object"),
        ('{"x": NaN}', "the arguments of a tool call are not JSON"),
        ([1], "the arguments of a tool call are not an object"),
        (5, "the arguments of a tool call are not an object"),
    ],
)
def test_arguments_that_are_no_object_set_the_row_aside(
    arguments: Any, reason: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    _, result = tokenize(slice_tokenizer(TOOLS), talk([{"name": "f", "arguments": arguments}]))
    assert list(result.row_counts.quarantined) == [reason]


@pytest.mark.parametrize("arguments", [{"arguments": given} for given in (None, "", "{}", {})] + [{}])
@pytest.mark.parametrize("flat", [True, False])
def test_a_call_without_arguments_has_an_empty_object(
    flat: bool, arguments: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    call = {"name": "f", **arguments}
    made, _ = tokenize(
        slice_tokenizer(TOOLS), talk([call if flat else {"type": "function", "function": call}])
    )
    assert '{"name": "f", "arguments": {}}' in made[0].trained[0]


def test_an_empty_object_is_the_text_of_one_for_a_template_that_takes_text(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    config = TokenizerConfig(name=slice_tokenizer(TOOLS).spec.tokenizer.name, chat_template=CONCATENATES)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    made, _ = tokenize(SliceTokenizer(TextSpec(tokenizer=config)), talk([call]))
    assert made[0].trained[0].startswith("f {}")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ANSWER},
        {"messages": json.dumps(ANSWER)},
        {"messages": [USER, ANSWER], "tools": " "},
        {"messages": [USER, ANSWER], "tools": "null"},
    ],
)
def test_one_message_and_blank_tools_are_compared_as_they_are_read(
    row: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    made, result = tokenize(slice_tokenizer(TOOLS), row)
    assert made[0].trained == ["hi there<|im_end|>"]
    assert result.row_counts.normalized == ({PARSED: 1} if isinstance(row["messages"], str) else {})


def test_a_system_column_that_is_not_text_sets_the_row_aside(slice_tokenizer: Any, tokenize: Any) -> None:
    rows = [{"messages": [USER, ANSWER], "system": system} for system in (5, ["Be brief."], "")]
    made, result = tokenize(slice_tokenizer(TOOLS), *rows)
    assert len(made) == 1
    assert result.row_counts.quarantined == {"'system' is not text": 2}


@pytest.mark.parametrize("field", ["refusal", "text", "audio", "parts"])
def test_words_outside_of_the_content_are_named_and_never_lost(
    field: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    said = {"role": "assistant", "content": None, field: "I will not"}
    _, result = tokenize(slice_tokenizer(TOOLS), {"messages": [USER, said, USER, ANSWER]})
    assert result.row_counts.quarantined == {"a message has words, and no content": 1}
    assert repr(field) in str(result.examples[0])


def test_a_message_has_one_kind_of_calls(slice_tokenizer: Any, tokenize: Any) -> None:
    both = {"role": "assistant", "tool_calls": [CALL], "function_call": CALL["function"]}
    empty = {**both, "function_call": ""}
    made, result = tokenize(
        slice_tokenizer(TOOLS), *({"messages": [USER, one, ANSWER]} for one in (both, empty))
    )
    assert len(made) == 1
    assert list(result.row_counts.quarantined) == ["a message has both tool_calls and a function_call"]


@pytest.mark.parametrize("weight", [{"weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"loss": False}])
def test_a_weight_of_zero_is_read_or_the_row_is_set_aside(
    weight: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    first, last = {**ANSWER, "content": "a bad answer", **weight}, {**ANSWER, "weight": 1}
    row = {"messages": [USER, first, USER, last]}
    wanted = {
        "message_weight": ["hi there<|im_end|>"],
        "last_assistant_message": ["hi there<|im_end|>"],
        "all_assistant_messages": [],
        "each_assistant_turn": [],
        "all_tokens": [],
    }
    for train_on, trained in wanted.items():
        made, result = tokenize(slice_tokenizer(TOOLS, train_on=train_on), row)
        assert [text for one in made for text in one.trained] == trained, train_on
        assert bool(result.row_counts.quarantined) == (not trained), train_on


@pytest.mark.parametrize("train_on", ["message_weight", "last_assistant_message", "all_assistant_messages"])
@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        ({"weight": 0.5}, "a message weight is not 0 or 1"),
        ({"weight": "0"}, "a message weight is not 0 or 1"),
        ({"weight": 1, "train": False}, "the weights of a message contradict each other"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
            "'train_detail' trains a part",
        ),
    ],
)
def test_a_weight_that_is_not_followed_sets_the_row_aside(
    train_on: str, weight: dict[str, Any], reason: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    rows = ({"messages": [USER, {**ANSWER, **more}]} for more in (weight, {"loss": 2.31}))
    made, result = tokenize(slice_tokenizer(TOOLS, train_on=train_on), *rows)
    assert len(made) == 1  # a loss that somebody measured says nothing about what is trained
    assert [name.startswith(reason) for name in result.row_counts.quarantined] == [True]


def test_integers_of_any_size_reach_the_template(slice_tokenizer: Any) -> None:
    big = 2**64 + 1
    for arguments in ({"id": big}, json.dumps({"id": big})):
        line = json.dumps(talk([{"name": "f", "arguments": arguments}])).encode()
        result = slice_tokenizer(TOOLS).run_json_lines(line, 0)
        text = slice_tokenizer(TOOLS).tokenizer.hf.decode(result.table["input_ids"][0].as_py())
        assert f'{{"id": {big}}}' in text


@given(before=st.integers(0, 12), digits=st.integers(17, 21), behind=st.integers(0, 12))
def test_numbers_of_19_digits_are_seen_wherever_they_stand(before: int, digits: int, behind: int) -> None:
    text = b"1 2 3" * before + b"," * before + b"7" * digits + b" " * behind + b"45 67 8" * behind
    assert has_long_numbers(text) == (digits >= 19)
    assert not has_long_numbers(text.replace(b"7777777", b"7777.77"))


def test_roles_are_declared_or_the_row_says_how(slice_tokenizer: Any, tokenize: Any) -> None:
    row = {"messages": [{"role": "seeker", "content": "hello"}, {"role": "helper", "content": "hi there"}]}
    _, result = tokenize(slice_tokenizer(TOOLS), row)
    (reason,) = result.row_counts.quarantined
    assert reason == "no message of the assistant, and unknown roles: helper, seeker"
    assert "source.roles" in result.examples[0].detail
    made, _ = tokenize(slice_tokenizer(TOOLS, roles={"seeker": "user", "helper": "assistant"}), row)
    assert made[0].ids == tokenize(slice_tokenizer(TOOLS), {"messages": [USER, ANSWER]})[0][0].ids


SKIPS_OTHERS = """\
{%- for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("train_on", ["all_assistant_messages", "all_tokens"])
@pytest.mark.parametrize("role", ["Human", "developer", "critic", "tool"])
def test_a_message_that_the_template_leaves_out_sets_its_row_aside(
    role: str, train_on: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    said = {"role": role, "content": "hello"}  # which another message says too
    rows = [
        {"messages": messages} for messages in ([USER, ANSWER], [said, USER, ANSWER], [USER, said, ANSWER])
    ]
    plain = slice_tokenizer("chatml_bare", train_on=train_on)
    config = TokenizerConfig(name=plain.spec.tokenizer.name, chat_template=SKIPS_OTHERS)
    made, result = tokenize(SliceTokenizer(TextSpec(tokenizer=config, train_on=train_on)), *rows)
    assert len(made) == 1
    assert result.row_counts.quarantined == {f"the chat template shows no message of role {role!r}": 2}
    made, _ = tokenize(plain, *rows)
    assert len(made) == 3  # this one writes the role as it is


def test_plain_lines_with_other_roles_are_mapped_too(slice_tokenizer: Any) -> None:
    lines = [
        {"messages": [{"role": a, "content": "hello"}, {"role": b, "content": "hi there"}]}
        for a, b in (("human", "gpt"), ("user", "assistant"))
    ]
    made = [slice_tokenizer(TOOLS).run_json_lines(json.dumps(line).encode(), 0) for line in lines]
    assert made[0].table["input_ids"].to_pylist() == made[1].table["input_ids"].to_pylist()
    assert [result.row_counts.normalized for result in made] == [{"roles mapped": 1}, {}]


def test_keys_of_a_message_can_be_declared(slice_tokenizer: Any, tokenize: Any) -> None:
    row = {"talk": [{"who": "user", "says": "hello"}, {"who": "assistant", "says": "hi there"}]}
    columns = {"messages": "talk", "role": "who", "content": "says"}
    made, _ = tokenize(slice_tokenizer(TOOLS, columns=columns), row)
    assert made[0].trained == ["hi there<|im_end|>"]


@pytest.mark.parametrize(
    ("part", "reason", "detail"),
    [
        ({"type": "image_url", "value": "x"}, "a content part is not text", "of type 'image_url'"),
        ({"type": "text"}, "a text part has no text", "with the keys ['type']"),
        (5, "a content part is not text", "a part that is a int"),
        ({"type": "tool_call", "text": "[5]"}, "a tool call is not an object", "it is a int"),
        ({"type": "tool_call", "text": '{"arguments": {}}'}, "a tool call has no name", "['arguments']"),
    ],
)
def test_a_part_that_cannot_be_read_is_named(part: Any, reason: str, detail: str) -> None:
    with pytest.raises(RowFault) as caught:
        MessageReader().read([USER, {"role": "assistant", "content": [part]}], "messages", set())
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_a_part_that_is_reasoning_is_the_reasoning_of_its_message(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    thought = [{"type": "reasoning", "text": "so "}, {"type": "thinking", "thinking": "it is"}]
    parts = {"role": "assistant", "content": [*thought, {"type": "text", "text": "hi there"}]}
    tokenizer = slice_tokenizer("strips_think")
    made, _ = tokenize(tokenizer, {"messages": [USER, parts]})
    normal = [USER, {**ANSWER, "reasoning_content": "so it is"}]
    assert made[0].ids == tokenizer.tokenizer.hf.apply_chat_template(normal, return_dict=False)
    assert "so it is" in made[0].trained[0]


def test_the_sample_compares_with_the_row_and_not_with_our_reading(
    slice_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.chat.reference_check import RenderDiffers
    from raysvc.chat.source import json_rows

    row = talk([{"type": "function", "function": {"name": "f", "arguments": {"id": 2**64 + 1}}}])
    monkeypatch.setattr(json_rows, "has_long_numbers", lambda text: False)  # our reading is wrong now
    with pytest.raises(RenderDiffers):
        slice_tokenizer(TOOLS).run_json_lines(json.dumps(row).encode(), 0)
    assert slice_tokenizer(TOOLS).run([SourceRow(0, row)]).row_counts.rows_written == 1


ROWS_AT_ONCE: dict[str, list[dict[str, Any]]] = {
    "texts": [USER, ANSWER],
    "calls and results": NORMAL,
    "no calls after all": [USER, {**ANSWER, "tool_calls": "[]", "name": None}],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "hm"}],
    "single parts": [
        {**each, "content": [{"type": "text", "text": each["content"]}]} for each in (*NORMAL, ANSWER)
    ],
    "texts and parts": [USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}],
    "several parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
    "a role that is mapped": [{"role": "human", "content": "hello"}, ANSWER],
    "both spellings": [{**USER, "from": "human", "value": "no"}, ANSWER],
}


@pytest.mark.parametrize("reader", [MessageReader(), MessageReader(role_key="from", content_key="value")])
@pytest.mark.parametrize("name", ROWS_AT_ONCE)
def test_messages_are_read_together_as_they_are_one_by_one(name: str, reader: MessageReader) -> None:
    together: set[str] = set()
    one_by_one: set[str] = set()
    found = reader.read(ROWS_AT_ONCE[name], "messages", together)
    alone = [reader._message(each, "", one_by_one) for each in ROWS_AT_ONCE[name]]
    assert (found.messages, together) == (alone, one_by_one)
    assert found.has_parts == any(isinstance(each["content"], list) for each in alone)
    assert found.has_calls == any("tool_calls" in each for each in alone)


@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_are_taken_to_a_depth_and_deeper_ones_are_set_aside(
    as_text: bool, slice_tokenizer: Any, tokenize: Any
) -> None:
    def calling(depth: int) -> dict[str, Any]:
        nested = '{"a": ' * depth + "1" + "}" * depth
        given = nested if as_text else json.loads(nested)
        function = {"name": "f", "arguments": given}
        asked = {"role": "user", "content": "q"}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
        return {"messages": [asked, call]}

    made, result = tokenize(slice_tokenizer("merges_tools"), calling(100), calling(101), calling(400))
    assert len(made) == 1
    assert dict(result.row_counts.quarantined) == {"the arguments of a tool call are nested too deep": 2}


TALK = json.dumps([USER])
PARSED = "messages that were JSON text"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TALK, "completion": "hi there"},
        {"prompt": "hello", "completion": json.dumps([ANSWER])},
        {"prompt": TALK, "chosen": "hi there", "rejected": "go away"},
        {"prompt": [USER], "chosen": json.dumps([ANSWER]), "rejected": [ANSWER]},
        {"question": TALK, "answer": "hi there"},
        {"question": "hello", "answer": json.dumps([ANSWER])},
        {"prompt": TALK},
        {"prompt": TALK, "completions": ["one", "two"], "labels": [True, False]},
        {"messages": json.dumps([USER, ANSWER])},
        {"messages": TALK, "chosen": "hi there", "rejected": "go away"},
    ],
)
def test_messages_that_are_text_are_counted_once_a_row(
    row: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    parsed = {
        name: json.loads(value) if str(value).startswith("[{") and isinstance(value, str) else value
        for name, value in row.items()
    }
    (made, result), (wanted, other) = (
        tokenize(slice_tokenizer(TOOLS, format=of_columns(row)), each) for each in (row, parsed)
    )
    assert [one.ids for one in made] == [one.ids for one in wanted] != []
    assert (result.row_counts.normalized, other.row_counts.normalized) == ({PARSED: 1}, {})


def of_columns(row: dict[str, Any]) -> str:
    names = {
        "completion": "prompt_completion",
        "chosen": "preference",
        "question": "question_answer",
        "labels": "stepwise",
        "messages": "chat",
    }
    return next((name for column, name in names.items() if column in row), "prompt")


NEEDS_CONTENT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{{- '' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}"""
# as that of QwQ: the last message may lack a content, any other may not
NEEDS_IT_BEFORE_OTHERS = NEEDS_CONTENT.replace(
    "'' + m.content", "(m.content if loop.last else m.content.strip()) or ''"
)


@pytest.mark.parametrize("absent", [{}, {"content": None}])
def test_a_call_without_a_content_gets_an_empty_one_where_the_template_fails_without(
    absent: dict[str, Any], tokenizer_folder: Any, tokenize: Any
) -> None:
    for template, is_filled in (
        (NEEDS_CONTENT, True),
        (NEEDS_IT_BEFORE_OTHERS, True),
        (NEEDS_CONTENT.replace("m.content", "(m.content or '')"), False),
    ):
        config = TokenizerConfig(name=tokenizer_folder(TOOLS), chat_template=template)
        called = {"role": "assistant", "tool_calls": [CALL], **absent}
        made, result = tokenize(
            SliceTokenizer(TextSpec(tokenizer=config)), {"messages": [USER, called, RESULT, ANSWER]}
        )
        truth = made[0].hf.apply_chat_template(NORMAL, chat_template=template, return_dict=False)
        assert made[0].ids == truth, result.examples
        noted = {"absent contents beside calls or reasoning made empty texts": 1} if is_filled else {}
        assert result.row_counts.normalized == noted


def test_reasoning_without_a_content_gets_an_empty_one_where_the_template_fails_without(
    tokenizer_folder: Any, tokenize: Any
) -> None:
    template = NEEDS_CONTENT.replace(
        "'' + m.content",
        "m.reasoning_content | default('') + (m.content if m.tool_calls else '' + m.content)",
    )
    config = TokenizerConfig(name=tokenizer_folder(TOOLS), chat_template=template)
    thought = {"role": "assistant", "reasoning_content": "It rains."}
    made, result = tokenize(SliceTokenizer(TextSpec(tokenizer=config)), {"messages": [USER, thought]})
    said = [USER, {**thought, "content": ""}]
    assert made, result.examples
    assert made[0].ids == made[0].hf.apply_chat_template(said, chat_template=template, return_dict=False)
