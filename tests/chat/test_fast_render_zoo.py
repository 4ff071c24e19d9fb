"""Every template that TRL ships, on rows made to break it: the fast render says what the template says."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message
from raysvc.chat.source.template_fit import TemplateFit

from .zoo import ONLY_PARTS, in_tiers, trl_folder

FOLDER = trl_folder()
if FOLDER is None:
    pytest.skip("TRL is not installed", allow_module_level=True)
ZOO = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEXTS = [
    *(
        "",
        " ",
        "\n\n",
        "hello",
        "Yes, 1 + 1 = 2.",
        "é e\u0301 你好 😀",
        "\x00",
        "\u2028\x1c\xa0",
        "\ufeffa",
        "a" * 300,
    ),
    *(
        "<think>\nhm\n</think>\n\nso",
        "</think>",
        "<think>",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "</s>",
        "[/INST]",
    ),
    *(
        "{{ 7 * 7 }}{% raw %}",
        "%s {} {0}",
        '{"a": [1, null]}',
        "'\"\\",
        "<tool_response>x</tool_response>",
        "None",
    ),
    *(
        "<|channel|>final<|message|>x",
        "<start_of_turn>model\n",
        "<|START_RESPONSE|>",
        "  padded \n",
        "/no_think",
    ),
]
ODD: list[Any] = [None, 0, -1, 2**70, 1.5, True, "", "x", [], {}, ["a", {"b": None}], {"c": {"d": [1, "e"]}}]
STRUCTURES = [
    *(
        "ua",
        "sua",
        "uaua",
        "suauaua",
        "u",
        "a",
        "s",
        "us",
        "uu",
        "aa",
        "uatu",
        "uC",
        "uCta",
        "suCtaua",
        "uCttCta",
    ),
    *("uR", "uRuR", "suRCtR", "uCtRu", "uP", "sPa", "uDa", "x", "ux"),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "description": "é"},
                "b": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["a"],
        },
    },
}


def call(random_: random.Random) -> Any:
    arguments = {random_.choice("abc"): random_.choice(ODD + TEXTS) for _ in range(random_.randrange(3))}
    function = {"name": random_.choice(["f", "g.h", ""]), "arguments": arguments}
    whole = {"type": "function", "id": random_.choice(["callid001", "9"]), "function": function}
    return whole if random_.random() < 0.9 else random_.choice([function, {"function": {}}, {}, "f"])


def message(kind: str, random_: random.Random) -> Message:
    text = random_.choice(TEXTS) + random_.choice(TEXTS)
    roles = {"u": "user", "s": "system", "t": "tool", "P": "user", "D": "developer", "x": "other"}
    made: Message = {"role": roles.get(kind, "assistant"), "content": text}
    if kind == "P":
        made["content"] = [{"type": "text", "text": text}, {"type": "text", "text": random_.choice(TEXTS)}]
    if kind == "t":
        made |= {"name": "f", "tool_call_id": "callid001"}
    if kind == "C":
        made["tool_calls"] = [call(random_) for _ in range(random_.randrange(1, 3))]
        if random_.random() < 0.3:
            del made["content"]
    if kind == "R":
        made |= {name: random_.choice(TEXTS) for name in ("reasoning_content", "thinking", "reasoning")}
    if random_.random() < 0.1:
        field = random_.choice(["content", "tool_calls", "reasoning_content", "name", "role"])
        made[field] = random_.choice(ODD)
    if random_.random() < 0.03:
        del made[random_.choice(["content", "role"] if "content" in made else ["role"])]
    return made


def rows(random_: random.Random, count: int) -> list[tuple[list[Message], list[Any] | None, bool]]:
    made = []
    for _ in range(count):
        structure = random_.choice(STRUCTURES)
        tools = random_.choice([None, None, [TOOL], [TOOL, {**TOOL, "extra": random_.choice(ODD)}]])
        made.append(([message(kind, random_) for kind in structure], tools, random_.random() < 0.2))
    return [([], None, False), *made]


def outcome(render: Any, *row: Any) -> Any:
    """What a render gives, or the fault that it raises."""
    try:
        made = render(*row)
    except RowFault as fault:
        return str(fault)
    return made.blocks, made.owners, made.marks


@pytest.mark.parametrize("name", in_tiers(name for name in ZOO if not name.startswith(ONLY_PARTS)))
def test_hostile_rows_are_rendered_as_the_template_does(name: str) -> None:
    template = ChatTemplate(ZOO[name], VARIABLES)
    assert template.fast is not None
    for row in rows(random.Random(name), 30):
        got = outcome(template.fast.render, *row)
        assert got == outcome(template.render_really, *row), (row, got)
    assert not template.fast.counts["different"]


ASKED_IN_A_LOOP = """\
{%- for message in messages %}{{ message.role + message.content }}
{%- if loop.last and add_generation_prompt %}{{ "<model>" }}{% endif %}{% endfor %}"""


def test_a_prompt_that_is_asked_for_in_a_loop_is_never_another_rows() -> None:
    template = ChatTemplate(ASKED_IN_A_LOOP, VARIABLES)
    for prompt in (True, False, True, False):
        text = template.render(PLAIN, None, prompt).text
        assert text.endswith("<model>") == prompt


PLAIN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("llava_next")])
def test_usual_rows_are_rendered_once(name: str) -> None:
    template = ChatTemplate(ZOO[name], VARIABLES)
    assert template.fast is not None
    for text in (text for text in TEXTS if "<|channel|>" not in text):  # gpt-oss refuses it
        messages = [{**message_, "content": f"{message_['content']} {text}x"} for message_ in PLAIN]
        content = [[{"type": "text", "text": each["content"]}] for each in messages]
        parts = [{**each, "content": part} for each, part in zip(messages, content, strict=True)]
        template.render(parts if name.startswith(ONLY_PARTS) else messages, None)
    assert template.fast.counts["rendered"] <= 4, template.fast.reasons


USUAL = ["ua", "sua", "uaua", "suauaua", "uCtaua", "suCttaua", "uR", "uRuR"]


@pytest.mark.parametrize(
    "name",
    in_tiers(name for name, text in ZOO.items() if "{%- generation" in text or "{% generation" in text),
)
def test_generation_spans_are_those_of_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template, compared = ChatTemplate(ZOO[name], VARIABLES), 0
    for structure in USUAL * 2:
        random_ = random.Random(f"{name}{structure}{compared}")
        messages = [{**usual(kind), "content": f"{random_.random()}"} for kind in structure]
        if name.startswith(ONLY_PARTS):
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        try:
            made = template.render(messages, [TOOL])
        except RowFault:
            continue
        texts, marks = render_jinja_template(
            [messages], tools=[TOOL], chat_template=ZOO[name], return_assistant_tokens_mask=True, **VARIABLES
        )
        starts = [sum(map(len, made.blocks[:block])) for block, _, _ in made.marks]
        ours = [(at + start, at + end) for at, (_, start, end) in zip(starts, made.marks, strict=True)]
        assert made.text == texts[0]
        assert characters(ours) == characters(marks[0])
        owners = {made.owners[block] for block, _, _ in made.marks}
        assert all(owner < 0 or messages[owner]["role"] == "assistant" for owner in owners)
        compared += 1
    assert compared or name.startswith("llava_next")


def characters(spans: Any) -> list[int]:
    return [place for start, end in spans for place in range(start, end)]


LOOKS_AHEAD = """\
{%- for message in messages %}{{ message.role ~ ':' }}
{%- if message.role == 'assistant' %}{% generation %}
    {%- set later = namespace(answers=0) %}
    {%- for other in messages[loop.index:] %}{% set later.answers = loop.index %}{{ '.' }}{% endfor %}
    {%- for word in message.content.split() %}{{ word ~ later.answers }}{% endfor %}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""


