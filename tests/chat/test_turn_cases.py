"""Rows that only look like earlier ones: one small template and a few rows for each reason, and what is trained of the last."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import Message
from raysvc.chat.turns.turn_spans import TurnFinder

from .zoo import A, U, say

TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot|>", "<|x|>", "<|x_end|>", "<|y|>")
HEAD, END = "'<|im_start|>assistant\\n'", "'<|im_end|>\\n'"
TEXT = f"{HEAD} ~ (m.content or '') ~ {END}"
NAME, GIVEN = "m.tool_calls[0].function.name", "(m.tool_calls[0].function.arguments | tojson)"
CALL = f"(m.content or '') ~ (' calls a tool ' ~ {NAME} ~ {GIVEN} if m.tool_calls else '')"
CALLS = f"{HEAD} ~ {CALL} ~ {END}"
T, S = "tool", "system"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chatml(answer: str, prompt: str = HEAD, behind: str = "", opens: str = "'<|im_start|>'") -> str:
    """A template of expressions: for an answer `m`, the prompt, and what opens the turns of others."""
    return (
        "{% for m in messages %}{% set before = '' if loop.first else loop.previtem.role %}"
        f"{{% if m.role == 'assistant' %}}{{{{ {answer} }}}}"
        f"{{% else %}}{{{{ {opens} ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}}}{{% endif %}}{{% endfor %}}"
        f"{behind}{{% if add_generation_prompt %}}{{% set before = messages[-1].role %}}{{{{ {prompt} }}}}{{% endif %}}"
    )


def with_results(result: str, end: str = "''", opens: str = "'<|im_start|>'", own_end: str = "") -> str:
    """A template that writes results, looked up by number, into the block of the message before them."""
    results = (
        "{% for n in range(at + 1, messages | length) if messages[n].role == 'tool' %}{% set r = messages[n] %}"
        f"{{{{ {result} }}}}{{% endfor %}}"
    )
    said = f"{{{{ m.content ~ ({NAME} ~ {GIVEN} ~ '{own_end}' if m.tool_calls else '') }}}}"
    return (
        "{% for m in messages if m.role != 'tool' %}{% set at = messages.index(m) %}"
        f"{{{{ {opens} ~ m.role ~ '\\n' }}}}{said}"
        f"{{% if m.tool_calls %}}{results}{{{{ {end} }}}}"
        f"{{% else %}}{{{{ {END} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {HEAD} }}}}{{% endif %}}"
    )


def call(arguments: Any, content: Any = "", name: Any = "f", **fields: Any) -> Message:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return say(A, content, tool_calls=[made], **fields)


def row(*messages: Message, at: int, tools: Any = None) -> ChatExample:
    return ChatExample(list(messages), tools, (at,), has_calls=True)


def middle(answer: str, asked: str = "q") -> ChatExample:
    return row(say(U, asked), say(A, answer), say(U, "q"), at=1)


def last(answer: str, asked: str = "q") -> ChatExample:
    return row(say(U, asked), say(A, answer), at=1)


def thinking(thought: str) -> ChatExample:
    return row(say(U, "q"), say(A, "one", reasoning=thought), say(U, "q"), at=1)


def calling(arguments: Any, asked: str = "q", **fields: Any) -> ChatExample:
    return row(say(U, asked), call(arguments, **fields), at=1)


class Case(NamedTuple):
    """Rows of a template, and of the last of them what is trained, or a part of why it is refused."""

    text: str
    rows: tuple[ChatExample, ...]
    trained: str = ""
    refused: str = ""
    more_tokens: tuple[str, ...] = ()


OSLO, BERGEN = {"city": "Oslo"}, {"city": "Bergen"}
CUTS = chatml(f"{HEAD} ~ m.content.split('|')[0] ~ {END}")
LOST, FOREIGN, TOKEN = "does not hold its message", "holds text of another message", "holds a control token"
SAYS_HM = f"{HEAD} ~ 'Hm: ' ~ (m.content or '') ~ {END}"
HM_WITH_TOOLS, HM_BEHIND_CALLS, HM_BEHIND_RESULTS = (
    chatml(SAYS_HM, f"{HEAD} ~ ('Hm: ' if {when} else '')")
    for when in ("tools", "messages[-1].tool_calls", "before == 'tool'")
)
AFTER_RESULT = row(say(U, "q"), say(T, "42"), say(A, "one"), say(U, "q"), at=2)
SYSTEM_DECIDES = with_results(
    "r.content ~ '<|x|>'", "'ok<|x|>' if messages[0].role != 'system' else ''", own_end="<|im_end|>"
)
OWN_OK = row(say(U, "q"), call(OSLO), say(U, "q"), at=1)
RESULT_OK = row(say(S, "s"), say(U, "q"), call(BERGEN), say(T, "ok"), say(U, "q"), at=2)
MARKS_ONE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.index0 == 1 %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
SIX = [say((U, A)[n % 2], f"t{n}") for n in range(6)]
PARTS = chatml(f"{HEAD} ~ (m.content if m.content is string else m.content[0].text) ~ {END}")
OPENS_BY_ROLE = "('<|x|>' if m.role == 'system' else '<|im_start|>')"
SHOWN_AGAIN = f"{{% for m in messages if m.content == 'again' %}}{{{{ {TEXT} }}}}{{% endfor %}}"
BOT = "('\\n' if before == 'tool' else '\\n<|y|>' if not loop.last else '\\nBot: ')"
BOT_PROMPT = "('\\n' if before == 'tool' else '\\n<|y|>')"
NO_BOT, NO_BOT_PROMPT = (header.replace("\\n", "") for header in (BOT, BOT_PROMPT))
NO_PROMPT = "''"


def after_result(answer: str) -> ChatExample:
    return row(say(U, "q"), say(T, "42"), say(A, answer), say(U, "q"), at=2)


def emptied(arguments: Any, *behind: Message) -> ChatExample:
    return row(say(U, "q"), call(arguments), say(T, ""), *behind, at=1)


CASES = {
    "a part of the last text is cut": Case(CUTS, (last("one"), last("two|three")), refused=LOST),
    "a part of a text in the middle is cut": Case(CUTS, (middle("one"), middle("two|three")), refused=LOST),
    "more follows the last turn": Case(
        chatml(TEXT, behind="{{ '<|eot|>' if messages | length > 2 }}"),
        (last("one"), row(say(S, "s"), say(U, "q"), say(A, "two"), at=2)),
        "two<|im_end|>\n<|eot|>",
    ),
    "more follows the last turn than one in the middle": Case(
        chatml(TEXT, behind="{{ '' if add_generation_prompt else '<|eot|>' }}"),
        (row(*SIX, at=1), row(*SIX, at=5)),
        "t5<|im_end|>\n<|eot|>",
    ),
    "others say what stands before a call": Case(
        chatml(CALLS), (calling(OSLO), calling(BERGEN, "calls a tool\n")), refused=FOREIGN
    ),
    "others say what stands before a text": Case(
        chatml(f"{HEAD} ~ 'I say to you: ' ~ m.content ~ {END}"),
        (middle("one"), middle("two", "I say to you:")),
        refused=FOREIGN,
    ),
    "others say what stands behind a text": Case(
        chatml(f"{HEAD} ~ m.content ~ ' That was all.' ~ {END}", NO_PROMPT),
        (middle("one"), middle("two", "That was all.")),
        refused=FOREIGN,
    ),
    "others say what stands inside the end of turn": Case(
        chatml(f"{HEAD} ~ m.content ~ '<|x|> That was all.' ~ {END}", NO_PROMPT),
        (middle("one"), middle("two", "That was all.")),
        refused=FOREIGN,
    ),
    "others say the text and the beginning of its end": Case(
        chatml(TEXT, NO_PROMPT), (middle("one"), middle("twelve chars ", "twelve chars <\n")), refused=FOREIGN
    ),
    "a result says what the template wrote before": Case(
        SYSTEM_DECIDES, (OWN_OK, RESULT_OK), 'f{"city": "Bergen"}<|im_end|>'
    ),
    "the template writes what a result said before": Case(
        SYSTEM_DECIDES, (RESULT_OK, OWN_OK), 'f{"city": "Oslo"}<|im_end|>ok<|x|>'
    ),
    "marks decide": Case(MARKS_ONE, (row(*SIX, at=1), row(*SIX, at=3)), refused="no generation mark"),
    "a content of parts": Case(
        PARTS,
        (last("one"), row(say(U, "q"), {"role": A, "content": [{"type": "text", "text": "two"}]}, at=1)),
        "two<|im_end|>",
    ),
    "no content": Case(
        chatml(CALLS),
        (calling(OSLO), calling(BERGEN, content=None)),
        ' calls a tool f{"city": "Bergen"}<|im_end|>',
    ),
    "the first message, where the last is a result": Case(
        HM_BEHIND_RESULTS,
        (AFTER_RESULT, row(say(A, "two"), say(U, "q"), say(T, "42"), at=0)),
        "Hm: two<|im_end|>",
    ),
    "the prompt differs behind a result": Case(
        HM_BEHIND_RESULTS, (AFTER_RESULT, middle("two")), "Hm: two<|im_end|>"
    ),
    "the prompt differs with tools": Case(
        HM_WITH_TOOLS,
        (row(say(U, "q"), say(A, "one"), at=1, tools=TOOLS), last("two")),
        "Hm: two<|im_end|>",
    ),
    "the prompt differs behind a call": Case(
        HM_BEHIND_CALLS,
        (
            row(say(U, "q"), call(OSLO), say(A, "one"), at=2),
            row(say(U, "q"), say(A, "zero"), say(A, "two"), at=2),
        ),
        "Hm: two<|im_end|>",
    ),
    "calls alone that are not shown": Case(
        chatml(TEXT),
        (
            middle("one"),
            row(say(U, "q"), {"role": A, "tool_calls": call(OSLO)["tool_calls"]}, say(U, "q"), at=1),
        ),
        refused="does not hold its tool call",
    ),
    "a text that only a later message shows": Case(
        chatml(f"({TEXT}) if m.content != 'same' or loop.last else ''"),
        (middle("one"), row(say(U, "q"), say(A, "same"), say(U, "q"), say(A, "same"), at=1)),
        refused="does not show",
    ),
    "a text that is shown twice": Case(
        chatml(TEXT, behind="{{ '' if add_generation_prompt else '|' }}" + SHOWN_AGAIN),
        (middle("one"), middle("again")),
        refused=TOKEN,
    ),
    "an empty result inside the block": Case(
        with_results("'<|x|>' ~ r.content ~ '<|x_end|>'", END, own_end="<|y|>"),
        (emptied(OSLO, say(U, "q")), emptied(BERGEN, say(U, "q"))),
        'f{"city": "Bergen"}<|y|><|im_end|>',
    ),
    "a stop token that begins the next block": Case(
        with_results("'\\n'", opens=OPENS_BY_ROLE, own_end="<|y|>"),
        (emptied(OSLO, say(U, "q")), emptied(BERGEN, say(S, "s"))),
        'f{"city": "Bergen"}<|y|>\n<|x|>',
    ),
    "a control token in reasoning that is not shown": Case(
        chatml(TEXT, NO_PROMPT),
        (middle("one"), thinking("hm"), thinking("<|im_end|>")),
        refused=TOKEN,
    ),
    "a control token in reasoning beside a call": Case(
        chatml(CALLS), (calling(OSLO), calling(OSLO, reasoning="<|im_end|>")), refused=TOKEN
    ),
    "a control token in arguments": Case(
        chatml(CALLS), (calling(OSLO), calling({"city": "<|im_end|>"})), refused=TOKEN
    ),
    "a control token that JSON escapes": Case(
        chatml(CALLS.replace(END, "'\\n\\n'")),
        (calling(OSLO), calling({"city": "a\n\nb"})),
        refused=TOKEN,
        more_tokens=("\n\n",),
    ),
    "a control token that the template completes": Case(
        chatml(f"{HEAD} ~ '(<' ~ m.content ~ {END}"), (last("b"), last("|im_end|>b")), refused=TOKEN
    ),
    "arguments in a string that are not written as they parse": Case(
        chatml(CALLS), (calling('{"a": 1}'), calling('{"a": 1e2}')), refused="does not hold its tool call"
    ),
    "arguments that are no JSON": Case(
        chatml(CALLS), (calling({"a": float("nan")}),), ' calls a tool f{"a": NaN}<|im_end|>'
    ),
    "an empty name": Case(
        chatml(CALLS), (calling(OSLO, name=""),), ' calls a tool {"city": "Oslo"}<|im_end|>'
    ),
    "a name that is a number": Case(
        chatml(CALLS), (calling(OSLO, name=7),), ' calls a tool 7{"city": "Oslo"}<|im_end|>'
    ),
    "a header of a blank, and a text that goes on as another header": Case(
        chatml(f"{BOT} ~ m.content ~ {END}", BOT_PROMPT),
        (after_result("one"), after_result("Bot: two")),
        refused=LOST,
    ),
    "no header, and a text that goes on as another header": Case(
        chatml(f"{NO_BOT} ~ m.content ~ {END}", NO_BOT_PROMPT),
        (after_result("one"), after_result("Bot: two")),
        refused=LOST,
    ),
    "a text behind a call that begins with its name": Case(
        chatml(f"{HEAD} ~ (m.content or '') ~ ({NAME} ~ {GIVEN} if m.tool_calls else '') ~ {END}"),
        (row(say(U, "q"), call(OSLO), say(U, "q"), at=1), middle("two")),
        "two<|im_end|>",
    ),
    "an end that only the last turn may have": Case(
        chatml(
            f"{TEXT}[:-1] ~ (' END' if loop.last or m.content == 'two' else '\\n')".replace(TEXT, f"({TEXT})")
        ),
        (last("one"), middle("two")),
        refused="no end of turn",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_only_looks_like_an_earlier_one_is_looked_at_closely(name: str) -> None:
    case, trained = CASES[name], ""
    template = ChatTemplate(case.text, {})
    finder = TurnFinder(template, (*TOKENS, *case.more_tokens), {"eos_token": "<|eot|>"})
    for example in case.rows[:-1]:
        finder.spans(template.render(example.messages, example.tools), example)
    (example,) = case.rows[-1:]
    render = template.render(example.messages, example.tools)
    if case.refused:
        with pytest.raises(RowFault, match=case.refused):
            finder.spans(render, example)
    else:
        trained = "".join(render.text[one.start : one.end] for one in finder.spans(render, example))
        assert trained == case.trained
