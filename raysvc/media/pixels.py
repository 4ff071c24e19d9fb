"""An encoded image: its size without decoding it, and its pixels.

| in the file | as pixels |
|---|---|
| EXIF orientation | applied: the image is upright |
| RGB | as it is |
| gray, palette, CMYK, transparency (dropped) | what Pillow's `convert("RGB")` gives, as in `transformers.image_utils.load_image` |
| 16 bits a gray value | the upper 8 of them, where Pillow would cut at 255 |
| several frames | the first |

Always true:
- `image_size` reads the header and the structure of the file, never a pixel;
- the size of `rgb(data)` is `image_size(data)`;
- what is not an image, is cut off, or has more pixels than the limit is a `RowFault`, before memory is taken for it.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.chat.row_errors import RowFault
from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # a JPEG of several frames calls itself MPO
MAX_PIXELS = 1 << 26  # 67 million: below what Pillow warns of
BROKEN = "an image is broken"
TOO_LARGE = "an image has too many pixels"
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
_PNG = b"\x89PNG\r\n\x1a\n"


class ImageSize(NamedTuple):
    """Pixels of an upright image."""

    width: int
    height: int


def check_pillow() -> None:
    """Refuse to go on without Pillow.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "source", "its rows have media, and Pillow is not installed", "pip install 'raysvc[media]'"
        ) from None


def image_size(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageSize:
    """Size of an encoded image.

    Raises:
        RowFault: it is broken, too large, or of a kind that is not read.
    """
    image = _opened(data, max_pixels)
    width, height = image.size
    return ImageSize(height, width) if _orientation(image, data) in _TURNED else ImageSize(width, height)


def rgb(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An encoded image, upright, mode RGB.

    Raises:
        RowFault: it is broken, too large, or of a kind that is not read.
    """
    from PIL import ImageOps

    image = _opened(data, max_pixels)
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except (OSError, ValueError, SyntaxError, struct.error, IndexError) as error:
        raise RowFault(BROKEN, _why(error)) from None
    return _in_rgb(upright)


def _in_rgb(image: Image.Image) -> Image.Image:
    if not image.mode.startswith("I"):
        return image.convert("RGB")
    import numpy as np
    from PIL.Image import fromarray

    upper = (np.asarray(image).astype(np.uint32) >> 8).clip(0, 255)
    return fromarray(upper.astype(np.uint8)).convert("RGB")


def _opened(data: bytes, max_pixels: int) -> Any:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise RowFault(BROKEN, "it has no bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RowFault(TOO_LARGE, _why(error)) from None
    except UnidentifiedImageError:
        raise RowFault(_unknown(data), f"its {len(data)} bytes begin like none of these") from None
    except (OSError, ValueError, SyntaxError, struct.error) as error:
        raise RowFault(BROKEN, _why(error)) from None
    width, height = image.size
    if width * height > max_pixels:
        raise RowFault(TOO_LARGE, f"{width} x {height}, the limit is {max_pixels} pixels")
    if not width * height:
        raise RowFault(BROKEN, f"it has {width} x {height} pixels")
    _check_complete(data, str(image.format))
    return image


def _why(error: BaseException) -> str:
    """Returns what Pillow says, without the bytes of the file that it quotes."""
    return re.sub(r"\s*\(?(chunk )?b?['\"].*", "", str(error))[:120]


def _unknown(data: bytes) -> str:
    starts = {b"\xff\xd8\xff": BROKEN, _PNG: BROKEN, b"GIF8": BROKEN, b"BM": BROKEN}
    known = next((why for start, why in starts.items() if data.startswith(start)), "")
    return known or "a medium is not an image that is read (JPEG, PNG, WebP, GIF, BMP)"


def _check_complete(data: bytes, kind: str) -> None:
    """Checks whether the file has its end: what is cut off would only be found when its pixels are decoded."""
    if kind in ("JPEG", "MPO"):
        scan = data.find(b"\xff\xda", _end_of_thumbnails(data))
        complete = scan >= 0 and data.find(b"\xff\xd9", scan) >= 0
    elif kind == "PNG":
        complete = any(name == b"IEND" for name, _ in _png_chunks(data))
    elif kind == "WEBP":
        complete = len(data) >= struct.unpack("<I", data[4:8])[0] + 8
    elif kind == "GIF":
        complete = b"\x3b" in data[-64:]
    else:  # BMP
        complete = len(data) >= struct.unpack("<I", data[2:6])[0]
    if not complete:
        raise RowFault(BROKEN, "it is cut off")


def _end_of_thumbnails(data: bytes) -> int:
    """Returns where the segments before the first scan of a JPEG end: a thumbnail inside of one has a scan of its own."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        at += 2 + struct.unpack(">H", data[at + 2 : at + 4])[0] if data[at + 1] != 0xFF else 1
    return at


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, first bytes) of the whole chunks of a PNG."""
    at = len(_PNG)
    while at + 12 <= len(data):
        size = struct.unpack(">I", data[at : at + 4])[0]
        if at + 12 + size > len(data):
            return
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + min(size, 32)]
        at += 12 + size


def _orientation(image: Any, data: bytes) -> int:
    """The EXIF orientation; Pillow would decode a PNG to look for it behind the pixels."""
    if image.format == "PNG" and not any(
        name == b"eXIf" or start.startswith((b"Raw profile type exif", b"XML:com.adobe.xmp"))
        for name, start in _png_chunks(data)
    ):
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (OSError, ValueError, SyntaxError, struct.error, TypeError) as error:
        raise RowFault(BROKEN, f"its EXIF data cannot be read: {_why(error)}") from None
