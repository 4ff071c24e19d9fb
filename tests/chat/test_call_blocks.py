"""Calls and results in Anthropic's form give the ids of the same conversation in OpenAI's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import MessageReader

TEMPLATE = "merges_tools"
Message = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ASKED = {"role": "user", "content": "weather in Oslo and Rome?"}
USES = [
    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
    {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}, "cache_control": {"type": "x"}},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
    {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "sun"}]},
]
ROW: dict[str, Any] = {
    "messages": [
        ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *USES]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Here:"}, *RESULTS, {"type": "text", "text": "And now?"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Rain and sun."}]},
    ],
    "tools": [{"name": "get_weather", "description": "d", "input_schema": SCHEMA}],
}


def call(number: int, arguments: Message) -> Message:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"toolu_{number}", "type": "function", "function": function}


NORMAL: dict[str, Any] = {
    "messages": [
        ASKED,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call(1, {"city": "Oslo"}), call(2, {})],
        },
        {"role": "user", "content": "Here:"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "sun"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Rain and sun."},
    ],
    "tools": [
        {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
    ],
}


def test_blocks_give_the_ids_of_calls_and_messages_of_tools(slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer, before = slice_tokenizer(TEMPLATE), copy.deepcopy(ROW)
    made, result = tokenize(tokenizer, ROW, {**ROW, "messages": NORMAL["messages"]})
    expected = tokenizer.tokenizer.hf.apply_chat_template(
        NORMAL["messages"], tools=NORMAL["tools"], return_dict=False
    )
    assert [one.ids for one in made] == [expected] * 2
    assert ["get_weather" in one.trained[0] and "I look." in one.trained[0] for one in made] == [True] * 2
    assert (
        result.row_counts.normalized["tool_use and tool_result parts made calls and messages of tools"] == 1
    )
    assert result.row_counts.normalized["bare tool declarations wrapped as functions"] == 2
    assert before == ROW


@pytest.mark.parametrize(
    ("parts", "content", "extra"),
    [
        (USES[:1], "", {}),
        (
            [{"type": "thinking", "thinking": "hm", "signature": "s"}, *USES[:1]],
            "",
            {"reasoning_content": "hm"},
        ),
    ],
)
def test_a_message_of_calls_has_no_words(parts: list[Message], content: str, extra: Message) -> None:
    found = MessageReader().read([ASKED, {"role": "assistant", "content": parts}], "messages", set())
    last = found.messages[-1]
    assert last["tool_calls"] == [call(1, {"city": "Oslo"})]
    assert (last["content"], found.has_calls) == (content, True)
    assert last.items() >= extra.items()


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}])
def test_a_result_without_words_is_empty_and_keeps_whether_it_is_an_error(said: Message) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, **said}
    found = MessageReader().read([ASKED, {"role": "human", "content": [result], "at": 5}], "messages", set())
    tool = {"role": "tool", "content": "", "tool_call_id": "t", "is_error": True, "at": 5}
    assert found.messages == [ASKED, tool]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"role": "assistant", "content": [*USES, {"type": "text", "text": "so"}]},
            "a message goes on behind its tool_use parts",
        ),
        (
            {"role": "assistant", "content": USES, "tool_calls": [call(1, {})]},
            "a message has both tool_calls and tool_use parts",
        ),
        ({"role": "user", "content": USES}, "a tool_use part in a message that is not the assistant's"),
        ({"role": "assistant", "content": RESULTS}, "a tool_result part in a message that is not the user's"),
        (
            {"role": "user", "content": [{**RESULTS[0], "score": 1}]},
            "a tool_result part has keys that have no place",
        ),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, "a tool call has no name"),
        (
            {"role": "user", "content": [{**RESULTS[0], "content": [{"type": "document"}]}]},
            "a content part is not text",
        ),
        ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "a content part is not text"),
    ],
)
def test_what_has_no_place_in_the_normal_form_is_refused_by_name(message: Message, reason: str) -> None:
    with pytest.raises(RowFault) as caught:
        MessageReader().read([ASKED, message], "messages", set())
    assert caught.value.reason == reason
