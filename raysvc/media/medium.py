"""Defines what an entry says of the media of a row: three columns, one value each per row.

`media` is text, null for a row without: a JSON list with one object for each medium, in the order of the placeholders.
`media_tokens` and `media_patches` are int32 sums over it, so that a plan can weigh rows without reading the text.

Always true:
- the digest is the SHA-256 of the encoded bytes, and names them in the store;
- `media_of(text_of(media)) == media`, and equal media give equal text;
- what stands in an entry is checked before it is used: a digest that is not one never becomes a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.cache.names import MAY_LACK
from raysvc.errors import EntryError

if TYPE_CHECKING:
    from raysvc.media.kinds import Kind  # imports numpy, which a listing does not need

COLUMNS = COLUMN, TOKENS, PATCHES = tuple(MAY_LACK)
SIZES: dict[Kind, tuple[str, ...]] = {
    "image": ("width", "height"),
    "audio": ("samples", "rate"),
    "video": ("frames", "width", "height", "rate", "rate_base"),
}  # kind -> names
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Medium:
    """One medium of a row.

    Attributes:
        sha256: of its encoded bytes, 64 hex digits.
        kind: `image`, `audio` or `video`.
        size: of an image width and height, pixels, upright: after the rotation that its EXIF data asks for; of audio samples
            of one channel, and samples a second; of a video its frames, their upright width and height, and frames a
            second as a fraction.
        tokens: of the row that stand for it: those whose id is the processor's token of its kind.
        at: place in the row of the first of them.
        patches: what the processor counts as encoder work: patches of Qwen-VL, tiles of LLaVA or Idefics3, clips of Qwen2-Audio.
        num_bytes: of the encoded medium.
    """

    sha256: str
    kind: Kind
    size: tuple[int, ...]
    tokens: int
    at: int
    patches: int
    num_bytes: int


def text_of(media: Sequence[Medium]) -> str | None:
    """The value of column `media`; None where there are none."""
    if not media:
        return None
    return json.dumps([json_of(one) for one in media], separators=(",", ":"))


def json_of(medium: Medium) -> dict[str, Any]:
    """Plain data; the numbers of the size under the names that they have in its kind."""
    size = dict(zip(SIZES[medium.kind], medium.size, strict=True))
    counts = {name: getattr(medium, name) for name in _COUNTS}
    return {"sha256": medium.sha256, "kind": medium.kind, **size, **counts}


def media_of(text: str | None) -> tuple[Medium, ...]:
    """The media of a value of column `media`.

    Raises:
        EntryError: it is not what `text_of` writes.
    """
    if not text:
        return ()
    try:
        return tuple(_checked(one) for one in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise EntryError(
            f"column {COLUMN}", f"it is damaged ({error})", "build it again with cache.force: true"
        ) from None


_COUNTS = ("tokens", "at", "patches", "num_bytes")


def _checked(told: dict[str, Any]) -> Medium:
    names = (*SIZES[told["kind"]], *_COUNTS)
    numbers = [told[name] for name in names]
    if told.keys() != {"sha256", "kind", *names}:
        raise ValueError(f"keys {sorted(told)}")
    if not (isinstance(told["sha256"], str) and DIGEST.fullmatch(told["sha256"])):
        raise ValueError(f"sha256 {told['sha256']!r}")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"numbers {numbers}")
    count = len(SIZES[told["kind"]])
    return Medium(told["sha256"], told["kind"], tuple(numbers[:count]), *numbers[count:])
