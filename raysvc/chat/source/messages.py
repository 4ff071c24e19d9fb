"""Messages as a row spells them -> their normal form, which templates get.

1. A JSON string becomes a list; the keys of a message are renamed to `role` and `content` (`from` and `value`, or what
   `source.columns` declares).
2. Roles are mapped: those that `source.roles` declares, then the usual other spellings (`ROLES`). A role that nobody
   knows stays as it is: templates have roles of their own.
3. A call that is a message of its own (`function_call`) becomes an assistant's message with `tool_calls`, and so does a key
   `function_call`, with the `function` messages that answer it; calls are read by `tool_calls`, content parts by `content_parts`,
   and those that are calls or results by `tool_calls` too.
4. Keys whose value is None are left out, as `apply_chat_template` does, and reasoning is put under every name that
   templates read it by.

Always true:
- what came in is not changed;
- fields we do not know, and the `name` of a tool's message, pass through untouched;
- a message whose words are in none of the fields that templates show is refused;
- what was changed, beyond None and names of reasoning, is noted in `changes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.content_parts import PARTS_READ, read_parts, text_of_part
from raysvc.chat.source.json_rows import load_json
from raysvc.chat.source.loss_flags import refuse_partly_trained
from raysvc.chat.source.tool_calls import (
    CALLS_WRAPPED,
    LEGACY_CALLS,
    calls_of_text,
    read_blocks,
    read_calls,
    with_legacy_call,
    wrapped,
)
from raysvc.media.kinds import Kind

NORMAL_FORM = 3  # of messages; another number gives other keys
Message = dict[str, Any]
Changes = set[str]
SYSTEM_ROLES = ("system", "developer")
CALL = "function_call"  # the role of a message that is a call; its content is the call
ROLES: Mapping[str, str] = MappingProxyType(
    {
        "human": "user",
        "prompter": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "bot": "assistant",
        "model": "assistant",
        "function_call": CALL,
        "tool_call": CALL,
        "observation": "tool",
        "function_response": "tool",
        "tool_response": "tool",
    }
)
SPELLINGS = (("role", "content"), ("from", "value"))
KEYS_RENAMED = "messages with other keys than role and content"
MESSAGES_PARSED = "messages that were JSON text"
ROLES_MAPPED = "roles mapped"
CALLS_READ = "messages that are calls made tool_calls"
_LIST = re.compile(
    r"""\s*\[\s*\{\s*(?:"|(')(?:role|content|from|value)'\s*:)"""
)  # how messages begin as JSON, or in Python
_PLAIN = (str, int, float, bool)
_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})
_SAYING = _REASONING | {"content", "tool_calls"}
_UNSHOWN = ("refusal", "audio", "text", "value", "parts")  # fields with words that no template shows
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in normal form.

    Attributes:
        messages: for the template.
        has_parts: some content is a list of text parts.
        has_calls: some message has `tool_calls`.
    """

    messages: list[Message]
    has_parts: bool = False
    has_calls: bool = False


@dataclass(frozen=True)
class MessageReader:
    """Reads the messages of one source.

    Attributes:
        roles: their role -> ours, before those that are known.
        role_key, content_key: the keys of a message, where they are declared.
        media: what to take among content parts.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    role_key: str | None = None
    content_key: str | None = None
    media: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", {**ROLES, **self.roles})

    def read(self, value: Any, column: str, changes: Changes) -> Conversation:
        """Messages from a list of dicts, one dict, or a JSON string of either.

        Args:
            value: what the column holds.
            column: its name, for messages.
            changes: what was changed is added here.

        Raises:
            RowFault: not messages with a role.
        """
        if isinstance(value, str):
            value = parse_json(value, column)
            changes.add(MESSAGES_PARSED)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            raise RowFault(f"{column!r} is not a list of messages", f"it is {kind_of(value)}")
        said = self._what_is_said(value)
        if said is None and not (self.role_key or self.content_key):
            value = read_blocks(value, self.roles, changes)
        if said is list:
            changes.add(PARTS_READ)
        odd = [n for n, item in enumerate(value) if len(item) != 2] if said else range(len(value))
        if not odd:
            return Conversation(value, said is list)
        messages = list(value)
        for place in odd:
            item = value[place]
            messages[place] = (
                _with_aliases(_cleaned(item, changes))
                if said
                else self._message(item, f"{column}[{place}]", changes)
            )
        if LEGACY_CALLS in changes:
            messages = [{**m, "role": "tool"} if m["role"] == "function" else m for m in messages]
        has_parts = said is not str and any(type(message.get("content")) is list for message in messages)
        return Conversation(messages, has_parts, any("tool_calls" in messages[place] for place in odd))

    def _what_is_said(self, items: list[Any]) -> type | None:
        """`str` or `list` where all contents are texts, or single text parts, and nobody's keys or role change; None elsewhere.

        Then messages with no other key than role and content are fine as they are.
        """
        if self.role_key or self.content_key:
            return None
        try:
            roles, contents = {*map(_ROLE, items)}, [*map(_CONTENT, items)]
            kinds = {*map(type, contents)}
        except (KeyError, TypeError):
            return None
        if kinds == {list} and None not in map(text_of_part, contents):
            kinds = {str}
        if kinds != {str} or {*map(type, roles)} != {str} or not self.roles.keys().isdisjoint(roles):
            return None
        return type(contents[0])

    def _message(self, item: Any, place: str, changes: Changes) -> Message:
        if not isinstance(item, dict):
            column = place.partition("[")[0]
            raise RowFault(f"{column!r} holds something that is not a message", f"{place} is {kind_of(item)}")
        message = self._renamed(item, changes)
        if type(message.get("role")) is not str:
            keys = ", ".join(sorted(map(str, item))) or "(none)"
            remedy = "name its role and content: source.columns: {role: THEIRS, content: THEIRS}"
            raise RowFault("a message has no role", f"{place} has the keys {keys}; {remedy}")
        if message["role"] in self.roles:
            message = self._with_role(message, changes)
        message = _cleaned(message, changes)
        if _SAYING.isdisjoint(message):
            _refuse_unshown(message, place)
        content = message.get("content")
        if content is not None and type(content) is not str:
            changes.add(PARTS_READ)
            if text_of_part(content) is None:
                if message["role"] == "assistant" and isinstance(content, list):
                    refuse_partly_trained(content, place)
                message = {**message, **read_parts(content, place, self.media)}
        return _with_aliases(message)

    def _renamed(self, item: Message, changes: Changes) -> Message:
        """Returns it with `role` and `content` for keys that say the same."""
        pair = self._keys_of(item)
        if pair == SPELLINGS[0] or pair[0] not in item:
            return item
        changes.add(KEYS_RENAMED)
        names = dict(zip(pair, SPELLINGS[0], strict=True))
        return {names.get(key, key): value for key, value in item.items()}

    def _keys_of(self, item: Message) -> tuple[str, str]:
        if self.role_key or self.content_key:
            return self.role_key or "role", self.content_key or "content"
        (role, content), (other_role, other_content) = SPELLINGS
        if role not in item and other_role in item:
            return other_role, other_content if other_content in item else content
        return role, other_content if content not in item and other_content in item else content

    def _with_role(self, message: Message, changes: Changes) -> Message:
        role = self.roles[message["role"]]
        if role == message["role"] != CALL:
            return message
        changes.add(ROLES_MAPPED)
        if role != CALL:
            return {**message, "role": role}
        changes.add(CALLS_READ)
        calls = [wrapped(call, {CALLS_WRAPPED}) for call in calls_of_text(message.get("content"), "a call")]
        return {**message, "role": "assistant", "content": "", "tool_calls": calls}


