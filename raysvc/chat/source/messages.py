"""Messages as a row spells them -> their normal form, which templates get.

1. A JSON string becomes a list; the keys of a message are renamed to `role` and `content` (`from` and `value`, or what
   `source.columns` declares).
2. Roles are mapped: those that `source.roles` declares, then the usual other spellings (`ROLES`). A role that nobody
   knows stays as it is: templates have roles of their own.
3. A call that is a message of its own (`function_call`) becomes an assistant's message with `tool_calls`; calls are read
   by `tool_calls`, content parts by `parts`.
4. Keys whose value is None are left out, as `apply_chat_template` does, and reasoning is put under every name that
   templates read it by.

Always true:
- what came in is not changed;
- fields we do not know, and the `name` of a tool's message, pass through untouched;
- what was changed, beyond None and names of reasoning, is noted in `changes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.content_parts import PARTS_READ, read_parts, text_of_part
from raysvc.chat.source.json_rows import load_json
from raysvc.chat.source.tool_calls import CALLS_WRAPPED, calls_of_text, read_calls, wrapped
from raysvc.media.kinds import Kind

NORMAL_FORM = 1  # of messages; another number gives other keys
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
ROLES_MAPPED = "roles mapped"
CALLS_READ = "messages that are calls made tool_calls"
_PLAIN = (str, int, float, bool)
_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})
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
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            raise RowFault(f"{column!r} is not a list of messages", f"it is {kind_of(value)}")
        plain = self._all_plain(value)
        odd = [n for n, item in enumerate(value) if len(item) != 2] if plain else range(len(value))
        if not odd:
            return Conversation(value)
        messages = list(value)
        for place in odd:
            messages[place] = self._message(value[place], f"{column}[{place}]", changes)
        has_parts = not plain and any(type(message.get("content")) is list for message in messages)
        return Conversation(messages, has_parts, any("tool_calls" in message for message in messages))

    def _all_plain(self, items: list[Any]) -> bool:
        """Whether all have a text for role and content, and a role that stays; with no other key they are fine as they are."""
        try:
            roles = {*map(_ROLE, items)}
            kinds = {*map(type, roles), *map(type, map(_CONTENT, items))}
        except (KeyError, TypeError):
            return False
        return kinds == {str} and self.roles.keys().isdisjoint(roles)

    def _message(self, item: Any, place: str, changes: Changes) -> Message:
        if not isinstance(item, dict):
            column = place.partition("[")[0]
            raise RowFault(f"{column!r} holds something that is not a message", f"{place} is {kind_of(item)}")
        message = self._renamed(item, changes)
        if type(message.get("role")) is not str:
            raise RowFault("a message has no role", f"{place} has the keys {sorted(map(str, item))}")
        if message["role"] in self.roles:
            message = self._with_role(message, changes)
        if None in message.values():
            message = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in message:
            message = read_calls(message, changes)
        content = message.get("content")
        if content is not None and type(content) is not str:
            changes.add(PARTS_READ)
            if text_of_part(content) is None:
                message = {**message, **read_parts(content, place, self.media)}
        return message if _REASONING.isdisjoint(message) else _with_aliases(message)

    def _renamed(self, item: Message, changes: Changes) -> Message:
        """With `role` and `content` for keys that say the same."""
        pair = self._keys_of(item)
        if pair == SPELLINGS[0] or pair[0] not in item:
            return item
        changes.add(KEYS_RENAMED)
        names = dict(zip(pair, SPELLINGS[0], strict=True))
        return {names.get(key, key): value for key, value in item.items()}

    def _keys_of(self, item: Message) -> tuple[str, str]:
        if self.role_key or self.content_key:
            return self.role_key or "role", self.content_key or "content"
        return SPELLINGS[0] if "role" in item or "from" not in item else SPELLINGS[1]

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


def _with_aliases(message: Message) -> Message:
    """Reasoning under all the names that templates read it by, as `apply_chat_template` gives it to them."""
    from transformers.utils import chat_template_utils as theirs

    aliased: Message = theirs._alias_reasoning_fields([message])[0]
    return aliased


def read_tools(value: Any) -> list[Any] | None:
    """Tools from a list or a JSON string; an empty one means no tools.

    Raises:
        RowFault: they are not a list of tools.
    """
    if isinstance(value, str):
        return _tools_of(value)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault("'tools' is not a list of tools", f"it is {kind_of(value)}")
    return value or None


@lru_cache(maxsize=1024)
def _tools_of(text: str) -> list[Any] | None:
    """Rows repeat a few sets of tools; nobody changes what comes out."""
    return read_tools(parse_json(text, "tools")) if text.strip() else None


def parse_json(text: str, column: str) -> Any:
    """Parsed text of a column that holds JSON strings.

    Raises:
        RowFault: the text is not JSON.
    """
    try:
        return load_json(text.encode())
    except (ValueError, RecursionError) as broken:
        raise RowFault(f"broken JSON in {column!r}", str(broken)) from None


def is_plain(value: Any) -> bool:
    """Whether a value is made of JSON types only."""
    kind = type(value)
    if kind in _PLAIN or value is None:
        return True
    if kind is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return kind is list and all(is_plain(item) for item in value)


def unknown_roles(messages: Iterable[Message]) -> list[str]:
    """Roles that stand in no table, in order."""
    known = {*SYSTEM_ROLES, "user", "assistant", "tool", "function", "ipython"}
    return sorted({message["role"] for message in messages} - known)


def kind_of(value: Any) -> str:
    """What a value is, for a message about it."""
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {type(value[0]).__name__}"
    return "missing" if value is None else f"a {type(value).__name__}"
