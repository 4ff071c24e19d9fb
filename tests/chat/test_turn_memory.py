"""Spans that are remembered are those that are found, whatever a row says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.chat.render import turn_memory
from raysvc.chat.render.renderer import Renderer
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.turn_memory import TurnMemory
from raysvc.chat.render.turn_spans import TurnFinder
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

TEMPLATES = ["chatml_default_system", "llama3_trimming", "merges_tools", "qwen3_like", "strips_think"]
TEMPLATES += ["deferred_tool_end", "no_last_eot", "prompt_opens_think", "plain_words", "generation_marks"]
TEMPLATES += ["must_alternate"]
WORDS = ["San Francisco, CA", "f", "a", "assistant", "\n", " ", "é", '{"a": "San Francisco, CA"}', "name"]
TRICKS = [
    "<",
    "<|",
    "<|im_end|>",
    "|im_end|>",
    "</think>",
    "<think>",
    "<|im_start|>assistant\n",
    "<tool_call>",
    ">",
]
said = st.lists(st.sampled_from(WORDS * 3 + TRICKS), max_size=4).map("".join)
arguments = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3) | said, max_size=2)
call = st.builds(
    lambda name, given: {"type": "function", "function": {"name": name, "arguments": given}},
    st.sampled_from(["f", "name", "arguments"]),
    arguments,
)


@st.composite
def conversation(draw: Any) -> tuple[ChatExample, bool]:
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(said)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(said)}
        if draw(st.booleans()):
            answer["tool_calls"] = draw(st.lists(call, min_size=1, max_size=2))
            messages += [answer, {"role": "tool", "content": draw(said)}]
            answer = {"role": "assistant", "content": draw(said)}
        if draw(st.integers(0, 4)) == 0:
            answer["reasoning_content"] = draw(said)
        messages.append(answer)
    trained = tuple(place for place, message in enumerate(messages) if message["role"] == "assistant")
    tools = [{"type": "function", "function": {"name": "f"}}] if draw(st.booleans()) else None
    return ChatExample(messages, tools, trained, has_calls=True), tools is not None


@pytest.fixture(scope="module")
def preparers(tokenizer_folder: Any) -> Any:
    made: dict[str, Renderer] = {}

    def renderer(name: str) -> Renderer:
        if name not in made:
            made[name] = Renderer(LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(name))))
        return made[name]

    return renderer


def outcome(find: Any, render: Any, example: ChatExample) -> Any:
    try:
        return find(render, example)
    except (RowFault, RowDropped) as why:
        return repr(why)


@pytest.mark.parametrize("name", TEMPLATES)
@given(row=conversation())
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
def test_remembered_spans_are_those_that_are_found(name: str, preparers: Any, row: Any) -> None:
    template, finder, memory = preparers(name)._template(row[1])
    try:
        render = template.render(row[0].messages, row[0].tools)
    except RowFault:
        return
    assert outcome(memory.spans, render, row[0]) == outcome(finder.spans, render, row[0])


def chat(asked: str, answered: str) -> ChatExample:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return ChatExample(messages, None, (1,))


@pytest.mark.parametrize("name", ["chatml_default_system", "must_alternate"])
def test_turns_that_are_built_alike_are_found_once(
    name: str, preparers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, finder, memory = preparers(name)._template(False)
    memory.spans(template.render(chat("one", "first").messages, None), chat("one", "first"))
    found = []
    real = finder.turn
    monkeypatch.setattr(finder, "turn", lambda *args: found.append(args) or real(*args))
    for text in ("second", "1 < 2", "x\n\ny"):
        memory.spans(template.render(chat("two", text).messages, None), chat("two", text))
    assert not found
    example = chat("three", "ends with <")
    memory.spans(template.render(example.messages, None), example)
    assert len(found) == 1


def calling(place: str, echo: str, says: str = "") -> ChatExample:
    function = {"name": "f", "arguments": {"city": place}}
    call = {"type": "function", "function": function}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": says, "tool_calls": [call]},
        {"role": "tool", "content": echo},
        {"role": "assistant", "content": "there"},
    ]
    return ChatExample(messages, None, (1, 3), has_calls=True)


def test_a_result_that_echoes_its_call_is_looked_at_closely(preparers: Any) -> None:
    template, finder, memory = preparers("merges_tools")._template(False)
    for place, echo in (("Oslo", "fine"), ("San Jose", "fine"), ("San Jose", '{"city": "San Jose"}')):
        example = calling(place, echo)
        render = template.render(example.messages, None)
        assert outcome(memory.spans, render, example) == outcome(finder.spans, render, example)


OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
HEADS = (  # of an answer; the generation prompt is the same
    f"'{OPEN}assistant\\n'",
    f"'{OPEN}assistant' ~ (' with' if tools else '') ~ '\\n'",
    f"'' if before == 'tool' else '{OPEN}assistant\\n'",
    f"'{OPEN}' ~ before ~ ' to assistant\\n'",
    "'### A: '",
)
CALLS = (
    "'<tool_call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) ~ '</tool_call>'",
    "' ' ~ call.function.name ~ '(' ~ (call.function.arguments | tojson) ~ ')<'",
    "call.function.arguments | tojson ~ call.function.name",
)
ENDS = (
    f"'{CLOSE}\\n'",
    f"'' if loop.last else '{CLOSE}\\n'",
    f"'{CLOSE}\\n' ~ ('<|eot|>' if loop.last else '')",
    f"' END{CLOSE}' ~ (' of all' if loop.last else '\\n')",
    f"('' if message.content else ' so') ~ '{CLOSE}'",
)
QUOTES = (
    "''",
    "loop.previtem.content if not loop.first else ''",
    "loop.nextitem.content if not loop.last else ''",
    "'|' ~ messages[0].content",
)
BEHIND = (
    "",
    "{% for message in messages %}{{ message.role }}{% endfor %}",  # a message owns two stretches
    "{% for message in messages %}{{ '' if loop.last else message.content[:13] }}{% endfor %}",
)
TOKENS = (OPEN, CLOSE, "<|eot|>", "<tool_call>", "</tool_call>")


@lru_cache(maxsize=64)
def composed(head: str, call_: str, end: str, quote: str, behind: str, quoted_first: bool) -> Any:
    """A template put together from what templates write around an answer, its finder, and a memory."""
    says = (
        "{{ message.content }}"
        + f"{{% for call in message.tool_calls or [] %}}{{{{ {call_} }}}}{{% endfor %}}"
    )
    quotes = f"{{{{ {quote} }}}}"
    answer = f"{{{{ {head} }}}}" + (quotes + says if quoted_first else says + quotes) + f"{{{{ {end} }}}}"
    other = f"{{{{ '{OPEN}' ~ message.role ~ '\\n' ~ message.content ~ '{CLOSE}\\n' }}}}"
    text = (
        "{% for message in messages %}{% set before = '' if loop.first else loop.previtem.role %}"
        f"{{% if message.role == 'assistant' %}}{answer}{{% else %}}{other}{{% endif %}}{{% endfor %}}"
        f"{behind}"
        "{% if add_generation_prompt %}{% set before = messages[-1].role %}"
        f"{{{{ {head} }}}}{{% endif %}}"
    )
    template = ChatTemplate(text, {})
    finder = TurnFinder(template, TOKENS, {"eos_token": "<|eot|>"})
    return template, finder, TurnMemory(finder)


parts = st.tuples(*map(st.sampled_from, (HEADS, CALLS, ENDS, QUOTES, BEHIND)), st.booleans())


@given(built=parts, rows=st.lists(conversation(), min_size=2, max_size=5))
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_whatever_a_template_writes_around_turns_remembered_spans_are_those_that_are_found(
    built: tuple[Any, ...], rows: list[Any]
) -> None:
    template, finder, memory = composed(*built)
    for example, _ in [*rows, *rows]:
        try:
            render = template.render(example.messages, example.tools)
        except RowFault:
            continue
        assert outcome(memory.spans, render, example) == outcome(finder.spans, render, example)


@pytest.mark.parametrize("call_", CALLS[:2])
@pytest.mark.parametrize("head", HEADS)
def test_calls_that_are_built_alike_are_found_once(
    head: str, call_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, finder, _ = composed(head, call_, ENDS[0], QUOTES[0], BEHIND[0], False)
    memory, found = TurnMemory(finder), []
    real = finder.turn
    monkeypatch.setattr(finder, "turn", lambda *args: found.append(args[2]) or real(*args))
    for place, result in (("Oslo", "so"), ("Bergen", ""), ("Rome", "and so")):
        example = calling(place, result, f"I look at {place}.")
        memory.spans(template.render(example.messages, example.tools), example)
    assert found in (
        [1, 3],
        [1, 3, 3, 3],
    )  # an answer that follows a result without a header has no beginning of its own


def test_no_more_turns_are_remembered_than_the_limit(preparers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template, finder, _ = preparers("chatml_default_system")._template(False)
    monkeypatch.setattr(turn_memory, "MAX_KINDS", 0)
    memory, example = TurnMemory(finder), chat("one", "two")
    render = template.render(example.messages, None)
    assert memory.spans(render, example) == memory.spans(render, example) == finder.spans(render, example)
    assert not memory._known


LONGER_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nWell' }}{% endif %}"
)


def test_an_answer_that_goes_on_with_its_head_is_looked_at_closely() -> None:
    template = ChatTemplate(LONGER_PROMPT, {})
    finder = TurnFinder(template, TOKENS, {"eos_token": "<|eot|>"})
    memory = TurnMemory(finder)
    for said in ("No.", "No way.", "Well then"):
        example = chat("one", said)
        render = template.render(example.messages, None)
        assert outcome(memory.spans, render, example) == outcome(finder.spans, render, example)