def _refuse_unshown(message: Message, place: str) -> None:
    name = next((name for name in _UNSHOWN if message.get(name)), None)
    if name is not None:
        remedy = f"source.columns: {{content: {name}}} reads it, if it is the content"
        raise RowFault("a message has words, and no content", f"{place} has them in {name!r}: {remedy}")


def _cleaned(message: Message, changes: Changes) -> Message:
    """Without keys whose value is None, its calls in normal form."""
    if None in message.values():
        message = {key: value for key, value in message.items() if value is not None}
    if "function_call" in message:
        message = with_legacy_call(message, changes)
    return read_calls(message, changes) if "tool_calls" in message else message


def _with_aliases(message: Message) -> Message:
    """Reasoning under all the names that templates read it by, as `apply_chat_template` gives it to them.

    Up to 5.20 `transformers` gives it under the row's own name alone.
    """
    if _REASONING.isdisjoint(message):
        return message
    from transformers.utils import chat_template_utils as theirs

    alias = getattr(theirs, "_alias_reasoning_fields", None)
    return message if alias is None else alias([message])[0]


def parse_json(text: str, column: str) -> Any:
    """Parsed text of a column that holds JSON strings.

    Raises:
        RowFault: the text is not JSON.
    """
    try:
        return load_json(text.encode())
    except (ValueError, RecursionError) as broken:
        raise RowFault(f"broken JSON in {column!r}", str(broken)) from None


def text_or_messages(value: Any, column: str, role_key: str | None = None) -> Any:
    """The value of a column that may hold either; messages that are JSON text, as in a CSV file, as a list.

    Raises:
        RowFault: the text is messages as Python prints them.
    """
    found = _LIST.match(value) if isinstance(value, str) else None
    if found is None:
        return value
    if found.group(1) == "'":
        raise RowFault(f"{column!r} holds messages as Python prints them", "write them as JSON: json.dumps")
    try:
        items = load_json(value.encode())
    except (ValueError, RecursionError):
        return value
    keys = {role_key or "role", "from"}
    return items if all(isinstance(item, dict) and keys & item.keys() for item in items) else value


def is_plain(value: Any) -> bool:
    """Returns whether a value is made of JSON types only."""
    kind = type(value)
    if kind in _PLAIN or value is None:
        return True
    if kind is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return kind is list and all(is_plain(item) for item in value)


def refuse_deep(value: Any, levels: int, what: str) -> None:
    """Python itself writes and compares values of a few hundred levels.

    Raises:
        RowFault: there are more than these.
    """
    level = [value]
    for _ in range(levels + 1):
        inside = (item for item in level if type(item) is dict or type(item) is list)
        level = [part for item in inside for part in (item.values() if type(item) is dict else item)]
        if not level:
            return
    raise RowFault(f"{what} are nested too deep", f"more than {levels} levels")


def unknown_roles(messages: Iterable[Message]) -> list[str]:
    """Roles that stand in no table, in order."""
    known = {*SYSTEM_ROLES, "user", "assistant", "tool", "function", "ipython"}
    return sorted({message["role"] for message in messages} - known)


def kind_of(value: Any) -> str:
    """Returns what a value is, for a message about it."""
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {type(value[0]).__name__}"
    return "missing" if value is None else f"a {type(value).__name__}"
