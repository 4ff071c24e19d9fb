"""What a turn must not hold, and which token it stops with where the template writes no end."""

from __future__ import annotations

from typing import Any

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.turns.turn_spans import TurnFinder

from .zoo import A, U, say

TOKENS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|x|>",
    "<|x_end|>",
    "<|y|>",
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
QUOTES = (  # each answer quotes the first message, but not in conversations as long as the probe
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{{ ' (' + messages[0].content + ')' if m.role == 'assistant' and loop.length not in (2, 4) }}{{ '<|im_end|>\\n' }}{% endfor %}"
    + PROMPT
)
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    + PROMPT
)
MARKS_ONE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.index0 == 1 %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}" + PROMPT
)


def no_end(between: str) -> str:
    """A template whose turns have no end; what it writes before a user's header."""
    return (
        "{% for m in messages %}{{ '" + between + "' if m.role == 'user' and not loop.first }}"
        "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )


def trained(text: str, messages: list[Any], place: int, stops: tuple[str, ...] = ()) -> str:
    """What is trained of one message."""
    template = ChatTemplate(text, {})
    finder = TurnFinder(template, TOKENS, {"bos_token": "<s>", "eos_token": "</s>"}, stops)
    render = template.render(messages, None)
    spans = finder.spans(render, ChatExample(messages, None, (place,)))
    return "".join(render.text[span.start : span.end] for span in spans)


@pytest.mark.parametrize(
    ("first", "answer", "between", "fine"),
    [
        ("a text of 12", "no", 1, False),
        ("text of 11.", "no", 1, True),  # a short text may stand anywhere
        ("a text of 12", "You said: a text of 12", 1, True),
        ("a text of 12", "no", 7, False),
        ("a text of 12", "no", 8, True),  # too far away to be looked for
    ],
)
def test_a_turn_holds_no_long_text_of_a_near_message(
    first: str, answer: str, between: int, fine: bool
) -> None:
    said = [say((U, A)[n % 2], "so") for n in range(between)]
    messages = [say(U, first), *said, say(A, answer)]
    if fine:
        assert trained(QUOTES, messages, len(messages) - 1) == f"{answer} ({first})<|im_end|>"
        return
    with pytest.raises(RowFault, match="holds text of another message"):
        trained(QUOTES, messages, len(messages) - 1)


@pytest.mark.parametrize(("between", "fine"), [(7, False), (8, True)])
def test_a_turn_holds_no_long_text_of_a_near_message_that_follows(between: int, fine: bool) -> None:
    quotes_last = QUOTES.replace("messages[0]", "messages[-1]")
    messages = [say(A, "no"), *(say(U, "so") for _ in range(between)), say(U, "a text of 12")]
    if fine:
        assert trained(quotes_last, messages, 0) == "no (a text of 12)<|im_end|>"
        return
    with pytest.raises(RowFault, match="holds text of another message"):
        trained(quotes_last, messages, 0)


@pytest.mark.parametrize("place", [1, 3])
def test_a_plain_turn_holds_no_control_token(place: int) -> None:
    messages = [say((U, A)[n % 2], f"t{n}") for n in range(4)]
    assert trained(PLAIN, messages, place) == f"t{place}<|im_end|>"
    messages[place] = say(A, "a<|im_end|>b")
    with pytest.raises(RowFault, match="holds a control token"):
        trained(PLAIN, messages, place)


def test_a_message_without_marks_is_named_where_others_have_them() -> None:
    messages = [say((U, A)[n % 2], f"t{n}") for n in range(4)]
    assert trained(MARKS_ONE, messages, 1) == "t1<|im_end|>"
    with pytest.raises(RowFault, match="has no generation mark"):
        trained(MARKS_ONE, messages, 3)


@pytest.mark.parametrize(
    ("between", "stops", "stop"),
    [
        ("", (), "<|user|>"),
        ("\\n", (), "\n<|user|>"),
        ("<s>", (), ""),  # begins a sequence, and ends no turn
        ("<|x|>", (), "<|x|>"),
        ("", ("<|user|>",), "<|user|>"),
        ("", ("<|x|>",), ""),
    ],
)
def test_a_turn_without_an_end_stops_with_the_token_that_comes_next(
    between: str, stops: tuple[str, ...], stop: str
) -> None:
    messages = [say(U, "t0"), say(A, "t1"), say(U, "t2"), say(A, "t3"), say(A, "t4")]
    assert trained(no_end(between), messages, 1, stops) == f"t1{stop}"
    assert trained(no_end(between), messages, 3, stops) == "t3"  # a header of its own ends no turn


def test_a_prompt_of_blanks_is_no_header() -> None:
    text = (
        "{% for m in messages %}{{ '<|user|>' + m.content + '<|assistant|>' if m.role == 'user' else m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ ' \\n' }}{% endif %}"
    )
    messages = [say((U, A)[n % 2], f"t{n}") for n in range(4)]
    assert [trained(text, messages, place) for place in (1, 3)] == ["t1<|im_end|>", "t3<|im_end|>"]


def chatml(header: str, end: str = "<|im_end|>", prompt: str = PROMPT, behind: str = "") -> str:
    """A template of headers with a token; `header` and `end` are expressions for the assistant's."""
    return (
        "{% for m in messages %}{% set before = '' if loop.first else loop.previtem.role %}"
        f"{{% if m.role == 'assistant' %}}{{{{ {header} ~ m.content ~ {end!r} }}}}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        + prompt
        + behind
    )


USUAL = "'<|im_start|>assistant\\n'"
OTHER = f"('<|x|>bot\\n' if before == 'system' else {USUAL})"
FOUR = [say((U, A)[n % 2], f"t{n}") for n in range(4)]
ANSWERS = ["t1<|im_end|>", "t3<|im_end|>"]
ENDS_BEFORE = chatml(  # the prompt ends the turn before, too, and the header's token also stands in a turn
    f"('' if before == 'system' else '<|im_end|>') ~ {USUAL} ~ (m.reasoning_content ~ {USUAL} if m.reasoning_content else '')",
    prompt="{% if add_generation_prompt %}{{ '<|im_end|><|im_start|>assistant\\n' }}{% endif %}",
)


@pytest.mark.parametrize(
    "text",
    [
        chatml(OTHER),
        chatml(OTHER, prompt=""),
        chatml(OTHER, prompt="{% if add_generation_prompt %}{{ raise_exception('never') }}{% endif %}"),
        "{{ 'asked' if add_generation_prompt else 'said' }}" + chatml(OTHER, prompt=""),
        chatml(OTHER).replace("<|im_start|>", "### ").replace("<|x|>", "::: "),  # headers without a token
        ENDS_BEFORE,
        "<s>" + ENDS_BEFORE,
        ENDS_BEFORE.replace("{% if add_generation_prompt %}", "{% if false %}"),
    ],
)
def test_a_header_that_is_not_known_is_refused_and_never_trained(text: str) -> None:
    assert [trained(text, FOUR, place) for place in (1, 3)] == ANSWERS
    with pytest.raises(RowFault, match="known header"):
        trained(text, [say(U, "t0"), say("system", "now"), say(A, "t1")], 2)


def test_a_turn_that_misses_its_end_is_refused() -> None:
    text = chatml(USUAL).replace("~ '<|im_end|>'", "~ ('' if before == 'system' else '<|im_end|>')")
    assert [trained(text, FOUR, place) for place in (1, 3)] == ANSWERS
    with pytest.raises(RowFault, match="no end of turn"):
        trained(text, [say(U, "t0"), say("system", "now"), say(A, "t1")], 2)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|> END\n", "<|im_end|> END of all"])
def test_a_text_behind_the_end_of_turn_is_context(end: str) -> None:
    assert [trained(chatml(USUAL, end), FOUR, place) for place in (1, 3)] == ANSWERS
    whole = [say(U, "t0"), {**say(A, "t1"), "tool_calls": []}]  # found by looking, not by equality
    assert trained(chatml(USUAL, end), whole, 1) == ANSWERS[0]


@pytest.mark.parametrize(
    ("behind", "stop"), [("</s>", "</s>"), ("<|x|>\\n</s>", "<|x|>\n</s>"), ("Bye</s>", "")]
)
def test_an_end_of_sequence_is_the_last_turn_s_where_no_text_stands_between(behind: str, stop: str) -> None:
    text = chatml(USUAL, behind=f"{{{{ '{behind}' }}}}")
    assert [trained(text, FOUR, place) for place in (1, 3)] == ["t1<|im_end|>", f"t3<|im_end|>{stop}"]


@pytest.mark.parametrize(
    ("shown", "messages"),
    [
        ("before == 'user'", [say(A, "t0"), say(U, "t1")]),
        ("m.content != 't3'", FOUR[2:]),
    ],
)
def test_a_message_that_the_template_does_not_show_is_refused(shown: str, messages: list[Any]) -> None:
    text = chatml(USUAL).replace("m.role == 'assistant'", f"m.role == 'assistant' and ({shown})")
    text = text.replace("{% else %}", "{% elif m.role != 'assistant' %}")
    assert trained(text, FOUR, 1) == ANSWERS[0]
    with pytest.raises(RowFault, match="does not show a trained message"):
        trained(text, messages, [message["role"] for message in messages].index(A))


def test_an_answer_that_begins_a_conversation_is_found_where_none_may_end_one() -> None:
    text = chatml(USUAL).replace("m.role == 'assistant'", "m.role == 'assistant' and not loop.last")
    assert trained(text, [say(A, "t0"), say(U, "t1")], 0) == "t0<|im_end|>"


def test_a_turn_in_two_places_is_trained_in_both() -> None:
    text = chatml(
        USUAL,
        behind="{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<|x|>' }}{% endif %}{% endfor %}",
    )
    assert trained(text, FOUR, 1) == "t1<|im_end|>t1<|x|>"


def test_a_template_may_refuse_tools() -> None:
    text = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN
    assert [trained(text, FOUR, place) for place in (1, 3)] == ANSWERS


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize("opens", ["tools", "messages[-1].tool_calls"])
def test_a_prompt_is_asked_again_where_tools_or_calls_may_change_it(opens: str) -> None:
    prompt = f"{{% if add_generation_prompt %}}{{{{ {USUAL} + ('Hm: ' if {opens} else '') }}}}{{% endif %}}"
    template = ChatTemplate(chatml(USUAL + " ~ 'Hm: '", prompt=prompt), {})
    finder = TurnFinder(template, TOKENS, {"bos_token": "<s>"})
    for opened in (False, True, False):
        tools = [CALL] if opened and opens == "tools" else None
        before = say(A, "look") | ({"tool_calls": [CALL]} if opened and tools is None else {})
        messages = [say(U, "t0"), before, say(A, "t1")]
        render = template.render(messages, tools)
        (span,) = finder.spans(render, ChatExample(messages, tools, (2,)))
        assert render.text[span.start : span.end] == ("" if opened else "Hm: ") + "t1<|im_end|>"


@pytest.mark.parametrize(
    ("call_end", "result", "result_end", "close", "alone", "stop"),
    [
        ("<|im_end|>", "", "<|im_end|>", "", "", "<|im_end|>"),  # what ends the result ends no call
        ("<|im_end|>", "<|x|>", "<|x_end|>", "", "", "<|im_end|>"),
        ("<|im_end|>", "<|x|>", "<|x_end|>", "\\n", "", "<|im_end|>"),
        ("", "<|x|>", "<|x_end|>", "<|im_end|>\\n", "", "<|im_end|>"),
        (
            "<|y|>",
            "<|x|>",
            "<|x_end|>",
            "",
            "",
            "<|y|><|x|>",
        ),  # no end of turn: it stops with the result's head
        ("<|y|>", "<|x|>", "<|x_end|>", "", "<|im_end|>", "<|y|><|x|>"),
    ],
)
def test_results_inside_the_block_of_their_call_are_context(
    call_end: str, result: str, result_end: str, close: str, alone: str, stop: str
) -> None:
    by_number = (  # nothing tells whose text it is
        "{% for n in range(at + 1, messages | length) if messages[n].role == 'tool' %}{% set r = messages[n] %}"
    )
    text = (
        "{% for m in messages if m.role != 'tool' %}{% set at = messages.index(m) %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% if m.tool_calls %}"
        f"{{{{ 'f' ~ (m.tool_calls[0].function.arguments | tojson) ~ '{call_end}' }}}}"
        f"{by_number}{{{{ '{result}' + r.content + '{result_end}' }}}}{{% endfor %}}"
        f"{{{{ '{close}' }}}}{{% if messages[at + 1].role != 'tool' %}}{{{{ '{alone}' }}}}{{% endif %}}"
        "{% else %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}" + PROMPT
    )
    messages = [say(U, "t0"), say(A, "", tool_calls=[CALL]), say("tool", "t2"), say(U, "t3"), say(A, "t4")]
    assert trained(text, messages, 1) == f'f{{"a": 1}}{stop}'
    text = text.replace(by_number, "{% for r in messages[at + 1:] if r.role == 'tool' %}")
    if stop == "<|im_end|>":
        assert trained(text, messages, 1) == f'f{{"a": 1}}{stop}'


def test_a_header_s_token_that_ends_the_turn_is_trained_where_all_headers_begin_with_it() -> None:
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '\\n' }}{% endfor %}"
        + PROMPT
    )
    assert trained(text, FOUR, 1) == "t1\n<|im_start|>"
    assert trained(text, FOUR, 3) == "t3"


