"""An encoded video: what its container says of it, and its frames.

Read are MP4, MOV, WebM, Matroska and AVI, through PyAV, whose wheels bring FFmpeg along.

| in the file | as frames |
|---|---|
| several video streams | the first |
| a rotation (phones) | applied: frames are upright |
| an edit list (trimmed) | frames that it leaves out are not counted |
| any pixel format | RGB, 8 bits |
| sound, subtitles | not read |

Always true:
- frames are counted by the container's packets, and no frame but the first is decoded for it;
- frames come in the order in which they are shown, and frame n is the one that n frames are shown before;
- what is not a video, is cut off, too long or too large is a `RowFault`; damage inside of a file is found when it is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.chat.row_errors import RowFault
from raysvc.errors import ConfigError

BROKEN = "a video is broken"
TOO_LONG = "a video is too long"
TOO_LARGE = "a video has too many pixels"
NOT_READ = "a medium is not a video that is read"
MAX_FRAMES = 1 << 17  # 73 minutes of 30 frames a second: all of them are decoded to take some
MAX_FRAME_PIXELS = 1 << 25  # of one frame: 8K
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"


class VideoSize(NamedTuple):
    """Holds what decides the tokens of a video: its frames, their upright width and height, and frames a second as a fraction."""

    frames: int
    width: int
    height: int
    rate: int
    rate_base: int

    @property
    def fps(self) -> float:
        """Frames a second."""
        return self.rate / self.rate_base


class EncodedVideo(NamedTuple):
    """A video that can be decoded."""

    data: bytes
    size: VideoSize

    def frames(self, wanted: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """[height, width, 3] of some frames.

        Args:
            wanted: their numbers, ascending; a number may stand there twice.

        Raises:
            RowFault: they cannot be decoded.
        """
        left, last = list(wanted), -1
        with _opened(self.data) as (container, stream):
            stream.thread_type = "NONE"  # a collator has one CPU
            for last, frame in enumerate(container.decode(stream)):
                while left and left[0] == last:
                    left.pop(0)
                    yield _upright(frame)
                if not left:
                    return
        raise RowFault(BROKEN, f"frame {left[0]} of {self.size.frames} cannot be decoded; {last + 1} can")


def check_av() -> None:
    """Refuse to go on without PyAV.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import av  # noqa: F401
    except ImportError:
        what = "its rows have videos, and PyAV is not installed"
        raise ConfigError("source", what, "pip install 'raysvc[video]'") from None


def video_size(data: bytes) -> VideoSize:
    """Size of an encoded video.

    Raises:
        RowFault: it is broken, too long, too large, or not a video.
    """
    with _opened(data) as (container, stream):
        if stream.width * stream.height > MAX_FRAME_PIXELS:
            what = f"{stream.width} x {stream.height}, the limit is {MAX_FRAME_PIXELS} a frame"
            raise RowFault(TOO_LARGE, what)
        count, there, said = 0, 0, int(stream.frames)
        for packet in container.demux(stream):
            there += bool(packet.size)
            count += bool(packet.size) and not packet.is_discard  # an edit list leaves frames out
            if packet.is_corrupt:
                raise RowFault(BROKEN, f"packet {there} is damaged or cut off")
            if max(there, said) > MAX_FRAMES:
                raise RowFault(TOO_LONG, f"it has more than {MAX_FRAMES} frames")
        if there < said:
            raise RowFault(BROKEN, f"it is cut off: {there} of {said} frames are there")
        rate = stream.average_rate or stream.guessed_rate
    if not count or not rate or rate <= 0:
        raise RowFault(BROKEN, f"it has {count} frames, {rate or 0} a second")
    first = next(EncodedVideo(data, VideoSize(count, 0, 0, 1, 1)).frames([0]))
    fps = Fraction(rate)
    return VideoSize(count, first.shape[1], first.shape[0], fps.numerator, fps.denominator)


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """(container, its first video stream); errors of FFmpeg inside become faults of the row."""
    import av

    if not data:
        raise RowFault(BROKEN, "it has no bytes")
    kind, end = _container(data)
    if end > len(data):  # FFmpeg would read what is there
        raise RowFault(BROKEN, "it is cut off")
    try:
        # the name of its format: some formats of FFmpeg open other files and URLs that the bytes name
        with av.open(io.BytesIO(data), format=kind) as container:
            if not container.streams.video:
                raise RowFault(NOT_READ, f"a {kind} file without a video stream")
            yield container, container.streams.video[0]
    except av.error.FFmpegError as error:
        raise RowFault(BROKEN, str(error.strerror)[:120]) from None


def _container(data: bytes) -> tuple[str, int]:
    """(FFmpeg's name of the format, where the file says that it ends or 0)."""
    if data[4:8] == b"ftyp":
        return "mov", _end_of_boxes(data)
    if data[:4] == _EBML:
        return "matroska", _end_of_matroska(data)
    if data[:4] == b"RIFF" and data[8:11] == b"AVI":
        return "avi", 0
    raise RowFault(NOT_READ, f"it begins with {data[:12]!r}")


def _end_of_boxes(data: bytes) -> int:
    """Returns where the last box of an MP4 or MOV file says that it ends."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16])
        if size < 8:  # 0: up to the end
            return len(data)
        at += size
    return at


def _end_of_matroska(data: bytes) -> int:
    """Returns where the segment of a WebM or Matroska file says that it ends; 0 where it does not say."""
    at = 0
    for name in (_EBML, _SEGMENT):
        if data[at : at + 4] != name or len(data) < at + 12:
            return 0
        width = 9 - data[at + 4].bit_length()  # of the number: as many bits before the first 1, and one more
        size = int.from_bytes(data[at + 4 : at + 4 + width]) & ((1 << 7 * width) - 1)
        if size == (1 << 7 * width) - 1:
            return 0
        at += 4 + width + size
    return at


def _upright(frame: Any) -> npt.NDArray[np.uint8]:
    turned: npt.NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    quarters, odd = divmod(round(frame.rotation), 90)
    if odd:
        raise RowFault(BROKEN, f"it is turned by {frame.rotation} degrees")
    return np.ascontiguousarray(np.rot90(turned, quarters)) if quarters % 4 else turned
