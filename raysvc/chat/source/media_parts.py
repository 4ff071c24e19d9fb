"""Where a row has media: content parts, a column, and placeholders in its texts. A source has media of one kind.

| in the row | medium |
|---|---|
| `{"type": "image_url", "image_url": {"url": ...}}`, `{"type": "input_image", "image_url": ...}` | its URL |
| `{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}` | these bytes |
| `{"type": "image" or "audio", "image", "audio", "audio_url", "url", "path", "base64" or "bytes": ...}` | what it names |
| `{"type": "image"}`, `<image>` in a text | the next one of column `images` (or `image`) |
| `{"type": "audio"}`, `<audio>` in a text | the next one of column `audios` (or `audio`) |

Always true:
- every placeholder meets one medium, and every medium one placeholder, in order; any other row is quarantined;
- a part that is a medium of another kind is refused by its type;
- messages come out with `{"type": kind, "medium": k}`, the place in `ChatExample.media`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raysvc.chat.row_errors import RowFault
from raysvc.media.kinds import WORDS, Kind

Message = dict[str, Any]


class MediaNames(NamedTuple):
    """How rows name media of a kind: types of parts, keys of a part that say where the medium is, columns, and its placeholder."""

    types: tuple[str, ...]
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    placeholder: str


_ANYWHERE = ("url", "path", "base64", "bytes")
NAMES: dict[Kind, MediaNames] = {
    "image": MediaNames(
        ("image", "image_url", "input_image"),
        ("image", "image_url", *_ANYWHERE),
        ("images", "image"),
        "<image>",
    ),
    "audio": MediaNames(
        ("audio", "audio_url", "input_audio"),
        ("audio", "audio_url", "input_audio", *_ANYWHERE),
        ("audios", "audio"),
        "<audio>",
    ),
}


def wrong_count(kind: Kind) -> str:
    """The reason of a row whose placeholders are not as many as its media."""
    return f"placeholders and {WORDS[kind].many} do not match"


def is_media_part(part: Any, kind: Kind) -> bool:
    """Whether a content part is a medium of a kind, with what type it may call itself."""
    return isinstance(part, Mapping) and (
        part.get("type") in NAMES[kind].types or (part.get("type") is None and part.get(kind) is not None)
    )


def media_part(part: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """The part with what it says of its medium, None when the medium is in a column."""
    given = next((part[name] for name in NAMES[kind].keys if part.get(name) is not None), None)
    if isinstance(given, Mapping) and given.get("url") is not None:
        given = given["url"]
    elif isinstance(given, Mapping) and isinstance(given.get("data"), str):
        given = f"data:;base64,{given['data']}"
    return {"type": kind, "source": given}


def in_column(value: Any) -> list[Any]:
    """The media of a column: one, or a list."""
    if value is None or value == "" or value == []:
        return []
    return list(value) if isinstance(value, list) else [value]


def placed_media(
    messages: list[Message], column: Sequence[Any], kind: Kind
) -> tuple[list[Message], tuple[Any, ...]]:
    """(messages with the places of their media, these media): those of parts, and those of a column at its placeholders.

    Raises:
        RowFault: placeholders and media do not match.
    """
    walk = _Walk(list(column), kind)
    found = [walk.message(message) for message in messages]
    if walk.wanted != len(column):
        many = WORDS[kind].many
        raise RowFault(
            wrong_count(kind), f"{walk.wanted} placeholders for {len(column)} {many} of the column"
        )
    return (found, tuple(walk.media)) if walk.media else (messages, ())


def media_places(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """(place of the message, place of the medium in `ChatExample.media`) of each, in order."""
    return [
        (place, part["medium"])
        for place, message in enumerate(messages)
        if type(message.get("content")) is list
        for part in message["content"]
        if "medium" in part
    ]


def plain_media(messages: Sequence[Message]) -> list[Message]:
    """The messages as templates get them: a medium is `{"type": kind}` and nothing else."""
    return [
        {
            **message,
            "content": [{"type": part["type"]} if "medium" in part else part for part in message["content"]],
        }
        if type(message.get("content")) is list
        else message
        for message in messages
    ]


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """The messages with every text as a part, for templates that take nothing else."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if type(message.get("content")) is str
        else message
        for message in messages
    ]


class _Walk:
    """Goes through the messages of a row and takes a medium at each placeholder."""

    def __init__(self, column: list[Any], kind: Kind) -> None:
        self._column, self._kind = column, kind
        self._mark = NAMES[kind].placeholder
        self.media: list[Any] = []
        self.wanted = 0  # placeholders that the column has to fill

    def message(self, message: Message) -> Message:
        content = message.get("content")
        if type(content) is str:
            return {**message, "content": list(self._of_text(content))} if self._mark in content else message
        if type(content) is list:
            return {**message, "content": [found for part in content for found in self._of_part(part)]}
        return message

    def _of_part(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "source" in part and part.get("type") == self._kind:
            yield self._medium(part["source"])
        elif self._mark in part.get("text", ""):
            yield from self._of_text(part["text"])
        else:
            yield part

    def _of_text(self, text: str) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(text.split(self._mark)):
            if number:
                yield self._medium(None)
            if piece:
                yield {"type": "text", "text": piece}

    def _medium(self, source: Any) -> dict[str, Any]:
        if source is None:
            source = self._column[self.wanted] if self.wanted < len(self._column) else None
            self.wanted += 1
        self.media.append(source)
        return {"type": self._kind, "medium": len(self.media) - 1}
