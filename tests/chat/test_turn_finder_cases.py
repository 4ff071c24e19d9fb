"""Where turns begin and end: one small template for each rule, and what is trained of one message."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import Message
from raysvc.chat.turns.turn_spans import TurnFinder

from .test_turn_finder import CALL, FOUR, OTHER, PROMPT, TOKENS, USUAL, chatml, no_end, trained
from .zoo import A, U, say

CALLED = [say(U, "t0"), say(A, "", tool_calls=[CALL]), say("tool", "t2"), say(U, "t3"), say(A, "t4")]
BEHIND_SYSTEM = [say(U, "t0"), say("system", "now"), say(A, "t1")]
LAST_OPEN = chatml(USUAL).replace("~ '<|im_end|>'", "~ ('' if loop.last else '<|im_end|>')")
NO_PROMPT = ""


def unless_asked(text: str) -> str:
    return f"{{{{ '' if add_generation_prompt else '{text}' }}}}"


def marked(
    header: str, inside: str = "m.content", behind: str = "'<|im_end|>\\n'", prompt: str = PROMPT
) -> str:
    """A template with marks; expressions for the assistant's header, and what is inside and behind its marks."""
    return (
        "{% for m in messages %}{% set before = '' if loop.first else loop.previtem.role %}{% if m.role == 'assistant' %}"
        f"{{{{ {header} }}}}{{% generation %}}{{{{ {inside} }}}}{{% endgeneration %}}{{{{ {behind} }}}}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        + prompt
    )


