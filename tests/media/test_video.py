"""Videos: sizes by containers, frames against transformers' decoder, and patches against its video processor."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.chat.row_errors import RowFault
from raysvc.media.video import BROKEN, NOT_READ, TOO_LARGE, TOO_LONG, EncodedVideo, VideoSize, video_size
from raysvc.media.video_patches import VideoPatches

from .rows import jpeg, wav
from .videos import mp4

pytest.importorskip("av")

# What Qwen2VLVideoProcessor of transformers 5.23 with torchvision 0.28 gives for the same noise (20 frames, 5 a second):
# width, height, config, frames taken, grid, sha256 of the patches.
PATCHES: list[tuple[int, int, dict[str, Any], list[int], tuple[int, int, int], str]] = [
    (96, 64, {}, [0, 2, 5, 7, 10, 12, 15, 17], (4, 20, 28), "392ca7c5a3a259e5"),
    (60, 44, {"min_pixels": 3136, "max_pixels": 12544}, [0, 2, 5, 7, 10, 12, 15, 17], (4, 4, 4), "152ff7d12d7fea1d"),
    (
        200, 90,
        {"min_pixels": 3136, "max_pixels": 602112, "cap_pixels_per_frame": True, "max_video_tokens": 60},
        [0, 2, 5, 7, 10, 12, 15, 17], (4, 4, 10), "a433e4dd426fd556",
    ),
    (
        33, 170, {"temporal_patch_size": 4, "size": {"shortest_edge": 3136, "longest_edge": 100352}},
        [0, 2, 5, 7, 10, 12, 15, 17], (2, 12, 2), "ed1fe55d0c7300a5",
    ),
    (
        640, 360, {"resample": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.5]},
        [0, 2, 5, 7, 10, 12, 15, 17], (4, 26, 46), "c7e2e0e465f6fb80",
    ),
]  # fmt: skip
# frames, frames a second, and of the frames that it takes: how many, their sum, the last
TAKEN = [
    (5, 30.0, 4, 6, 3),
    (21, 8.0, 4, 30, 15),
    (47, 24.0, 4, 69, 35),
    (331, 29.97, 22, 3465, 315),
    (100, 7.0, 28, 1338, 96),
    (9000, 25.0, 720, 3235320, 8987),
    (30000, 30.0, 768, 11504640, 29960),
    (63, 3.0, 42, 1281, 61),
]


class Noise(EncodedVideo):
    """Frames that no codec has touched."""

    __slots__ = ()

    def frames(self, wanted: Sequence[int]) -> Iterator[Any]:
        shape = (self.size.frames, self.size.height, self.size.width, 3)
        rng = np.random.default_rng((self.size.width, self.size.height))
        yield from rng.integers(0, 256, shape, np.uint8)[wanted]


@pytest.mark.parametrize(("width", "height", "config", "taken", "grid", "digest"), PATCHES)
def test_patches_are_those_of_the_video_processor(
    width: int, height: int, config: dict[str, Any], taken: list[int], grid: tuple[int, int, int], digest: str
) -> None:
    patches, size = VideoPatches(config), VideoSize(20, width, height, 5, 1)
    assert patches.sampled(size) == taken
    assert patches.grid(len(taken), width, height) == grid
    made = patches.arrays([Noise(b"", size)])
    assert made["video_grid_thw"].tolist() == [list(grid)]
    assert made["pixel_values_videos"].dtype == np.float32
    assert hashlib.sha256(made["pixel_values_videos"].tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize(("frames", "fps", "count", "total", "last"), TAKEN)
def test_the_frames_that_are_taken_are_those_of_the_video_processor(
    frames: int, fps: float, count: int, total: int, last: int
) -> None:
    rate = round(fps * 100)
    found = VideoPatches({}).sampled(VideoSize(frames, 96, 64, rate, 100))
    assert (len(found), sum(found), found[-1]) == (count, total, last)
    assert VideoPatches({"num_frames": 7}).sampled(VideoSize(50, 9, 9, 10, 1)) == [
        0,
        6,
        12,
        18,
        25,
        31,
        37,
        43,
    ]
    assert VideoPatches({"fps": 1}).sampled(VideoSize(50, 9, 9, 10, 1)) == [0, 12, 25, 37]


@pytest.mark.parametrize(
    "config",
    [
        {"do_resize": False},
        {"do_center_crop": True},
        {"video_processor_type": "LlavaOnevisionVideoProcessor"},
        {"size": {"height": 9, "width": 9}},
        {"resample": 0},
    ],
)
def test_a_setting_that_is_not_known_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are not read"):
        VideoPatches(config)


@pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "webm"])
def test_size_and_frames_are_those_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    from transformers.video_utils import load_video

    data = mp4(21, 96, 64, fps=8, kind=kind)
    size = video_size(data)
    assert size == VideoSize(21, 96, 64, 8, 1)
    wanted = [0, 3, 3, 4, 20]
    (tmp_path / "a.mp4").write_bytes(data)
    truth, _ = load_video(str(tmp_path / "a.mp4"), sample_indices_fn=lambda metadata: np.arange(21))
    np.testing.assert_array_equal(np.stack(list(EncodedVideo(data, size).frames(wanted))), truth[wanted])
    assert len(truth) == 21


@pytest.mark.parametrize("turned", [90, 180, -90])
def test_a_video_is_upright_by_the_matrix_of_its_track(turned: int) -> None:
    """ISO 14496-12 (6.2.2): (x, y) is shown at (a x + c y, b x + d y), moved back into the picture."""
    import av

    data = mp4(4, 96, 64, turned=turned)
    at = data.index(b"tkhd") + 4 + 40
    a, b, _, c, d = (value / 65536 for value in struct.unpack(">5i", data[at : at + 20]))
    with av.open(io.BytesIO(data)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    height, width = frame.shape[:2]
    y, x = np.mgrid[:height, :width]
    column, row = np.round(a * x + c * y).astype(int), np.round(b * x + d * y).astype(int)
    upright = np.zeros((np.ptp(row) + 1, np.ptp(column) + 1, 3), np.uint8)
    upright[row - row.min(), column - column.min()] = frame
    size = video_size(data)
    (found,) = EncodedVideo(data, size).frames([0])
    assert found.shape[:2] == (size.height, size.width)
    np.testing.assert_array_equal(found, upright)


@pytest.mark.parametrize(
    ("begin", "seconds"), [(2048, 2.0), (5048, 2.0), (12048, 0.5), (2048, 0.1), (0, 2.0)]
)
def test_frames_that_an_edit_list_leaves_out_are_not_counted(begin: int, seconds: float) -> None:
    """ISO 14496-12 (8.6.6): the list of one edit says at which media time it begins, and how long it is. FFmpeg's decoder is the oracle."""
    import av

    data = bytearray(mp4(20, fps=10))
    at = data.index(b"elst") + 12
    assert struct.unpack(">Ii", data[at : at + 8]) == (2000, 2048)
    data[at : at + 8] = struct.pack(">Ii", int(seconds * 1000), begin)
    with av.open(io.BytesIO(data)) as container:
        truth = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    size = video_size(bytes(data))
    assert size.frames == len(truth)
    assert len(truth) < 20 or begin == 2048
    np.testing.assert_array_equal(list(EncodedVideo(bytes(data), size).frames(range(len(truth)))), truth)


