"""Whether a stretch of text says what its message says, and nothing else.

Always true:
- all of the content is in the stretch, after the template's own trimming and cutting of `<tag>` parts;
- every tool call's name is in it, and every value of its arguments;
- it holds no token that opens a header and no second end of turn.

Reasoning may be missing: templates strip it from earlier turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message

_CLOSING = re.compile(r"</([\w:.-]{1,40})>|\[/(\w{1,40})\]")


def tags_of(template: str, special_tokens: Iterable[str] = ()) -> tuple[str, ...]:
    """Pairs like `<think>` and `</think>` that a template names: where it may cut a content apart."""
    tags: set[str] = set()
    for angle, square in _CLOSING.findall(template):
        tags |= {f"<{angle}>", f"</{angle}>"} if angle else {f"[{square}]", f"[/{square}]"}
    return tuple(sorted(tags - set(special_tokens), key=len, reverse=True))


def prove_span(stretch: str, message: Message, tags: tuple[str, ...], controls: Iterable[str]) -> None:
    """Check one trained stretch of text, its end of turn excluded.

    Args:
        stretch: text under loss.
        message: that it must say.
        tags: from `tags_of`.
        controls: texts of the tokens that open a header or end a turn.

    Raises:
        RowFault: with what is missing or too much.
    """
    for control in controls:
        if control in stretch:
            raise RowFault("a trained turn holds a control token", f"{control!r} in {_short(stretch)!r}")
    for text in _texts(message.get("content")):
        if not _says(stretch, text, tags):
            raise RowFault(
                "a trained turn does not hold its message", f"{_short(text)!r} not in {_short(stretch)!r}"
            )
    for call in message.get("tool_calls") or ():
        missing = next((leaf for leaf in _leaves(_called(call)) if not _says(stretch, leaf, tags)), None)
        if missing is not None:
            raise RowFault("a trained turn does not hold its tool call", f"{_short(missing)!r} is missing")


def is_empty(message: Message) -> bool:
    """Whether a message says nothing: its end of turn alone teaches only to be silent."""
    said = [*_texts(message.get("content")), *_texts(message.get("reasoning_content"))]
    content = message.get("content")
    if type(content) is str and content and not content.isspace():
        return False
    return not message.get("tool_calls") and not any(text.strip() for text in said)


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content] if isinstance(content, list) else []


def _says(stretch: str, text: str, tags: tuple[str, ...]) -> bool:
    if text in stretch or text.strip() in stretch:
        return True
    cut = [text]
    for tag in tags:
        cut = [piece for whole in cut for piece in whole.split(tag)]
    kept = [piece.strip() for piece in cut if piece.strip()]
    return len(cut) > 1 and bool(kept) and kept[-1] in stretch


def _called(call: Any) -> Any:
    """What of a tool call has to be seen: name and arguments, not its id and type."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        return function
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.lstrip()[:1] in ("{", "["):
        arguments = _loaded(arguments)
    return [function.get("name"), arguments]


def _loaded(text: str) -> Any:
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _leaves(value: Any) -> Iterable[str]:
    """Texts that any rendering of a JSON value shows: keys, and strings without characters that need escapes."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        if value.isascii() and value.isprintable() and not set(value) & set("\\\"'<>&"):
            yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"
