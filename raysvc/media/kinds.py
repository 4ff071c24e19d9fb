"""The kinds of media, and what is different between them: their words, what their size is, how they are measured and decoded.

| kind | size | decoded |
|---|---|---|
| `image` | width and height in pixels, upright | `PIL.Image`, RGB |
| `audio` | samples of one channel, samples a second | float32 [samples] |
| `video` | frames, their upright width and height, frames a second as a fraction | `EncodedVideo`: frame after frame |
"""

from __future__ import annotations

from typing import Any, NamedTuple

from raysvc.job.config import MediaKind
from raysvc.media.pixels import MAX_PIXELS, image_size, rgb
from raysvc.media.sound import sound_size, waveform
from raysvc.media.video import EncodedVideo, VideoSize, video_size

Kind = MediaKind


class KindWords(NamedTuple):
    """The words that messages use for a kind: for one of it, for several, and for its size."""

    one: str
    many: str
    size: str


WORDS: dict[Kind, KindWords] = {
    "image": KindWords("an image", "images", "size"),
    "audio": KindWords("an audio clip", "audio clips", "length"),
    "video": KindWords("a video", "videos", "size"),
}


def size_of(kind: Kind, data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, ...]:
    """Size of an encoded medium.

    Args:
        kind: of it.
        data: its bytes.
        max_pixels: of an image.

    Raises:
        RowFault: it is broken, too large, or of another kind.
    """
    if kind == "video":
        return video_size(data)
    return image_size(data, max_pixels) if kind == "image" else sound_size(data)


def decoded(kind: Kind, data: bytes, size: tuple[int, ...]) -> Any:
    """Returns what a processor takes; the frames of a video are decoded when they are asked for.

    Args:
        kind: of the medium.
        data: its bytes.
        size: of it, by `size_of`.

    Raises:
        RowFault: it is broken, too large, or of another kind.
    """
    if kind == "video":
        return EncodedVideo(data, VideoSize(*size))
    return rgb(data) if kind == "image" else waveform(data)


def size_text(kind: Kind, size: tuple[int, ...]) -> str:
    """Returns a size for display: `60 x 44`, `1.50 s at 16000 Hz`, `21 frames of 96 x 64 at 8 a second`."""
    if kind == "video":
        video = VideoSize(*size)
        return f"{video.frames} frames of {video.width} x {video.height} at {video.fps:g} a second"
    return f"{size[0]} x {size[1]}" if kind == "image" else f"{size[0] / size[1]:.2f} s at {size[1]} Hz"
