"""WAV files: their length and their samples, held against the standard library's reader and against what was written."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.chat.row_errors import RowFault
from raysvc.media.sound import sound_size, waveform

from .rows import wav


def written(
    values: np.ndarray, rate: int, code: int, bits: int, extra: bytes = b"", extensible: bool = False
) -> bytes:
    """A WAV of samples [N, channels] as they are, with another chunk before them."""
    channels = values.shape[1]
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * block, block, bits)
    if extensible:
        form += (
            struct.pack("<HHIH", 22, bits, 0, code)
            + b"\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"
        )
    body = b""
    for name, data in ((b"fmt ", form), (b"LIST", extra), (b"data", values.tobytes())):
        body += name + struct.pack("<I", len(data)) + data + b"\x00" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


@given(
    width=st.sampled_from([1, 2, 3, 4]),
    channels=st.integers(1, 3),
    rate=st.sampled_from([8000, 16000, 44100]),
    values=st.binary(min_size=1, max_size=200),
)
def test_pcm_is_what_the_standard_library_reads(width: int, channels: int, rate: int, values: bytes) -> None:
    raw = values * (width * channels)  # whole frames
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    with wave.open(io.BytesIO(out.getvalue())) as file:
        frames, told = file.readframes(file.getnframes()), file.getnframes()
    numbers = [
        int.from_bytes(frames[at : at + width], "little", signed=width > 1) - (128 if width == 1 else 0)
        for at in range(0, len(frames), width)
    ]
    truth = np.array(numbers, np.float64).reshape(-1, channels).mean(axis=1) / 2 ** (8 * width - 1)
    assert sound_size(out.getvalue()) == (told, rate)
    np.testing.assert_array_equal(waveform(out.getvalue()), truth.astype(np.float32))


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("bits", [32, 64])
def test_floats_are_taken_as_they_are_and_channels_as_their_mean(bits: int, extensible: bool) -> None:
    values = np.random.default_rng(0).normal(size=(7, 2)).astype(f"<f{bits // 8}")
    data = written(values, 16000, 3, bits, b"odd", extensible)
    assert sound_size(data) == (7, 16000)
    np.testing.assert_allclose(waveform(data), values.astype(np.float64).mean(axis=1).astype(np.float32))


def test_extensible_pcm_is_pcm() -> None:
    values = np.array([[1], [-2], [300]], "<i2")
    data = written(values, 16000, 1, 16, extensible=True)
    np.testing.assert_array_equal(waveform(data), (values[:, 0] / 32768).astype(np.float32))


GOOD = wav(1000)
BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no bytes"),
    "half a header": (GOOD[:10], "cut off"),
    "no samples yet": (GOOD[:40], "cut off"),
    "cut off": (GOOD[:-2], "cut off"),
    "a stream without length": (GOOD[:40] + b"\xff\xff\xff\xff" + GOOD[44:], "cut off"),
    "empty": (wav(0), "0 bytes of samples"),
    "half a sample": (GOOD[:40] + struct.pack("<I", 1999) + GOOD[44:], "1999 bytes of samples"),
    "no channels": (GOOD[:22] + b"\x00\x00" + GOOD[24:], "0 channels"),
    "no rate": (GOOD[:24] + bytes(4) + GOOD[28:], "0 samples a second"),
    "samples first": (GOOD[:12] + GOOD[36:] + GOOD[12:36], "before their format"),
    "not a number": (written(np.array([[0.0], [np.nan]], "<f4"), 16000, 3, 32), "not a number"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_says_how(name: str) -> None:
    data, why = BROKEN[name]
    with pytest.raises(RowFault) as fault:
        sound_size(data)
    assert fault.value.reason == "an audio clip is broken"
    assert why in fault.value.detail


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"ID3\x04" + bytes(40), "it is MP3; convert it: ffmpeg"),
        (b"fLaC" + bytes(40), "it is FLAC; convert it: ffmpeg"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "begin like no sound"),
        (b"RIFF\x10\x00\x00\x00WEBP" + bytes(40), "begin like no sound"),
        (GOOD[:20] + b"\x55\x00" + GOOD[22:], "of format 85 with 16 bits"),
        (GOOD[:34] + b"\x0c\x00" + GOOD[36:], "of format 1 with 12 bits"),
    ],
)
def test_another_kind_is_refused_with_what_it_is(data: bytes, why: str) -> None:
    with pytest.raises(RowFault) as fault:
        sound_size(data)
    assert fault.value.reason == "a medium is not audio that is read (WAV)"
    assert why in fault.value.detail


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_a_size_or_a_fault(noise: bytes, at: int) -> None:
    data = GOOD[:at] + noise + GOOD[at + len(noise) : 200]
    try:
        size = sound_size(data)
    except RowFault:
        return
    assert len(waveform(data)) == size.samples
