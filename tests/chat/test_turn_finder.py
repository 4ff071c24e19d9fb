"""What a turn must not hold, and which token it stops with where the template writes no end."""

from __future__ import annotations

from typing import Any

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.turn_spans import TurnFinder
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample

from .zoo import A, U, say

TOKENS = ("<s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|x|>")
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
QUOTES = (  # each answer quotes the first message
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{{ ' (' + messages[0].content + ')' if m.role == 'assistant' and loop.length > 2 }}{{ '<|im_end|>\\n' }}{% endfor %}"
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
    finder = TurnFinder(template, TOKENS, {"bos_token": "<s>"}, stops)
    render = template.render(messages, None)
    spans = finder.turn(render, ChatExample(messages, None, (place,)), place)
    return "".join(render.text[span.start : span.end] for span in spans)


@pytest.mark.parametrize(
    ("first", "answer", "between", "fine"),
    [
        ("a text of 12", "no", 1, False),
        ("text of 11.", "no", 1, True),  # a short text may stand anywhere
        ("a text of 12", "You said: a text of 12", 1, True),
        ("a text of 12", "no", 7, False),
        ("a text of 12", "no", 9, True),  # too far away to be looked for
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
