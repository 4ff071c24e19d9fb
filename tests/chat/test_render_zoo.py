"""Every template that TRL ships, on rows made to break it: a render says what `transformers` says."""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Any

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message

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
    """The text of a render, None where it raises."""
    try:
        return render(*row)
    except Exception:  # noqa: BLE001  a template may raise anything
        return None


@pytest.mark.parametrize("name", in_tiers(name for name in ZOO if not name.startswith(ONLY_PARTS)))
def test_hostile_rows_are_rendered_as_transformers_does(name: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template, theirs = ChatTemplate(ZOO[name], VARIABLES), _compile_jinja_template(ZOO[name])

    def expected(messages: Any, tools: Any, prompt: bool) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, **VARIABLES}
        return str(theirs.render(add_generation_prompt=prompt, **given))

    for row in rows(random.Random(name), 30):
        got = outcome(lambda *given: template.render(*given).text, *row)
        assert got == outcome(expected, *row), (row, got)


ASKED_IN_A_LOOP = """\
{%- for message in messages %}{{ message.role + message.content }}
{%- if loop.last and add_generation_prompt %}{{ "<model>" }}{% endif %}{% endfor %}"""


def test_a_prompt_that_is_asked_for_in_a_loop_is_never_another_rows() -> None:
    template = ChatTemplate(ASKED_IN_A_LOOP, VARIABLES)
    for prompt in (True, False, True, False):
        text = template.render(PLAIN, None, prompt).text
        assert text.endswith("<model>") == prompt


PLAIN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


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
        assert made.text == texts[0]
        assert characters(made.marks) == characters(marks[0])
        owners = {made.owners[bisect_right(made.bounds, start) - 1] for start, _ in made.marks}
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


def test_a_loop_inside_generation_marks_belongs_to_the_message_around() -> None:
    template = ChatTemplate(LOOKS_AHEAD, VARIABLES)
    for pairs in (1, 2, 3, 7, 5, 9, 4):
        row = [{**message_, "content": " x" * size} for size in range(pairs) for message_ in PLAIN]
        made = template.render(row, None)
        assert [owner for owner in made.owners if owner >= 0] == [*range(len(row))]
        assert len(made.marks) == pairs - (pairs == 1)  # the only answer of the shortest row says nothing


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
