"""Defines what is wrong with one conversation: its roles, calls, results, tools, and the words of a row.

Always true:
- pure: messages in normal form and the rendered text in, pairs of (name of a defect, what it is here) out;
- a call that the row ends with needs no result: it is what is trained.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from raysvc.audit.audited_row import SPEAKERS, shown
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import SYSTEM_ROLES, Message, unknown_roles

Found = tuple[str, str]


def check_messages(example: ChatExample, text: str) -> Iterator[Found]:
    """Defects of a conversation.

    Args:
        text: what its template made of it.
    """
    messages = example.messages
    yield from _roles(messages)
    yield from _results(messages)
    for place, message in enumerate(messages):
        if message["role"] in SPEAKERS and not _says(message):
            yield "empty_message", f"message {place}, of the {message['role']}"
    yield from _dropped(example, text)


def _says(message: Message) -> bool:
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return bool(
        said
        or any(message.get(name) for name in ("tool_calls", "reasoning_content", "thinking", "reasoning"))
    )


def _roles(messages: Sequence[Message]) -> Iterator[Found]:
    for role in unknown_roles(messages):
        yield "odd_role", f"role {role!r}"
    roles = [message["role"] for message in messages]
    head = next((n for n, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    if any(role in SYSTEM_ROLES for role in roles[head:]):
        place = head + next(n for n, role in enumerate(roles[head:]) if role in SYSTEM_ROLES)
        yield "odd_order", f"message {place} is of the system, behind the dialogue's first"
    for place in range(head + 1, len(roles)):
        again = roles[place] == roles[place - 1] and roles[place] in SPEAKERS
        if again and not messages[place - 1].get("tool_calls"):
            yield "odd_order", f"messages {place - 1} and {place} are both of the {roles[place]}"
            return


def _results(messages: Sequence[Message]) -> Iterator[Found]:
    """Calls without results, and results without calls."""
    open_calls: list[Any] = []
    for place, message in enumerate(messages):
        if message["role"] in ("tool", "function", "ipython"):
            wanted = message.get("tool_call_id")
            ids = [call.get("id") for call in open_calls]
            if not open_calls or (wanted is not None and None not in ids and wanted not in ids):
                yield "result_without_call", f"message {place}: {shown(str(message.get('content')))}"
            else:
                open_calls.pop(ids.index(wanted) if wanted in ids else 0)
            continue
        if open_calls:
            yield "unanswered_call", f"{_name(open_calls[0])}, before message {place}"
        open_calls = list(message.get("tool_calls") or ())


def _dropped(example: ChatExample, text: str) -> Iterator[Found]:
    """Tools and calls that the template does not write."""
    declared = [name for tool in example.tools or () if (name := declared_name(tool))]
    missing = [name for name in declared if name.isascii() and name not in text]
    if missing:
        yield "tools_dropped", f"{len(missing)} of {len(declared)}, among them {missing[0]}"
    told = Counter(name for name in declared if name not in missing)
    calls = Counter(_name(call) for message in example.messages for call in message.get("tool_calls") or ())
    for name, count in calls.items():
        if name.isascii() and text.count(name) < count + told[name]:
            yield "calls_dropped", name
            return


def declared_name(tool: Any) -> str:
    """The name of a declared function; "" of a tool of another kind."""
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _name(call: Any) -> str:
    return str(call["function"]["name"])


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ufeff\u202a-\u202e\u2066-\u2069]")
_WRONGLY_DECODED = re.compile(
    "Ã[\x80-\xbf]|â€[™œ\x9d“”]|Â[\xa0-\xbf]"
)  # UTF-8 that was read as Latin-1 or CP1252
_GOES_ON = re.compile(r"(?:[(\[{]|\b(?:the|a|an|and|or|of|because|which))\s*$")  # nobody ends with these
AROUND = 20  # characters


def check_text(said: str, answer: str) -> Iterator[tuple[str, str]]:
    """Defects of what a row says, and of its last answer."""
    found = _CONTROL.search(said) or _WRONGLY_DECODED.search(said)
    if found is not None:
        name = unicodedata.name(found.group()[0], f"U+{ord(found.group()[0]):04X}")
        around = said[max(found.start() - AROUND, 0) : found.end() + AROUND]
        yield "control_characters", f"{name} in {around!r}"
    if answer.count("```") % 2:
        yield "answer_unfinished", f"a code block is not closed: {shown(answer[answer.rindex('```') :])}"
    elif _GOES_ON.search(answer):
        yield "answer_unfinished", f"…{shown(answer[-2 * AROUND :])}"
