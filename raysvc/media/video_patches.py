"""The frames of a video -> what Qwen2-VL and Qwen2.5-VL get of it, in the numbers of `transformers`' Qwen2VLVideoProcessor.

That class needs torchvision, which few machines of a data service have. Here only torch's resize is needed, inside a function.

Axes: T frames taken, C channels, H and W pixels of the resized frame, P patches, V videos.
1. Frames: `fps` or `num_frames` of the processor's config; where it says neither, 2 frames a second, at least 4 and at most 768
   (`min_frames`, `max_frames`), in an even number, evenly spread over all frames.
2. Height and width: the nearest multiples of a merged patch, within the pixels of a frame that the config allows.
3. Each frame is resized (uint8, antialiased), scaled and normalized; the last is repeated until time is whole patches.

Always true:
- the frames that are taken, the grid and the patches are those of the processor itself for `do_sample_frames=True, fps=2`;
- a setting that these rules do not know is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.media.video import EncodedVideo, VideoSize

PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")  # classes of processors that have such videos
FPS = 2.0
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
_DEFAULTS: dict[str, Any] = {  # of the class
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "fps": None,
    "num_frames": None,
    "cap_pixels_per_frame": None,
    "max_video_tokens": 128000,
}
_ALWAYS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_ALWAYS |= {"do_center_crop": False, "do_pad": False, "default_to_square": True}


class VideoPatches:
    """See the module.

    Args:
        config: what the files of the processor say of videos.

    Raises:
        ValueError: a setting is not one that is known here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("video_processor_type", "Qwen2VLVideoProcessor")
        if kind != "Qwen2VLVideoProcessor":
            raise ValueError(f"videos of a {kind} are not read")
        for name, value in _ALWAYS.items():
            if config.get(name) not in (None, value):
                raise ValueError(f"videos with {name}: {config[name]} are not read")
        found = {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
        self.settings: dict[str, Any] = {**_DEFAULTS, **found}
        size = dict(self.settings["size"])
        for ours, theirs in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if config.get(theirs) is not None:
                size[ours] = config[theirs]
        size = {name: size.get(name) for name in ("shortest_edge", "longest_edge")}
        if not all(size.values()) or self.settings["resample"] not in _RESAMPLE:
            raise ValueError(f"videos of size {size}, resample {self.settings['resample']} are not read")
        self.settings["size"] = size

    def sampled(self, size: VideoSize) -> list[int]:
        """[T], rule 1: numbers of frames, ascending.

        Raises:
            ValueError: the video has too few frames.
        """
        import torch

        own, total = self.settings, size.frames
        whole = own["temporal_patch_size"]
        if own["num_frames"] is not None:
            count = round(own["num_frames"] / whole) * whole
        else:
            most = math.floor(min(own["max_frames"], total) / whole) * whole
            asked = total / size.fps * (own["fps"] or FPS)
            count = math.floor(min(max(asked, own["min_frames"]), most, total) / whole) * whole
        if not 0 < count <= total:
            raise ValueError(f"it has {total} frames, of which {max(count, whole)} should be taken")
        # its step is a float32, so that other arithmetic would take other frames
        places: list[int] = torch.arange(0, total, total / count).int().tolist()
        return places

    def grid(self, num_frames: int, width: int, height: int) -> tuple[int, int, int]:
        """(time, height, width) in patches of T frames.

        Raises:
            ValueError: the frames are too narrow.
        """
        rows, columns = self._resized(num_frames, width, height)
        patch, whole = self.settings["patch_size"], self.settings["temporal_patch_size"]
        return -(-num_frames // whole), rows // patch, columns // patch

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Returns the tokens of a video."""
        merge: int = self.settings["merge_size"]
        return math.prod(grid) // merge**2

    def arrays(self, videos: Sequence[EncodedVideo]) -> dict[str, npt.NDArray[Any]]:
        """`pixel_values_videos` float32 [P, C x time x patch x patch], `video_grid_thw` int64 [V, 3], and
        `second_per_grid_ts` float32 [V], the seconds of a patch, which Qwen2.5-VL takes.

        Raises:
            RowFault: a video cannot be decoded.
        """
        made = [self._patches(one) for one in videos]
        return {
            "pixel_values_videos": np.concatenate([patches for patches, _ in made]),
            "video_grid_thw": np.array([grid for _, grid in made], np.int64),
            "second_per_grid_ts": np.array([self._seconds(one.size) for one in videos], np.float32),
        }

    def _seconds(self, size: VideoSize) -> float:
        taken = len(self.sampled(size)) / size.frames * size.fps
        return float(self.settings["temporal_patch_size"] / taken)

    def _resized(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Rule 2: (height, width) in pixels."""
        own = self.settings
        step: int = own["patch_size"] * own["merge_size"]
        least, most = own["size"]["shortest_edge"], own["size"]["longest_edge"]
        if own["cap_pixels_per_frame"]:
            budget = int(own["max_video_tokens"] * step * step * 0.9)
            most = max(min(most, budget * own["temporal_patch_size"] // num_frames), int(least * 1.05))
        if max(height, width) / min(height, width) > 200:
            raise ValueError(f"its sides are 1 to {max(height, width) / min(height, width):.0f}")
        rows, columns = round(height / step) * step, round(width / step) * step
        if rows * columns > most:
            by = math.sqrt(height * width / most)
            rows, columns = (max(step, math.floor(side / by / step) * step) for side in (height, width))
        elif rows * columns < least:
            by = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * by / step) * step for side in (height, width))
        return rows, columns

    def _patches(self, video: EncodedVideo) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
        """Rule 3."""
        import torch

        own, size = self.settings, video.size
        wanted = self.sampled(size)
        shape = self._resized(len(wanted), size.width, size.height)
        mean, std = (
            torch.tensor(own[name]) * (1.0 / own["rescale_factor"]) for name in ("image_mean", "image_std")
        )
        frames = []
        for frame in video.frames(wanted):
            pixels = torch.from_numpy(frame).permute(2, 0, 1).contiguous()[None]
            if pixels.shape[2:] != shape:
                mode = _RESAMPLE[own["resample"]]
                pixels = torch.nn.functional.interpolate(pixels, shape, mode=mode, antialias=True)
            frames.append(pixels.float().sub_(mean[:, None, None]).div_(std[:, None, None])[0].numpy())
        time, rows, columns = grid = self.grid(len(frames), size.width, size.height)
        whole, patch, merge = own["temporal_patch_size"], own["patch_size"], own["merge_size"]
        frames += [frames[-1]] * (time * whole - len(frames))
        tiles = np.stack(frames).reshape(
            time, whole, 3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        # time, merged row, merged column, row and column inside; then channel, time inside, and pixels
        flat = tiles.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1)
        return np.ascontiguousarray(flat), grid
