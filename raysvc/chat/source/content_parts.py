"""Content parts of one message -> text parts, and what else they say.

Always true:
- a part is text, reasoning or a tool call, and a medium where rows have media; any other is refused by its type;
- text parts keep their order, and what stands beside their text;
- a template that does not take parts gets their texts joined, with nothing between them.
"""

from __future__ import annotations

from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.media_parts import kind_of_part, media_part
from raysvc.chat.source.tool_calls import calls_of_text, wrapped
from raysvc.media.kinds import Kind

PARTS_READ = "contents that were lists of parts"
_TEXT_PART = ("type", "text")  # keys, in the order in which they are written


def read_parts(content: Any, place: str, media: tuple[Kind, ...] = ()) -> dict[str, Any]:
    """The fields of a message that its parts say: `content`, and `reasoning_content` and `tool_calls` where there are any.

    Args:
        content: a list of parts.
        place: of the message, for errors.
        media: the kinds to take.

    Raises:
        RowFault: a part that is not text, nor a medium that is taken.
    """
    if not isinstance(content, list):
        raise RowFault("a content is neither text nor parts", f"{place} is a {type(content).__name__}")
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for part in content:
        medium = kind_of_part(part, media) if media else None
        if medium:
            texts.append(media_part(part, medium))
            continue
        kind, text = _kind_and_text(part, place)
        if kind in ("reasoning", "thinking"):
            thoughts.append(text)
        elif kind == "tool_call":
            calls += [wrapped(call, set()) for call in calls_of_text(text, "a call")]
        else:
            texts.append(_text_part(part, text))
    found: dict[str, Any] = {"content": texts if texts or not (thoughts or calls) else ""}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def text_of_part(content: Any) -> str | None:
    """The text of a list of one text part that `read_parts` would leave as it is, None of anything else."""
    if type(content) is not list or len(content) != 1:
        return None
    (part,) = content
    if type(part) is not dict or tuple(part) != _TEXT_PART or part["type"] != "text":
        return None
    return part["text"] if type(part["text"]) is str else None


def flatten_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with text parts joined, with nothing between: for templates that know only string contents."""
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if type(message.get("content")) is list
        else message
        for message in messages
    ]


def _kind_and_text(part: Any, place: str) -> tuple[str, str]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        raise RowFault("a content part is not text", f"{place} has a part that is a {type(part).__name__}")
    kind = part.get("type", "text")
    if kind not in ("text", "reasoning", "thinking", "tool_call"):
        known = kind_of_part(part)
        why = f": a processor that takes it, and source.media: [{known}], would read it" if known else ""
        raise RowFault("a content part is not text", f"{place} has a part of type {kind!r}{why}")
    text = next((part[key] for key in ("text", "value", kind) if isinstance(part.get(key), str)), None)
    if text is None:
        keys = sorted(str(key) for key, value in part.items() if value is not None)
        raise RowFault(f"a {kind} part has no text", f"{place} has a part with the keys {keys}")
    return kind, text


def _text_part(part: Any, text: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": text}
    kept = {key: value for key, value in part.items() if value is not None and key != "value"}
    return {"type": "text", **kept, "text": text}