def test_a_loop_inside_generation_marks_is_walked_at_any_length() -> None:
    template = ChatTemplate(LOOKS_AHEAD, VARIABLES)
    assert template.fast is not None
    for pairs in (1, 2, 3, 7, 5, 9, 4):
        row = [{**message_, "content": " x" * size} for size in range(pairs) for message_ in PLAIN]
        made = template.render(row, None)
        assert made == template.render_really(row, None, False)
        assert len(made.marks) == pairs - (pairs == 1)  # the only answer of the shortest row says nothing
    assert template.fast.counts["rendered"] <= 3, template.fast.reasons


def usual(kind: str) -> Message:
    """A message without anything odd."""
    roles = {"u": "user", "s": "system", "t": "tool"}
    made: Message = {"role": roles.get(kind, "assistant")}
    if kind == "C":
        made["tool_calls"] = [
            {"type": "function", "id": "callid001", "function": {"name": "f", "arguments": {"a": "b"}}}
        ]
    if kind == "R":
        made["reasoning_content"] = made["thinking"] = made["reasoning"] = "I think"
    return made | ({"name": "f", "tool_call_id": "callid001"} if kind == "t" else {})


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.mark.parametrize("name", ["gemma4_v2", "qwen3_8"])
def test_the_order_in_which_names_are_bound_makes_no_other_state(name: str) -> None:
    if name not in ZOO:
        pytest.skip(f"this TRL has no {name}")
    template = ChatTemplate(ZOO[name], VARIABLES)
    assert template.fast is not None
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "name": "f", "content": "two"}
    TemplateFit.of(
        lambda messages, tools=None: template.render(messages, tools).text
    )  # rows of other shapes come first
    template.fast.counts.clear()
    for _ in range(3):
        template.render([dict(turn) for turn in [*PLAIN, PLAIN[0], calling, result, PLAIN[1]] * 2], TOOLS)
    assert not template.fast.counts["refused"]
    assert template.fast.counts["walked"] == 2


LOOKS_UP = """\
{%- set names = {'hi': 'greeting', 'bye': 'farewell'} %}
{%- for message in messages %}
{{- '<' ~ message.role ~ (' asks>' if message.role in 'user, system' else '>') }}
{{- names[message.content] if message.content in names else message.content }}
{{- '.' if message.content not in names }}
{%- endfor %}"""


def test_a_value_of_a_row_is_looked_for_in_a_dict_and_a_text_of_the_template() -> None:
    template = ChatTemplate(LOOKS_UP, VARIABLES)
    assert template.fast is not None
    for said in ("hi", "what?", "bye", "so", "greeting", "hi"):
        row: list[Message] = [{"role": "user", "content": said}, {"role": "assistant", "content": said * 2}]
        assert template.render(row, None) == template.render_really(row, None, False)
    assert not template.fast.counts["refused"]
    assert template.fast.counts["walked"] >= 4
