"""Sizes from headers, and pixels, against `transformers.image_utils.load_image` and Pillow."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from raysvc.chat.row_errors import RowFault
from raysvc.media.pixels import BROKEN, TOO_LARGE, image_size, rgb

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")
SAVED = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("1", "L", "P", "RGB"),
}


def encoded(mode: str, kind: str, width: int = 37, height: int = 21, orientation: int = 1) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 255, (height, width, 4), np.uint8)
    if mode == "I;16":
        image = Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) | pixels[..., 1])
    else:
        image = (
            Image.fromarray(pixels, "RGBA")
            .convert("RGB" if mode not in ("LA", "RGBA") else "RGBA")
            .convert(mode)
        )
    out, more = io.BytesIO(), {}
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        more["exif"] = exif.tobytes()
    image.save(out, kind, **more)
    return out.getvalue()


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind in SAVED for mode in SAVED[kind]])
def test_pixels_are_those_that_transformers_loads(kind: str, mode: str) -> None:
    data = encoded(mode, kind)
    found = rgb(data)
    assert found.mode == "RGB"
    assert image_size(data) == found.size == (37, 21)
    if mode == "I;16":
        wide = np.asarray(Image.open(io.BytesIO(data)))
        assert wide.max() > 255
        np.testing.assert_array_equal(np.asarray(found), np.stack([wide >> 8] * 3, axis=-1))
    else:
        truth = load_image(base64.b64encode(data).decode())
        np.testing.assert_array_equal(np.asarray(found), np.asarray(truth))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_upright_and_so_is_its_size(kind: str, orientation: int) -> None:
    data = encoded("RGB", kind, orientation=orientation)
    truth = load_image(base64.b64encode(data).decode())
    assert truth.size == ((21, 37) if orientation > 4 else (37, 21))
    assert image_size(data) == truth.size
    np.testing.assert_array_equal(np.asarray(rgb(data)), np.asarray(truth))


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.97])
def test_an_image_that_is_cut_off_is_found_without_decoding_it(kind: str, share: float) -> None:
    data = encoded("RGB" if kind != "GIF" else "P", kind, 200, 150)
    with pytest.raises(RowFault) as caught:
        image_size(data[: int(len(data) * share)])
    assert caught.value.reason == BROKEN


def test_a_photo_that_is_cut_off_behind_its_thumbnail_is_found() -> None:
    exif = Image.Exif()
    exif[0x0112] = 1
    thumbnail = encoded("RGB", "JPEG", 16, 16)
    inner = b"Exif\0\0" + exif.tobytes()[6:] + thumbnail
    whole = encoded("RGB", "JPEG", 200, 150)
    photo = whole[:2] + b"\xff\xe1" + struct.pack(">H", len(inner) + 2) + inner + whole[2:]
    assert image_size(photo) == (200, 150)
    with pytest.raises(RowFault, match="cut off"):
        image_size(photo[: len(photo) - 300])


def test_what_is_no_image_is_a_fault_of_its_kind() -> None:
    for data in (b"", b"hello", b"RIFF\0\0\0\0WAVEfmt ", b"\0\0\0\x18ftypmp42", b"<svg/>"):
        with pytest.raises(RowFault) as caught:
            image_size(data)
        assert caught.value.reason == (
            BROKEN if not data else "a medium is not an image that is read (JPEG, PNG, WebP, GIF, BMP)"
        )
    with pytest.raises(RowFault, match=BROKEN):
        image_size(b"\xff\xd8\xff\xe0 not much of a photo")


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [8200, 10_000, 40_000])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    for look in (image_size, rgb):
        with pytest.raises(RowFault) as caught:
            look(bomb(side, side))
        assert caught.value.reason == TOO_LARGE
    assert image_size(bomb(8000, 8000)) == (8000, 8000)


def test_a_lower_limit_is_a_limit() -> None:
    data = encoded("RGB", "JPEG")
    assert image_size(data, max_pixels=37 * 21) == (37, 21)
    with pytest.raises(RowFault, match="the limit is 776"):
        image_size(data, max_pixels=37 * 21 - 1)
