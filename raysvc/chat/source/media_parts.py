"""Finds where a row has media: content parts, columns, and placeholders in its texts.

| in the row | medium |
|---|---|
| `{"type": "image_url", "image_url": {"url": ...}}`, `{"type": "input_image", "image_url": ...}` | its URL |
| `{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}` | these bytes |
| `{"type": "video_url", "video_url": {"url": ...}}` | its URL |
| `{"type": "image", "audio" or "video", "image", "audio", "video", "audio_url", "url", "path", "base64" or "bytes": ...}` | what it names |
| `{"type": "image"}`, `<image>` in a text | the next one of column `images` (or `image`) |
| `{"type": "audio"}`, `<audio>` in a text | the next one of column `audios` (or `audio`) |
| `{"type": "video"}`, `<video>` in a text | the next one of column `videos` (or `video`) |

Always true:
- every placeholder meets one medium, and every medium one placeholder, in order; any other row is quarantined;
- a part that is a medium of a kind that the source has not is refused by its type;
- messages come out with `{"type": kind, "medium": k}`, the place in `ChatExample.media`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raysvc.chat.row_errors import RowFault
from raysvc.media.kinds import WORDS, Kind

Message = dict[str, Any]


class MediaNames(NamedTuple):
    """Names what rows call media of a kind: types of parts, keys of a part that say where the medium is, columns, and
    its placeholder.
    """

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
    "video": MediaNames(
        ("video", "video_url", "input_video"),
        ("video", "video_url", *_ANYWHERE),
        ("videos", "video"),
        "<video>",
    ),
}


def wrong_count(kind: Kind) -> str:
    """The reason of a row whose placeholders are not as many as its media."""
    return f"placeholders and {WORDS[kind].many} do not match"


def kind_of_part(part: Any, kinds: Iterable[Kind] = tuple(NAMES)) -> Kind | None:
    """The kind, of some, of which a content part is a medium, with what type it may call itself; None: of none."""
    if not isinstance(part, Mapping):
        return None
    said = part.get("type")
    return next(
        (
            kind
            for kind in kinds
            if (part.get(kind) is not None if said is None else said in NAMES[kind].types)
        ),
        None,
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
    messages: list[Message], columns: Mapping[Kind, Sequence[Any]], kinds: Sequence[Kind]
) -> tuple[list[Message], tuple[Any, ...]]:
    """(messages with the places of their media, these media): those of parts, and those of columns at their placeholders.

    Args:
        messages: of a row.
        columns: kind -> media of its column, where there are any.
        kinds: that the source has.

    Raises:
        RowFault: placeholders and media do not match.
    """
    walk = _Walk({kind: columns.get(kind, ()) for kind in kinds})
    found = [walk.message(message) for message in messages]
    for kind, wanted in walk.wanted.items():
        there = len(columns.get(kind, ()))
        if wanted != there:
            what = f"{wanted} placeholders for {there} {WORDS[kind].many} of the column"
            raise RowFault(wrong_count(kind), what)
    return (found, tuple(walk.media)) if walk.media else (messages, ())


def media_places(messages: Sequence[Message]) -> list[tuple[int, int, Kind]]:
    """(place of the message, place of the medium in `ChatExample.media`, its kind) of each, in order."""
    return [
        (place, part["medium"], part["type"])
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

    def __init__(self, columns: Mapping[Kind, Sequence[Any]]) -> None:
        self._columns = columns
        self._kinds: dict[str, Kind] = {NAMES[kind].placeholder: kind for kind in columns}
        self._marks = re.compile(f"({'|'.join(self._kinds)})")
        self.media: list[Any] = []
        self.wanted: dict[Kind, int] = dict.fromkeys(columns, 0)  # placeholders that a column has to fill

    def message(self, message: Message) -> Message:
        content = message.get("content")
        if type(content) is str:
            marked = self._marks.search(content)
            return {**message, "content": list(self._of_text(content))} if marked else message
        if type(content) is list:
            return {**message, "content": [found for part in content for found in self._of_part(part)]}
        return message

    def _of_part(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "source" in part and part.get("type") in self._columns:
            yield self._medium(part["type"], part["source"])
        elif self._marks.search(part.get("text", "")):
            yield from self._of_text(part["text"])
        else:
            yield part

    def _of_text(self, text: str) -> Iterator[dict[str, Any]]:
        for piece in self._marks.split(text):
            if piece in self._kinds:
                yield self._medium(self._kinds[piece], None)
            elif piece:
                yield {"type": "text", "text": piece}

    def _medium(self, kind: Kind, source: Any) -> dict[str, Any]:
        if source is None:
            column, place = self._columns[kind], self.wanted[kind]
            source = column[place] if place < len(column) else None
            self.wanted[kind] += 1
        self.media.append(source)
        return {"type": kind, "medium": len(self.media) - 1}