def header_before(opening: str, prompt: str) -> str:
    """A template that writes the header of an answer with the message before it; all answers begin alike."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '</think>' + m.content + '<|im_end|>' }}"
        f"{{% else %}}{{{{ '<|user|>' + m.content }}}}{{% if not loop.last %}}{{{{ '{opening}' }}}}{{% endif %}}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


BY_NUMBER = (
    "{% for n in range(at + 1, messages | length) if messages[n].role == 'tool' %}{% set r = messages[n] %}"
)


def with_results(shown: str, result: str, others: str = "false") -> str:
    """A template that writes results into the block of their call; expressions: which messages it shows, a result, which results are messages."""
    return (
        "{% for m in messages %}{% set at = loop.index0 %}"
        f"{{% if (m.role != 'tool' or ({others})) and ({shown}) %}}{{{{ '<|im_start|>' + m.role + '\\n' + m.content }}}}"
        "{% if m.tool_calls %}{{ 'f' ~ (m.tool_calls[0].function.arguments | tojson) ~ '<|im_end|>' }}"
        f"{BY_NUMBER}{{{{ {result} }}}}{{% endfor %}}"
        "{% else %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}" + PROMPT
    )


class Case(NamedTuple):
    """A template, messages, and what is trained of one of them."""

    text: str
    messages: list[Message]
    place: int
    trained: str


SHOWS_CALL = "'<|y|>f' ~ (m.tool_calls[0].function.arguments | tojson)"
GIVEN = 'f{"a": 1}<|im_end|>'
TWICE = "{% for m in messages if m.content == 'again' %}{{ 'again<|x|>' }}{% endfor %}"
SHOWN_TWICE = "{% for m in messages if m.role == 'assistant' %}{{ m.content + '<|x|>' }}{% endfor %}"
CASES = {
    "only turns in the middle have an end: the first": Case(LAST_OPEN, FOUR, 1, "t1<|im_end|>"),
    "only turns in the middle have an end: the last": Case(LAST_OPEN, FOUR, 3, "t3"),
    "only turns in the middle have an end: one with no calls in a list": Case(
        LAST_OPEN, [FOUR[0], {**FOUR[1], "tool_calls": []}, *FOUR[2:]], 1, "t1<|im_end|>"
    ),
    "no header, and a token that stands inside of turns": Case(
        chatml(f"('' if before == 'tool' else {USUAL})", "").replace(
            "m.content", f"m.content ~ ({SHOWS_CALL} if m.tool_calls else '') ~ '<|im_end|>'", 1
        ),
        [*CALLED[:3], CALLED[1]],
        3,
        '<|y|>f{"a": 1}<|im_end|>',
    ),
    "an end of sequence behind the usual turn": Case(
        chatml(USUAL, behind=unless_asked("</s>")), FOUR, 3, "t3<|im_end|></s>"
    ),
    "two ends of sequence, of which the first ends the turn": Case(
        chatml(USUAL, behind=unless_asked("</s></s>")), FOUR, 3, "t3<|im_end|></s>"
    ),
    "an end of sequence behind an empty message": Case(
        chatml(USUAL, prompt=NO_PROMPT, behind="</s>").replace(
            "'<|im_start|>' + m.role + '\\n'", "'<|user|>'"
        ),
        [*FOUR[:2], say(U, "")],
        1,
        "t1<|im_end|>",
    ),
    "a text that is shown twice, and a result that is not shown": Case(
        chatml(USUAL, behind=SHOWN_TWICE).replace("{% else %}", "{% elif m.role != 'tool' %}"),
        [say(U, "t0"), say(A, "t1"), say("tool", "t2"), say(U, "t3")],
        1,
        "t1<|im_end|>t1<|x|>",
    ),
    "a prompt of blanks that the turn begins with": Case(
        chatml("' \\n'", prompt="{% if add_generation_prompt %}{{ ' \\n' }}{% endif %}"),
        FOUR,
        1,
        " \nt1<|im_end|>",
    ),
    "a header before the block that ends with a tag of the prompt": Case(
        header_before("<|assistant|><hm>", "<|assistant|><hm>"), FOUR, 1, "</think>t1<|im_end|>"
    ),
    "a header before the block that ends with a tag that the template closes": Case(
        header_before("<|assistant|><think>", "<|assistant|>"), FOUR, 1, "</think>t1<|im_end|>"
    ),
    "a header before the block, and a blank": Case(
        header_before("<|assistant|>\\n", "<|assistant|>\\n"), FOUR, 1, "</think>t1<|im_end|>"
    ),
    "a header of words, and none where a turn goes on": Case(
        chatml("('Bot: ' if before == 'user' else '')").replace(
            "{{ '<|im_start|>assistant\\n' }}", "{{ 'Bot: ' if messages[-1].role == 'user' else '' }}"
        ),
        [say(U, "t0"), say("tool", "t1"), say(A, "t2")],
        2,
        "t2<|im_end|>",
    ),
    "a token that begins a sequence inside a turn without an end": Case(
        no_end("").replace("m.content }}", "m.content + ('<|x|><s>' if m.content == 'bos' else '') }}"),
        [say(U, "t0"), say(A, "bos"), say(U, "t2")],
        1,
        "bos<|x|>",
    ),
    "marks behind a header that is not known": Case(
        marked(OTHER, "m.content ~ '<|im_end|>'", "'\\n'"), BEHIND_SYSTEM, 2, "t1<|im_end|>"
    ),
    "marks of a turn that misses its end": Case(
        marked(USUAL, behind="'' if before == 'system' else '<|im_end|>\\n'"), BEHIND_SYSTEM, 2, "t1"
    ),
    "a mark of a header with more blanks than the prompt": Case(
        marked("''", behind="'\\n'").replace(
            "{% generation %}",
            "{% generation %}{{ '<|im_start|>assistant\\n\\n' }}{% endgeneration %}{{ '<|x|>' }}{% generation %}",
        ),
        FOUR,
        1,
        "t1",
    ),
    "marks where no turn has an end": Case(marked(USUAL, behind="''"), FOUR, 1, "t1"),
    "an end of sequence behind marks": Case(
        marked(USUAL, prompt=PROMPT + unless_asked("</s>")), FOUR, 3, "t3<|im_end|>\n</s>"
    ),
    "the first message, where the prompt of no messages is empty": Case(
        chatml(
            f"('<|x|>' if loop.first else '') ~ {USUAL}",
            prompt=PROMPT.replace("prompt %}", "prompt and messages %}"),
        ),
        [say(A, "t0"), say(U, "t1")],
        0,
        "t0<|im_end|>",
    ),
    "one exchange, without tools": Case(
        "{% if tools or messages | length > 2 %}{{ raise_exception('no') }}{% endif %}" + chatml(USUAL),
        FOUR[:2],
        1,
        "t1<|im_end|>",
    ),
    "one of two results inside the block of its call": Case(
        with_results("true", "r.content if r.content[0] == 'x' else ''", "m.content[0] != 'x'"),
        [*CALLED[:2], say("tool", "x1"), say("tool", "y2"), say(U, "t3")],
        1,
        GIVEN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_turn_begins_and_ends_where_the_rules_say(name: str) -> None:
    case = CASES[name]
    assert trained(case.text, case.messages, case.place) == case.trained


REFUSED = {
    "a call that is not shown": (
        chatml(USUAL),
        [say(U, "t0"), say(A, "t1", tool_calls=[CALL])],
        1,
        "its tool call",
    ),
    "a text that is shown twice, once as usual": (
        chatml(USUAL, behind="{{ '' if add_generation_prompt else '|' }}" + TWICE),
        [say(U, "t0"), say(A, "again"), say(U, "t2"), say(A, "t3")],
        1,
        "holds a control token",
    ),
    "a text that holds the end of calls": (
        chatml(USUAL).replace(
            "'<|im_end|>' }}{% else", "('<|x|>' if m.tool_calls else '<|im_end|>') }}{% else"
        ),
        [say(U, "t0"), say(A, "a<|x|>b")],
        1,
        "holds a control token",
    ),
    "a text that holds the first token of the end": (
        chatml(USUAL, "<|x|><|im_end|>"),
        [say(U, "t0"), say(A, "a<|x|>b")],
        1,
        "holds a control token",
    ),
    "a text that holds the token of headers": (
        chatml(USUAL),
        [say(U, "t0"), say(A, "a<|im_start|>b")],
        1,
        "holds a control token",
    ),
    "a turn that goes on behind its end": (
        chatml(USUAL).replace(
            "m.content ~", "m.content ~ ('<|im_end|> and' if before == 'system' else '') ~"
        ),
        BEHIND_SYSTEM,
        2,
        "holds a control token",
    ),
    "every text is shown twice": (
        chatml(USUAL, behind="{{ '' if add_generation_prompt else '|' }}" + SHOWN_TWICE),
        FOUR,
        1,
        "where an assistant's turn begins",
    ),
    "a text behind results that begins as they do": (
        with_results("true", "'<|x|>' ~ r.content")
        .replace(" ~ '<|im_end|>' }}", " }}")
        .replace("{% else %}", "{{ '<<|im_end|>' }}{% else %}"),
        CALLED,
        1,
        "behind the results",
    ),
    "a header alone": (
        chatml(USUAL, end="").replace(
            "m.content", "(m.content ~ '<|im_end|>' if m.content != 'gone' else '')"
        ),
        [say(U, "t0"), say(A, "gone"), say(U, "t2")],
        1,
        "no text after its header",
    ),
    "turns that are not as the probes": (
        chatml(USUAL).replace("m.content", "m.content | upper"),
        [say(U, "T0"), say(A, "T1")],
        1,
        "where an assistant's turn begins",
    ),
    "no header behind a turn that a line end follows": (
        chatml(f"('' if before == 'assistant' else {USUAL})", "<|im_end|>\n"),
        [say(U, "t0"), say(A, "t1"), say(A, "t2")],
        2,
        "known header",
    ),
    "an unknown header behind a message without an end": (
        chatml(OTHER).replace(
            "m.content + '<|im_end|>\\n'", "m.content + ('\\n' if m.role == 'system' else '<|im_end|>\\n')"
        ),
        BEHIND_SYSTEM,
        2,
        "known header",
    ),
    "a call that is shown only with its results": (
        with_results("not m.tool_calls or messages[at + 1].role == 'tool'", "r.content"),
        CALLED,
        1,
        "cannot be told apart",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_turn_that_the_rules_do_not_find_is_refused(name: str) -> None:
    text, messages, place, reason = REFUSED[name]
    with pytest.raises(RowFault, match=reason):
        trained(text, messages, place)


def test_a_tokenizer_without_an_end_of_sequence_trains_none() -> None:
    template = ChatTemplate(chatml(USUAL, behind=unless_asked("<|x|>")), {})
    render = template.render(FOUR, None)
    (span,) = TurnFinder(template, TOKENS).spans(render, ChatExample(FOUR, None, (3,)))
    assert render.text[span.start : span.end] == "t3<|im_end|>"