ONE_TURN = chatml(f"('' if before == 'assistant' else {USUAL})").replace(
    "~ '<|im_end|>'", "~ ('' if not loop.last and loop.nextitem.role == 'assistant' else '<|im_end|>')"
)


def test_answers_that_are_written_as_one_turn_have_one_header_and_one_end() -> None:
    messages = [say(U, "t0"), say(A, "t1"), say(A, "t2"), say(U, "t3"), say(A, "t4")]
    assert [trained(ONE_TURN, messages, n) for n in (1, 2, 4)] == ["t1", "t2<|im_end|>", "t4<|im_end|>"]
    closed = chatml(f"('' if before == 'assistant' else {USUAL})")
    with pytest.raises(RowFault, match="known header"):
        trained(closed, messages, 2)


def test_a_message_that_says_nothing_is_not_trained() -> None:
    template = ChatTemplate(PLAIN, {})
    messages = [say(U, "t0"), say(A, " \n"), say(U, "t2"), say(A, "t3")]
    render = template.render(messages, None)
    finder = TurnFinder(template, TOKENS)
    (span,) = finder.spans(render, ChatExample(messages, None, (1, 3)))
    assert render.text[span.start : span.end] == "t3<|im_end|>"
    with pytest.raises(RowDropped):
        finder.spans(render, ChatExample(messages, None, (1,)))
