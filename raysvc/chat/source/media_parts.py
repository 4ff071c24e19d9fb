"""Where a row has images: content parts, a column of images, and `<image>` in its texts.

| in the row | image |
|---|---|
| `{"type": "image_url", "image_url": {"url": ...}}`, `{"type": "input_image", "image_url": ...}` | its URL |
| `{"type": "image", "image" or "url" or "path" or "base64" or "bytes": ...}` | what it names |
| `{"type": "image"}`, `<image>` in a text | the next one of column `images` (or `image`) |

Always true:
- every placeholder meets one image, and every image one placeholder, in order; any other row is quarantined;
- a part that is video, audio or a file is refused by its kind;
- messages come out with `{"type": "image", "medium": k}`, the place in `ChatExample.media`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raysvc.chat.row_errors import RowFault

Message = dict[str, Any]
PLACEHOLDER = "<image>"
COLUMNS = ("images", "image")
KINDS = ("image", "image_url", "input_image")
SOURCES = ("image", "image_url", "url", "path", "base64", "bytes")
WRONG_COUNT = "placeholders and images do not match"


def is_media_part(part: Any) -> bool:
    """Whether a content part is an image, with what type it may call itself."""
    return isinstance(part, Mapping) and (
        part.get("type") in KINDS or (part.get("type") is None and part.get("image") is not None)
    )


def media_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """The part with what it says of its image, None when the image is in a column."""
    given = next((part[name] for name in SOURCES if part.get(name) is not None), None)
    if isinstance(given, Mapping) and given.get("url") is not None:
        given = given["url"]
    return {"type": "image", "source": given}


def in_column(value: Any) -> list[Any]:
    """The images of a column: one, or a list."""
    if value is None or value == "" or value == []:
        return []
    return list(value) if isinstance(value, list) else [value]


def with_media(messages: list[Message], column: Sequence[Any]) -> tuple[list[Message], tuple[Any, ...]]:
    """(messages with the places of their images, these images): those of parts, and those of a column at its placeholders.

    Raises:
        RowFault: placeholders and images do not match.
    """
    walk = _Walk(list(column))
    found = [walk.message(message) for message in messages]
    if walk.wanted != len(column):
        raise RowFault(WRONG_COUNT, f"{walk.wanted} placeholders for {len(column)} images of the column")
    return (found, tuple(walk.media)) if walk.media else (messages, ())


def media_places(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """(place of the message, place of the image in `ChatExample.media`) of each image, in order."""
    return [
        (place, part["medium"])
        for place, message in enumerate(messages)
        if type(message.get("content")) is list
        for part in message["content"]
        if "medium" in part
    ]


def plain_images(messages: Sequence[Message]) -> list[Message]:
    """The messages as templates get them: an image is `{"type": "image"}` and nothing else."""
    return [
        {
            **message,
            "content": [{"type": "image"} if "medium" in part else part for part in message["content"]],
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
    """Goes through the messages of a row and takes an image at each placeholder."""

    def __init__(self, column: list[Any]) -> None:
        self._column = column
        self.media: list[Any] = []
        self.wanted = 0  # placeholders that the column has to fill

    def message(self, message: Message) -> Message:
        content = message.get("content")
        if type(content) is str:
            return {**message, "content": list(self._of_text(content))} if PLACEHOLDER in content else message
        if type(content) is list:
            return {**message, "content": [found for part in content for found in self._of_part(part)]}
        return message

    def _of_part(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if part.get("type") == "image":
            yield self._image(part["source"])
        elif PLACEHOLDER in part.get("text", ""):
            yield from self._of_text(part["text"])
        else:
            yield part

    def _of_text(self, text: str) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(text.split(PLACEHOLDER)):
            if number:
                yield self._image(None)
            if piece:
                yield {"type": "text", "text": piece}

    def _image(self, source: Any) -> dict[str, Any]:
        if source is None:
            source = self._column[self.wanted] if self.wanted < len(self._column) else None
            self.wanted += 1
        self.media.append(source)
        return {"type": "image", "medium": len(self.media) - 1}
