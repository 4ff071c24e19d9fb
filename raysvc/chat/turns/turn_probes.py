"""Conversations that show what a template writes around and inside of an assistant's turns."""

from __future__ import annotations

from raysvc.chat.source.messages import Message
from raysvc.chat.source.template_fit import PROBE_TOOL

QUIET = "Seven quiet words that nobody ever writes"
ASKED = "Five odd words nobody asks"


def say(role: str, content: str, **fields: object) -> Message:
    """One message."""
    return {"role": role, "content": content, **fields}


_CALL = {"type": "function", "id": "callid001", "function": {"name": "f", "arguments": {"a": "b"}}}
_TEXT_CALL = {"type": "function", "id": "callid001", "function": {"name": "f", "arguments": '{"a": "b"}'}}
_RESULT = say("tool", "c", name="f", tool_call_id="callid001")
_THOUGHT = {"reasoning_content": "c d", "thinking": "c d", "reasoning": "c d"}
PROBES: list[tuple[list[Message], list[object] | None]] = [
    ([say("user", ASKED), say("assistant", "b"), say("user", ASKED[::-1]), say("assistant", "d")], None),
    ([say("user", "a"), say("assistant", "b", **_THOUGHT)], None),
    ([say("user", "a"), say("assistant", "", tool_calls=[_CALL]), _RESULT], [PROBE_TOOL]),
    ([say("user", "a"), say("assistant", "", tool_calls=[_CALL], **_THOUGHT), _RESULT], [PROBE_TOOL]),
    (
        [say("user", "a"), say("assistant", "", tool_calls=[_CALL]), _RESULT, say("assistant", "d")],
        [PROBE_TOOL],
    ),
    (
        [
            say("user", "a"),
            say("assistant", "", tool_calls=[_CALL]),
            _RESULT,
            say("assistant", "", tool_calls=[_CALL], **_THOUGHT),
            _RESULT,
        ],
        [PROBE_TOOL],
    ),
    ([say("user", "a"), say("assistant", "", tool_calls=[_TEXT_CALL]), _RESULT], [PROBE_TOOL]),
    ([say("user", "a"), say("assistant", "", tool_calls=[_CALL])], [PROBE_TOOL]),
]
