"""Defines what a source row says, to be rendered or encoded: a conversation, a text, tokens, or a solution in steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysvc.chat.source.messages import Message


@dataclass(slots=True)
class ChatExample:
    """A conversation to render.

    Attributes:
        messages: in normal form.
        tools: or None.
        trained: places of the messages with loss, in order.
        all_tokens: the whole render is under loss.
        has_parts: some content is a list of text parts.
        has_calls: some message has `tool_calls`.
        changes: what the normal form changed.
        unread: keys of the assistant's messages that nobody reads.
        prompt: nothing is trained, and the generation prompt is rendered too.
        media: as the row names them; parts of messages say which is where.
    """

    messages: list[Message]
    tools: list[Any] | None
    trained: tuple[int, ...]
    all_tokens: bool = False
    has_parts: bool = False
    has_calls: bool = False
    changes: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    prompt: bool = False
    media: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TextExample:
    """Plain text; `context` is without loss, `trained` with."""

    context: str
    trained: str


@dataclass(frozen=True, slots=True)
class TokensExample:
    """Tokens that came as tokens; `mask` is 0 or 1 for each."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True, slots=True)
class StepsExample:
    """A solution in steps.

    Attributes:
        prompt: text, or messages to render.
        steps: their texts.
    """

    prompt: str | ChatExample
    steps: list[str]


Example = ChatExample | TextExample | TokensExample | StepsExample
