"""Templates that write a turn in a rare way: the marks of a twin say what is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysvc.chat.render.rendered import NOBODY, Render
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.source.messages import Message
from raysvc.job.config import TextSpec, TokenizerConfig

from .test_zoo import MODES, hugging_face, judged, tokenizers_of
from .zoo import ROWS, TOOL, A, Row, Template, U, in_parts, say, tokenizer_folder
from .zoo_judge import runs

SYSTEM = "{{- '<|im_start|>system\\n' + (tools | tojson if tools else '') + '<|im_end|>\\n' }}"
CALLS = """\
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | dictsort %}{{- key + ':' ~ value + ';' }}{% endfor %}
{{- '}</tool_call>' }}{% endfor %}"""
LAST_OUTSIDE = f"""\
{SYSTEM}
{{%- set last = messages[-1] if messages[-1].role == 'assistant' else none %}}
{{%- for message in (messages[:-1] if last else messages) %}}
{{{{- '<|im_start|>' + message.role + '\\n' }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ message.content | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]{{{{ '\\n' }}}}
{{%- else %}}{{{{ message.content + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- endfor %}}
{{%- if last %}}{{% set message = last %}}{{{{- '<|im_start|>assistant\\n' }}}}[[{{{{ last.content | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]{{{{ '\\n' }}}}{{% endif %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
ONLY_WITH_TOOLS = (
    "{%- if not tools %}{{ raise_exception('this template is for rows with tools') }}{% endif %}"
    + LAST_OUTSIDE
)
OPEN_TURN = f"""\
{SYSTEM}
{{%- set ns = namespace(open=false) %}}
{{%- for message in messages %}}
{{%- if message.role == 'assistant' %}}
    {{%- if not ns.open %}}{{{{- '<|im_start|>assistant\\n' }}}}{{% endif %}}
    {{%- set ns.open = message.tool_calls and true %}}[[{CALLS}{{{{- message.content | trim }}}}
    {{{{- '<|return|>' if ns.open else '<|im_end|>' }}}}]]{{{{ '' if ns.open else '\\n' }}}}
{{%- elif message.role == 'tool' %}}{{{{ '<|result|>' + message.content + '<|result|>' }}}}
{{%- else %}}{{{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|quick|>' if ns.open else '<|im_start|>assistant\\n<|quick|>' }}}}{{% endif %}}"""
THOUGHT_IN_PROMPT = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}[[{{ message.content + '<|im_end|>' }}]]{{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"""
GATHERED = f"""\
{SYSTEM}
{{%- set ns = namespace(all=[]) %}}
{{%- for message in messages %}}
{{%- if message.role == 'tool' or message.role == 'system' %}}{{% set ns.all = ns.all + [message] %}}
{{%- else %}}{{% set ns.all = ns.all + [{{'role': message.role, 'content': message.content, 'tool_calls': message.tool_calls}}] %}}{{% endif %}}{{% endfor %}}
{{%- for message in ns.all %}}
{{%- if message.role == 'assistant' %}}[[{{{{ message.content }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]
{{%- elif message.role == 'tool' %}}{{{{ '<|result|>' + message.content + '<|result|>' }}}}
{{%- else %}}{{{{ '<|' + message.role + '|>' + message.content + '<|' + message.role + '|>' }}}}{{% endif %}}{{% endfor %}}"""
HEADER_BEFORE = f"""\
{SYSTEM}
{{%- for message in messages %}}
{{%- if message.role == 'assistant' %}}[[{{{{ '</think>' + message.content | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]
{{%- else %}}{{{{ '<|user|>' + message.content }}}}
    {{%- if add_generation_prompt or not loop.last %}}{{{{ '<|assistant|><think>' }}}}{{% endif %}}{{% endif %}}{{% endfor %}}"""
END_BEFORE_NEXT = f"""\
{{{{- '<|bom|>system\\n' + (tools | tojson if tools else '') }}}}
{{%- for message in messages %}}
{{%- if loop.previtem is defined and loop.previtem.role == 'assistant' %}}[[{{{{ '<|eom|>' }}}}]]{{% else %}}{{{{ '<|eom|>' }}}}{{% endif %}}
{{{{- '<|bom|>' + message.role + '\\n' }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ message.content | trim }}}}{CALLS}]]{{% else %}}{{{{ message.content }}}}{{% endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|eom|><|bom|>assistant\\n' }}}}{{% endif %}}"""
END_IS_TEXT = f"""\
{SYSTEM}
{{%- for message in messages %}}{{{{ '<' + message.role + '>\\n' }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ message.content | trim }}}}{CALLS}{{{{- '\\n</assistant>' }}}}]]
{{%- else %}}{{{{ message.content + '\\n</' + message.role + '>' }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<assistant>\\n' }}}}{{% endif %}}"""
ASKED_OTHERWISE = f"""\
{{{{- '<|im_start|>system\\n' + ('asked' if add_generation_prompt else 'said') + (tools | tojson if tools else '') + '<|im_end|>\\n' }}}}
{{%- for message in messages %}}{{{{ '<|im_start|>' + message.role }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ ' to=user<|message|>' + message.content | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]
{{%- else %}}{{{{ '<|message|>' + message.content + '<|im_end|>' }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant' }}}}{{% endif %}}"""
BLANKS_BEFORE = f"""\
{SYSTEM}
{{%- for message in messages %}}{{{{ '\\n \\n' if '</think>' in message.content }}}}{{{{ '<|im_start|>' + message.role + '\\n' }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ message.content.split('</think>')[-1] | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]
{{%- else %}}{{{{ message.content + '<|im_end|>' }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
RESULTS_INSIDE = f"""\
{SYSTEM}
{{%- for message in messages if message.role != 'tool' %}}
{{%- set place = messages.index(message) %}}{{% set ns = namespace(at=place + 1) %}}
{{%- if messages[place - 1].role != 'tool' %}}{{{{ '<|im_start|>' + message.role + '\\n' }}}}{{% endif %}}
{{%- if message.role == 'assistant' %}}[[{CALLS}]]
{{%- for other in range(place + 1, messages | length) %}}{{% if other == ns.at and messages[other].role == 'tool' %}}
    {{%- set ns.at = other + 1 %}}
    {{%- if other == place + 1 %}}[[{{{{ '<|result|>' }}}}]]{{% else %}}{{{{ '<|result|>' }}}}{{% endif %}}{{{{ messages[other].content + '<|result_end|>' }}}}{{% endif %}}{{% endfor %}}
{{%- if message.content or ns.at == place + 1 %}}[[{{{{ message.content | trim + '<|im_end|>' }}}}]]{{{{ '\\n' }}}}{{% endif %}}
{{%- else %}}{{{{ message.content + '<|im_end|>\\n' }}}}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt and messages[-1].role != 'tool' %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
END_BY_USER = """\
{%- set ns = namespace(open=false) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '' if ns.open else '<|assistant|>' }}{% set ns.open = true %}
    {{- ']' if loop.previtem.role == 'tool' }}{{ message.content }}
    {%- for call in message.tool_calls or [] %}{{ '<|calls|>' + call.function.name + (call.function.arguments | tojson) + '<|calls_end|>' }}{% endfor %}
{%- elif message.role == 'tool' %}{{ '[' + message.content }}
{%- else %}{{ '<|assistant_end|>' if ns.open }}{% set ns.open = false %}{{ '<|user|>' + message.content + '<|user_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ ']' if messages[-1].role == 'tool' }}{{ '<|assistant|>' }}{% endif %}"""
BY_PLACE = f"""\
{SYSTEM}
{{%- set ns = namespace(asked=0) %}}
{{%- for message in messages %}}{{% if message.role == 'user' %}}{{% set ns.asked = loop.index0 %}}{{% endif %}}{{% endfor %}}
{{%- for n in range(messages | length) %}}{{% set message = messages[n] %}}
{{{{- '<|im_start|>' + message.role + '\\n' }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ 'Hm: ' if n > ns.asked }}}}{{{{ message.content }}}}
    {{%- for place in range((message.tool_calls or []) | length) %}}{{% set call = message.tool_calls[place] %}}
    {{{{- call.function.name + (call.function.arguments | tojson if call.function.arguments is mapping else call.function.arguments) }}}}{{% endfor %}}{{{{ '<|im_end|>' }}}}]]
{{%- else %}}{{{{ message.content + '<|im_end|>' }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
BLANKS_DIFFER = f"""\
{SYSTEM}
{{%- for message in messages %}}{{{{ '  \\n<|im_start|> ' + message.role + '\\n' }}}}
{{%- if message.role == 'assistant' %}}{{{{ '  ' if message.tool_calls }}}}{{{{ '\\n<think></think>' }}}}[[{{{{ message.content }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]
{{%- else %}}{{{{ message.content + '<|im_end|>' }}}}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ ' <|im_start|>assistant\\n\\n<think> </think>' }}}}{{% endif %}}"""
RARE = {
    "messages are taken by their places, and change with those behind them": BY_PLACE,
    "the prompt has other blanks than the header of a turn": BLANKS_DIFFER,
    "blanks stand before a header": BLANKS_BEFORE,
    "results stand in the block of their calls": RESULTS_INSIDE,
    "the last turn is written behind the loop": LAST_OUTSIDE,
    "it refuses rows without tools": ONLY_WITH_TOOLS,
    "a turn goes on after the results of its calls": OPEN_TURN,
    "the prompt opens the thought that contents begin with": THOUGHT_IN_PROMPT,
    "some messages are written from a list of its own": GATHERED,
    "the header of a turn is written with the message before": HEADER_BEFORE,
    "a turn ends where the next one begins": END_BEFORE_NEXT,
    "its own marks end a turn with a text": END_IS_TEXT,
    "a turn ends with a text": END_IS_TEXT,
    "it writes another beginning when it is asked": ASKED_OTHERWISE,
}
SHOWN = {  # rows, where not all
    "it refuses rows without tools": 3,
    "the prompt opens the thought that contents begin with": 8,  # it shows no calls
}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_template_trains_what_its_marks_say(name: str, tmp_path: Path) -> None:
    marked = RARE[name].replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    plain = marked if "own marks" in name else RARE[name].replace("[[", "").replace("]]", "")
    template = Template(name, plain, marked, ("<|endoftext|>", "<|im_end|>"))
    tokenizers = tokenizers_of(template, tmp_path)
    marks = []
    for kind, rows in ROWS.items():
        for row in rows:
            for mode in MODES:
                mark, wrong = judged(template, tokenizers[mode], mode, row)
                assert wrong == [], (kind, mode)
                marks.append(mark if mode == MODES[0] else "")
    assert marks.count("=") == SHOWN.get(name, len(marks) // 2)


def test_messages_of_the_assistant_that_are_one_turn_do_not_share_a_token(tmp_path: Path) -> None:
    template = Template("end by user", END_BY_USER, "", ("<s>", "</s>"))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = [say(U, "t0"), say(A, "t1"), say(A, "", tool_calls=[call]), say("tool", "t3"), say(A, "t4")]
    row = {"messages": [*said, say(U, "t5"), say(A, "t6")]}
    folder = tokenizer_folder(template, tmp_path)
    result = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder))).run([SourceRow(0, row)])
    assert result.examples == ()
    [ids], [mask] = (result.table[name].to_pylist() for name in ("input_ids", "loss_mask"))
    trained = [hugging_face(folder).decode(ids[start:end]) for start, end in runs(mask)]
    assert trained == ["t1<|calls|>f{}<|calls_end|>", "t4<|assistant_end|>", "t6"]


def test_messages_whose_end_shorter_conversations_do_not_show_share_a_block() -> None:
    text = (
        "{% set ns = namespace(all=[]) %}"
        "{% for m in messages %}{% set ns.all = ns.all + [{'a': m.role == 'assistant', 'c': m.content}] %}{% endfor %}"
        "{% for m in ns.all %}{% if m.a %}{% generation %}{{ m.c + ('!' if loop.last else '') }}{% endgeneration %}"
        "{% else %}{{ '<' + m.c + '>' }}{% endif %}{% endfor %}"
    )
    messages = [say((U, A)[n % 2], f"t{n}") for n in range(4)]
    render = ChatTemplate(text, {}).render(messages, None)
    assert render == Render("<t0>t1<t2>t3!", [0, 4, 10, 13], [0, NOBODY, 3], [(4, 6), (10, 13)])


@pytest.mark.parametrize(
    "text", ["", "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"]
)
def test_a_template_that_shows_no_answer_gives_it_no_block(text: str) -> None:
    render = ChatTemplate(text, {}).render([say(U, "t0"), say(A, "t1"), say(U, "t2"), say(A, "t3")], None)
    assert not {1, 3} & set(render.owners)
    assert render.text == ("t0t2" if text else "")


TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
QUESTION = "{{ '<|im_start|>user\\n' + messages[n - 1].content + '<|im_end|>\\n' }}"
MIXED = {
    "pairs": "{% for m in messages %}{% if m.role == 'assistant' %}{% set n = loop.index0 %}"
    f"{QUESTION}{TURN}{{% endif %}}{{% endfor %}}{ASKS}",
    "pairs by their places": "{% for n in range(messages | length) %}{% set m = messages[n] %}"
    f"{{% if m.role == 'assistant' %}}{QUESTION}{TURN}{{% endif %}}{{% endfor %}}{ASKS}",
    "it repeats the question": "{% for m in messages %}{% set n = loop.index0 %}"
    "{{ '<|im_start|>' + m.role + '\\n' + (messages[n - 1].content if n > 1 and m.role == 'assistant' else '') }}"
    f"{{{{ m.content + '<|im_end|>\\n' }}}}{{% endfor %}}{ASKS}",
}


@pytest.mark.parametrize("name", MIXED)
def test_a_template_that_writes_a_question_into_the_answer_is_refused_however_short_it_is(
    name: str, tmp_path: Path
) -> None:
    template = Template(name, MIXED[name], "", ("<s>", "<|im_end|>"))
    tokenizer = tokenizers_of(template, tmp_path)[MODES[0]]
    row = {"messages": [say(U, "q"), say(A, "r"), say(U, "s"), say(A, "t")]}
    result = tokenizer.run([SourceRow(0, row)])
    assert result.table.num_rows == 0
    assert "writes other messages into an assistant's turn" in str(result.examples[0])


@pytest.mark.parametrize("names", ["m following", "following m"])
def test_a_loop_over_numbers_that_takes_two_messages_gives_neither_its_text(names: str) -> None:
    first, second = names.split()
    taken = {"m": "messages[n]", "following": "messages[[n + 1, messages | length - 1] | min]"}
    text = f"{{% for n in range(messages | length) %}}{{% set {first} = {taken[first]} %}}{{% set {second} = {taken[second]} %}}"
    template = ChatTemplate(text + TURN + "{% endfor %}", {})
    messages = [say(U, "one"), say(A, "two"), say(U, "three")]
    render = template._render(messages, None, False)
    assert render.text.count("<|im_start|>") == 3
    assert render.owners == [NOBODY]


def trained_texts(tokenizer: SliceTokenizer, *rows: list[Message]) -> list[list[str]]:
    """The trained stretches of each row, all of them written."""
    result = tokenizer.run([SourceRow(n, {"messages": row, "tools": [TOOL]}) for n, row in enumerate(rows)])
    assert result.examples == ()
    table = (result.table[name].to_pylist() for name in ("input_ids", "loss_mask"))
    hf = hugging_face(tokenizer.spec.tokenizer.name)
    return [[hf.decode(ids[a:b]) for a, b in runs(mask)] for ids, mask in zip(*table, strict=True)]


@pytest.mark.parametrize(
    ("head", "prompt"),
    [
        ("<|im_start|>", "\\n<|im_start|>assistant\\n"),
        ("  <|im_start|>", "\\n  <|im_start|>assistant\\n\\n"),
        ("<|im_start|>", " \\n"),
    ],
)
def test_a_first_message_of_the_assistant_is_trained_where_the_prompt_begins_with_a_blank(
    head: str, prompt: str, tmp_path: Path
) -> None:
    text = (
        "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
        f"{{% for m in messages %}}{{{{ '{head}' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    said = [say(A, "one \nor two"), say(U, "three"), say(A, "four, or five")]
    expected = ["one \nor two<|im_end|>", "four, or five<|im_end|>"]
    assert trained_texts(tokenizer, said) == [expected]


def test_an_end_that_the_next_block_begins_with_ends_the_first_of_two_messages_too(tmp_path: Path) -> None:
    text = END_BEFORE_NEXT.replace("[[", "").replace("]]", "")
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|eom|>")), tmp_path)[MODES[0]]
    said = [say(U, "one"), say(A, "two"), say(A, "three"), say(U, "four"), say(A, "five")]
    assert trained_texts(tokenizer, said) == [["two<|eom|>", "three<|eom|>", "five"]]


ENDS_TWICE = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>' }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<|im_start|>assistant\\n' if loop.first }}{{ '<|call|>' + call.function.name + (call.function.arguments | tojson) }}
    {{- '<|im_end|>' if loop.last }}{% endfor %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '<|result|>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.mark.parametrize("content", ["", "two"])
def test_a_template_that_ends_calls_and_then_their_text_trains_no_second_turn(
    content: str, tmp_path: Path
) -> None:
    tokenizer = tokenizers_of(Template("", ENDS_TWICE, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = [say(U, "one"), say(A, content, tool_calls=[call, call]), say("tool", "three"), say(A, "four")]
    if content:
        result = tokenizer.run([SourceRow(0, {"messages": row})])
        assert "a trained turn holds a control token" in str(result.examples[0])
    else:
        assert trained_texts(tokenizer, row) == [["<|call|>f{}<|call|>f{}<|im_end|>", "four<|im_end|>"]]


def test_an_answer_alone_is_trained_where_only_the_last_message_has_an_end(tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}{{ m.role + ':' + m.content + (eos_token if loop.last else '') }}{% endfor %}"
    )
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "</s>")), tmp_path)[MODES[0]]
    assert trained_texts(tokenizer, [say(A, "one")], [say(U, "two"), say(A, "three")]) == [
        ["one</s>"],
        ["three</s>"],
    ]


THOUGHTS = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>model\\n' if loop.previtem.role != 'tool' }}
    {{- '<|channel>' + (m.reasoning_content or '') + '<channel|>' if m.reasoning_content or loop.previtem.role != 'tool' }}{{ m.content }}
    {%- for call in m.tool_calls or [] %}{{ '<|call>' + call.function.name + (call.function.arguments | tojson) + '<call|>' }}{% endfor %}
    {{- '<|im_end|>' if not m.tool_calls }}
{%- elif m.role == 'tool' %}{{ '<|result>' + m.content + '<result|>' }}
{%- else %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>model\\n<|channel><channel|>' }}{% endif %}"""


def test_a_thought_between_two_calls_of_one_turn_is_trained(tmp_path: Path) -> None:
    tokenizer = tokenizers_of(Template("", THOUGHTS, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = [
        say(U, "one"),
        say(A, "", tool_calls=[call]),
        say("tool", "two"),
        say(A, "", tool_calls=[call], reasoning_content="three"),
        say("tool", "four"),
        say(A, "five"),
    ]
    called = "<|call>f{}<call|>"
    assert trained_texts(tokenizer, row) == [[called, f"<|channel>three<channel|>{called}", "five<|im_end|>"]]


def test_two_messages_of_the_assistant_teach_nothing_about_one(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + bos_token }}{% endfor %}assistant:"
    template = Template("what begins a sequence ends turns", text, "", ("<s>", "</s>"))
    tokenizer = tokenizers_of(template, tmp_path)[MODES[0]]
    one = [say(U, "a"), say(A, "b"), say(U, "c")]
    rows = [one, [say(U, "a"), say(A, "b"), say(A, "c"), say(U, "d")], one]
    fates = [tokenizer.run([SourceRow(0, {"messages": row})]).row_counts.rows_written for row in rows]
    assert fates[0] == fates[2]


PARTS_ALONE = """\
{%- for m in messages if m.role != 'system' %}{{ '<|' + m.role + '|>' }}
{%- for part in m.content %}{{ part.text if part.type == 'text' }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
PARTS_OF_USERS = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'user' and m.content is not string %}{% for part in m.content %}{{ part.text }}{% endfor %}
{%- else %}{{ m.content.strip() }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.mark.parametrize("given", [dict, in_parts])
@pytest.mark.parametrize(
    ("text", "shown"), [(PARTS_ALONE, in_parts), (PARTS_OF_USERS, dict)], ids=["no system", "of users"]
)
def test_contents_are_given_as_all_messages_of_a_template_show_them(
    text: str, shown: Callable[[Row], Row], given: Callable[[Row], Row], tmp_path: Path
) -> None:
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    row: Row = {"messages": [say("system", "Be kind."), say(U, "one"), say(A, "two")]}
    result = tokenizer.run([SourceRow(0, given(row))])
    expected = hugging_face(tokenizer.spec.tokenizer.name).apply_chat_template(
        shown(row)["messages"], return_dict=False
    )
    assert result.table["input_ids"].to_pylist() == [expected], result.examples


def test_a_mark_around_nothing_marks_nothing(tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{% generation %} {%- endgeneration %}{% endif %}"
    )
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    assert trained_texts(tokenizer, [say(U, "one"), say(A, "two")]) == [["two<|im_end|>"]]


@pytest.mark.parametrize(
    ("shown", "left_out"),
    [
        ("", "the call of 'look_up'"),
        ("{{ m.content }}", "the call of 'look_up'"),
        (
            "{% for c in m.tool_calls %}{{ c.id ~ c.function.arguments | tojson }}{% endfor %}",
            "the name 'look_up' of a call",
        ),
    ],
)
def test_what_a_template_leaves_out_of_a_call_is_said(shown: str, left_out: str, tmp_path: Path) -> None:
    text = f"{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}{shown}{{{{ '<|im_end|>' }}}}{{% endfor %}}"
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"what": "it"}}}
    result = tokenizer.run([SourceRow(0, {"messages": [say(U, "one"), say(A, "two", tool_calls=[call])]})])
    assert f"the template leaves out {left_out}" in str(result.examples[0])


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ("{{ messages[-1].content }}", "does not show where an assistant's turn begins and ends"),
        ("", "does not show a trained message"),
    ],
)
def test_a_message_of_no_loop_is_not_called_one_that_is_not_shown(
    last: str, reason: str, tmp_path: Path
) -> None:
    text = "{% for m in messages[:1] %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}" + last
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[1]]
    said = [say(U, "one"), say(A, "two"), say(U, "three"), say(A, "four")]
    result = tokenizer.run([SourceRow(0, {"messages": said})])
    assert reason in str(result.examples[0])


SOFT_SWITCH = """\
{%- set ns = namespace(quiet=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.quiet = '/no_think' in m.content %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + ('<think></think>' if m.role == 'assistant' else '') + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('<think></think>' if ns.quiet else '<think>') }}{% endif %}"""


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
def test_words_that_change_the_generation_prompt_change_what_is_context(
    tools: list[Row], tmp_path: Path
) -> None:
    template = Template("soft switch", SOFT_SWITCH, "", ("<s>", "<|im_end|>"))
    tokenizer = tokenizers_of(template, tmp_path)[MODES[0]]
    thinks = [say(U, "one"), say(A, "two"), say(U, "three"), say(A, "four")]
    quiet = [say(U, "one /no_think"), *thinks[1:]]
    ends = "</think>two<|im_end|>", "</think>four<|im_end|>"
    expected = {"one": [*ends], "one /no_think": ["two<|im_end|>", ends[1]]}
    rows = [thinks, quiet, quiet, thinks, thinks, quiet]
    result = tokenizer.run([SourceRow(n, {"messages": row, "tools": tools}) for n, row in enumerate(rows)])
    decode = hugging_face(tokenizer.spec.tokenizer.name).decode
    pairs = zip(result.table["input_ids"].to_pylist(), result.table["loss_mask"].to_pylist(), strict=True)
    trained = [[decode(ids[a:b]) for a, b in runs(mask)] for ids, mask in pairs]
    assert trained == [expected[row[0]["content"]] for row in rows]


NO_TOKENS = """\
{%- for m in messages %}{{ '[|' + m.role + '|]' + m.content + 'END' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"""


@pytest.mark.parametrize("end", ["[|end|]", "#"], ids=["some tokens", "one token"])
def test_a_turn_ends_once_where_its_end_is_a_text(end: str, tmp_path: Path) -> None:
    template = Template("words alone", NO_TOKENS.replace("END", end), "", ("<s>", "</s>"))
    tokenizer = tokenizers_of(template, tmp_path)[MODES[0]]
    said = [say(U, "one"), say(A, "two"), say(U, "three"), say(A, "four")]
    assert trained_texts(tokenizer, said, said[:2]) == [[f"two{end}", f"four{end}"], [f"two{end}"]]
    result = tokenizer.run([SourceRow(0, {"messages": [said[0], say(A, f"two {end} three")]})])
    assert result.table.num_rows == 0
    assert f"holds a control token ('{end}'" in str(result.examples[0])


def test_an_end_of_sequence_follows_an_end_that_is_a_text(tmp_path: Path) -> None:
    text = NO_TOKENS + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    tokenizer = tokenizers_of(Template("words and end", text, "", ("<s>", "</s>")), tmp_path)[MODES[0]]
    said = [say(U, "one"), say(A, "two"), say(U, "three"), say(A, "four")]
    assert trained_texts(tokenizer, said, said[:2]) == [["twoEND", "fourEND\n</s>"], ["twoEND\n</s>"]]


def test_a_header_behind_a_turn_is_not_its_end(tmp_path: Path) -> None:
    text = (
        "Q: {% for m in messages %}{{ m.content + ('\\nQ: ' if m.role == 'assistant' and not loop.last else '') }}"
        "{{ '\\nA:' if m.role == 'user' and (add_generation_prompt or not loop.last) }}{% endfor %}"
    )
    tokenizer = tokenizers_of(Template("header behind", text, "", ("<s>", "</s>")), tmp_path)[MODES[0]]
    assert trained_texts(tokenizer, [say(U, "one"), say(A, " two"), say(U, "three"), say(A, " four")]) == [
        [" two", " four"]
    ]


def test_a_short_prompt_of_the_system_in_the_first_turn_is_not_trained(tmp_path: Path) -> None:
    text = (
        "{% set first = messages[0].role == 'system' %}{% for m in (messages[1:] if first else messages) %}"
        "{{ '[INST] ' if m.role == 'user' }}{{ '<<' + messages[0].content + '>>' if first and loop.first }}"
        "{{ m.content + (' [/INST]' if m.role == 'user' else eos_token) }}{% endfor %}"
    )
    tokenizer = tokenizers_of(Template("system inside", text, "", ("<s>", "</s>")), tmp_path)[MODES[0]]
    spoken = [say(A, "two"), say(U, "three"), say(A, "four")]
    rows = [spoken, [say("system", "Hm"), *spoken], [say("system", "Be kind."), *spoken], spoken]
    result = tokenizer.run([SourceRow(n, {"messages": row}) for n, row in enumerate(rows)])
    assert result.table["source_row"].to_pylist() == [0, 3]
    assert "a trained turn holds text of another message ('Hm')" in str(result.examples[0])
    asked = [say("system", "o"), say(U, "one"), say(A, "two o o")]
    assert trained_texts(tokenizer, asked) == [["two o o</s>"]]


def test_a_short_result_in_the_block_of_its_call_may_be_an_argument_too(tmp_path: Path) -> None:
    text = RESULTS_INSIDE.replace("[[", "").replace("]]", "")
    tokenizer = tokenizers_of(Template("", text, "", ("<|endoftext|>", "<|im_end|>")), tmp_path)[MODES[0]]
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 3}}}
    row = [say(U, "one"), say(A, "", tool_calls=[call]), say("tool", "3"), say(A, "3")]
    assert trained_texts(tokenizer, row) == [["<tool_call>f{n:3;}</tool_call><|result|>", "3<|im_end|>"]]


def test_a_tag_that_only_the_prompt_writes_does_not_hide_the_one_behind_it(tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{{ '</think>' if m.role == 'assistant' else '' }}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<think></think>' }}{% endif %}"
    )
    tokenizer = tokenizers_of(Template("", text, "", ("<s>", "<|im_end|>")), tmp_path)[MODES[0]]
    said = [say(U, "one"), say(A, "two"), say(U, "three"), say(A, "assistant four")]
    expected = ["two<|im_end|>", "assistant four<|im_end|>"]
    assert trained_texts(tokenizer, said, said) == [expected, expected]
