"""The kinds of media, and what is different between them: their words, what their size is, how they are measured and decoded.

| kind | size | decoded |
|---|---|---|
| `image` | width and height in pixels, upright | `PIL.Image`, RGB |
| `audio` | samples of one channel, samples a second | float32 [samples] |
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from raysvc.media.pixels import MAX_PIXELS, image_size, rgb
from raysvc.media.sound import sound_size, waveform

Kind = Literal["image", "audio"]


class KindWords(NamedTuple):
    """How messages speak of a kind: one of it, several, and what its size is."""

    one: str
    many: str
    size: str


WORDS: dict[Kind, KindWords] = {
    "image": KindWords("an image", "images", "size"),
    "audio": KindWords("an audio clip", "audio clips", "length"),
}


def size_of(kind: Kind, data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Size of an encoded medium.

    Raises:
        RowFault: it is broken, too large, or of another kind.
    """
    return image_size(data, max_pixels) if kind == "image" else sound_size(data)


def decoded(kind: Kind, data: bytes) -> Any:
    """What a processor takes.

    Raises:
        RowFault: it is broken, too large, or of another kind.
    """
    return rgb(data) if kind == "image" else waveform(data)


def size_text(kind: Kind, size: tuple[int, int]) -> str:
    """To be read: `60 x 44`, `1.50 s`."""
    return f"{size[0]} x {size[1]}" if kind == "image" else f"{size[0] / size[1]:.2f} s at {size[1]} Hz"
