"""An encoded audio clip: how long it is without decoding it, and its waveform.

Read are WAV files of PCM (8, 16, 24, 32 bits) and of floats (32, 64 bits), also as WAVE_FORMAT_EXTENSIBLE.

| in the file | as a waveform |
|---|---|
| PCM of n bits | divided by 2^(n-1); 8 bits are unsigned and lose 128 first |
| floats | as they are |
| several channels | their mean |
| another rate than the processor's | refused: nothing is resampled |

Always true:
- the waveform of a clip has as many samples as `sound_size` says;
- what is not such a file, is cut off, or holds a value that is not a number is a `RowFault`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.chat.row_errors import RowFault

BROKEN = "an audio clip is broken"
NOT_READ = "a medium is not audio that is read (WAV)"
CONVERT = "convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav"
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
_OTHERS = {b"ID3": "MP3", b"\xff\xfb": "MP3", b"\xff\xf3": "MP3", b"fLaC": "FLAC", b"OggS": "Ogg"}
_OTHERS |= {b"FORM": "AIFF", b"RF64": "RF64", b"RIFX": "RIFX", b"\x1aE\xdf\xa3": "WebM"}


class SoundSize(NamedTuple):
    """The length of a clip: samples of one channel, and how many of them make a second."""

    samples: int
    rate: int


class _Sound(NamedTuple):
    rate: int
    channels: int
    bits: int
    is_float: bool
    start: int  # byte of the first sample
    stop: int


def sound_size(data: bytes) -> SoundSize:
    """Length of an encoded clip.

    Raises:
        RowFault: it is broken, or of a kind that is not read.
    """
    found = _opened(data)
    if found.is_float and not np.isfinite(_samples(data, found)).all():
        raise RowFault(BROKEN, "a sample is not a number")
    return SoundSize((found.stop - found.start) // (found.channels * found.bits // 8), found.rate)


def waveform(data: bytes) -> npt.NDArray[np.float32]:
    """[samples], the mean of the channels, -1 to 1 where the file has integers.

    Raises:
        RowFault: it is broken, or of a kind that is not read.
    """
    found = _opened(data)
    mono = np.mean(_samples(data, found).reshape(-1, found.channels), axis=1)
    return np.asarray(mono, np.float32)


def _samples(data: bytes, found: _Sound) -> npt.NDArray[np.float64]:
    raw = np.frombuffer(data, np.uint8, found.stop - found.start, found.start)
    if found.is_float:
        return np.frombuffer(raw, f"<f{found.bits // 8}").astype(np.float64)
    if found.bits == 8:
        return (raw.astype(np.float64) - 128) / 128
    wide = np.zeros((len(raw) // (found.bits // 8), 4), np.uint8)
    wide[:, 4 - found.bits // 8 :] = raw.reshape(len(wide), -1)  # the upper bytes of 32 bits
    return wide.reshape(-1).view("<i4").astype(np.float64) / 2**31


def _opened(data: bytes) -> _Sound:
    if not data:
        raise RowFault(BROKEN, "it has no bytes")
    if data[:4] != b"RIFF" or (len(data) >= 12 and data[8:12] != b"WAVE"):
        kind = next((name for start, name in _OTHERS.items() if data.startswith(start)), "")
        what = f"it is {kind}" if kind else f"its {len(data)} bytes begin like no sound that is known"
        raise RowFault(NOT_READ, f"{what}; {CONVERT}")
    form: tuple[int, int, int, int] | None = None
    for name, start, size in _chunks(data):
        if name == b"fmt ":
            form = _format(data[start : start + size])
        elif name == b"data":
            if form is None:
                raise RowFault(BROKEN, "its samples come before their format")
            return _checked(_Sound(form[2], form[1], form[3], form[0] == FLOAT, start, start + size), data)
    raise RowFault(BROKEN, "it is cut off")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, first byte, bytes) of each chunk that begins in the file."""
    at = 12
    while at + 8 <= len(data):
        (size,) = struct.unpack_from("<I", data, at + 4)
        yield data[at : at + 4], at + 8, size
        at += 8 + size + size % 2


def _format(chunk: bytes) -> tuple[int, int, int, int]:
    """(code, channels, rate, bits)."""
    if len(chunk) < 16:
        raise RowFault(BROKEN, "it is cut off")
    code, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if code == EXTENSIBLE and len(chunk) >= 26:
        (code,) = struct.unpack_from("<H", chunk, 24)
    widths = {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}.get(code)
    if widths is None or bits not in widths:
        raise RowFault(NOT_READ, f"its samples are of format {code} with {bits} bits; {CONVERT}")
    if not channels or not rate or block != channels * bits // 8:
        raise RowFault(BROKEN, f"{channels} channels, {rate} samples a second, {block} bytes each")
    return code, channels, rate, bits


def _checked(found: _Sound, data: bytes) -> _Sound:
    if found.stop > len(data):
        raise RowFault(BROKEN, "it is cut off")
    if found.stop == found.start or (found.stop - found.start) % (found.channels * found.bits // 8):
        raise RowFault(BROKEN, f"it has {found.stop - found.start} bytes of samples")
    return found
