"""Spans that are remembered are those that are found, whatever a row says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.chat.render.renderer import Renderer
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
@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
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


def calling(place: str, echo: str) -> ChatExample:
    function = {"name": "f", "arguments": {"city": place}}
    call = {"type": "function", "function": function}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
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