@pytest.mark.parametrize("kind", ["mp4", "matroska", "webm"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.9, 0.995])
def test_a_video_that_is_cut_off_is_found_by_its_container(kind: str, share: float) -> None:
    data = mp4(21, kind=kind)
    with pytest.raises(RowFault) as caught:
        video_size(data[: int(len(data) * share)])
    assert caught.value.reason == BROKEN


def test_what_is_no_video_is_a_fault_of_its_kind() -> None:
    for data in (
        b"hello",
        jpeg(60, 44),
        wav(800),
        b"<html>",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n",
        b"ffconcat version 1.0\nfile a.mp4\n",
    ):
        with pytest.raises(RowFault) as caught:
            video_size(data)
        assert caught.value.reason == NOT_READ, data[:8]


def test_too_many_frames_or_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = mp4(21, 96, 64)
    monkeypatch.setattr("raysvc.media.video.MAX_FRAMES", 21)
    monkeypatch.setattr("raysvc.media.video.MAX_FRAME_PIXELS", 96 * 64)
    assert video_size(data).frames == 21
    monkeypatch.setattr("raysvc.media.video.MAX_FRAMES", 20)
    with pytest.raises(RowFault) as caught:
        video_size(data)
    assert caught.value.reason == TOO_LONG
    monkeypatch.setattr("raysvc.media.video.MAX_FRAME_PIXELS", 96 * 64 - 1)
    with pytest.raises(RowFault) as caught:
        video_size(data)
    assert caught.value.reason == TOO_LARGE


def test_a_frame_that_is_not_there_is_a_fault_when_it_is_decoded() -> None:
    data = mp4(8)
    with pytest.raises(RowFault, match="frame 9 of 8 cannot be decoded; 8 can"):
        list(EncodedVideo(data, video_size(data)).frames([0, 9]))
