"""Made-up videos, and what `transformers` makes of them without torchvision.

The processor of the oracle is transformers' own, with a video processor in its place that gives every frame to the processor's
image processor: an image is a video of two equal frames. Videos must have a size that needs no resize.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.media.media_processor import MediaProcessor


def mp4(
    frames: int,
    width: int = 84,
    height: int = 56,
    fps: int = 4,
    seed: int = 0,
    kind: str = "mp4",
    turned: int = 0,
) -> bytes:
    """A video of colors that move."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    pictures = []
    for number in range(frames):
        large = np.kron(np.roll(coarse, number, axis=1), np.ones((height // 4, width // 4, 1), np.uint8))
        pictures.append(np.pad(large, [(0, height % 4), (0, width % 4), (0, 0)]))
    return encoded(pictures, fps, kind, turned)


def mp4_of(color: tuple[int, int, int], frames: int) -> bytes:
    """A video of one color, 56 x 56."""
    return encoded([np.full((56, 56, 3), color, np.uint8)] * frames, 4)


def encoded(pictures: Sequence[Any], fps: int, kind: str = "mp4", turned: int = 0) -> bytes:
    """A video of some frames; WebM is VP8, anything else H.264."""
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("libvpx" if kind == "webm" else "libx264", rate=fps)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1  # the bytes of several threads depend on their timing
        if turned:
            stream.set_display_rotation(turned)
        for picture in pictures:
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def seen(data: bytes, fps: float = 2.0) -> np.ndarray[Any, Any]:
    """[T, H, W, 3]: frames of a video, taken and decoded by transformers."""
    from transformers.video_utils import default_sample_indices_fn, load_video

    def even(metadata: Any) -> Any:
        wanted = min(max(int(metadata.total_num_frames / metadata.fps * fps), 4), metadata.total_num_frames)
        return default_sample_indices_fn(metadata, num_frames=wanted // 2 * 2)

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(data)
        file.flush()
        frames, metadata = load_video(file.name, backend="pyav", sample_indices_fn=even)
    found = np.asarray(frames).view(Frames)
    found.metadata = metadata
    return found


class Frames(np.ndarray[Any, Any]):
    """Frames that know what transformers says of where they were taken."""

    metadata: Any = None


class FrameByFrame:
    """The video processor of the oracle."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, images: Any) -> None:
        self._images, self.merge_size = images, images.merge_size
        self.temporal_patch_size = images.temporal_patch_size

    def __call__(self, videos: Sequence[Any], **options: Any) -> dict[str, Any]:
        found, grids = [], []
        for video in videos:
            made = [self._images(images=[frame], do_resize=False, return_tensors="np") for frame in video]
            (_, rows, columns) = made[0]["image_grid_thw"][0].tolist()
            side = self._images.patch_size
            # [frames, patches, channels, 2 equal moments, side, side]
            tiles = np.stack([one["pixel_values"].reshape(rows * columns, 3, 2, side, side) for one in made])
            pairs = np.stack([tiles[0::2, :, :, 0], tiles[1::2, :, :, 1]], axis=3)
            found.append(pairs.reshape(-1, 3 * 2 * side * side))
            grids.append([len(video) // 2, rows, columns])
        metadata = [video.metadata for video in videos]
        arrays = {"pixel_values_videos": np.concatenate(found), "video_grid_thw": np.array(grids)}
        return {**arrays, "video_metadata": metadata} if options.get("return_metadata") else arrays


def oracle(folder: Path) -> Any:
    """The processor of a folder, with videos."""
    hf = MediaProcessor.load(str(folder)).hf
    hf.video_processor = FrameByFrame(hf.image_processor)
    return hf
