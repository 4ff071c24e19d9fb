"""A `transformers` processor: how many tokens a medium takes, and the arrays that a model gets of it.

1. The processor is loaded from the files beside the tokenizer, with its image processor on numpy and Pillow (`pil`): every
   node makes the same pixels, whether torchvision is there or not. Videos go through `VideoPatches` in place of its video
   processor.
2. The text that replaces the placeholder of an image follows from its size. Where some probes show that it is the image
   token, as often as `_get_num_multimodal_tokens` says, only that is asked. Any other processor is given a blank image of
   the size, once for each size.
3. The text that replaces the placeholder of an audio clip is asked for silence of its length, once for each length: up to the
   next whole hop of the features, where some probes show that only hops count.
4. Arrays of images hold tiles, one after the other, where the processor cuts images into some: LLaVA-NeXT is asked for one image
   at a time, so that none is filled up to the tiles of another, and the axis of Idefics3's one text is taken away.
5. The placeholder of a video is repeated once for each merged patch of the frames that are taken.

Always true:
- a text with its placeholders replaced has the ids that the processor itself gives for the same media;
- the identity says what decides texts and pixels: classes and their settings, never a path;
- nothing is decoded to count tokens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.errors import TokenizerError
from raysvc.media.kinds import WORDS, Kind
from raysvc.media.video import EncodedVideo, VideoSize
from raysvc.media.video_patches import PROCESSORS, VideoPatches

CONFIGS = ("processor_config.json", "preprocessor_config.json")
VIDEO_CONFIG = "video_preprocessor_config.json"
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
PIXELS, MASK, SIZES = "pixel_values", "pixel_attention_mask", "image_sizes"
PROBES = ((64, 64), (640, 480), (480, 640), (1000, 90), (31, 700))  # width, height
SIZES_KEPT = 1 << 16
MODELS_PAGE = "docs/howto/vision.md"
_WHERE = "tokenizer"


class ProcessorFault(ValueError):
    """Says what a processor raised, or a medium that it does not take; `str` is its first line."""


@contextmanager
def _asked() -> Iterator[None]:
    """Around what the processor itself does: an error of ours stays what it is.

    Raises:
        ProcessorFault: the processor raised something, or gave something else than it should.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        raise ProcessorFault(str(error).strip().split("\n")[0]) from error


class Replacement(NamedTuple):
    """Holds what stands for one medium.

    Attributes:
        text: instead of its placeholder.
        tokens: of its kind in it.
        patches: encoder work, in the processor's own unit.
    """

    text: str
    tokens: int
    patches: int


def has_processor(name: str, revision: str | None = None) -> bool:
    """Returns whether a tokenizer's folder or hub name has a processor."""
    return any(_config(name, each, revision) is not None for each in CONFIGS)


class MediaProcessor:
    """A loaded processor.

    Attributes:
        hf: the `transformers` processor.
        kinds: of the media that it is used for.
        tokens: kind -> placeholder of such a medium in a rendered text.
        token_ids: kind -> its id.
    """

    def __init__(self, hf: Any, kinds: Sequence[Kind], video: VideoPatches | None = None) -> None:
        """Use `MediaProcessor.load`, which says what is raised."""
        self.hf, self.kinds, self._video = hf, tuple(kinds), video
        self.tokens: dict[Kind, str] = {kind: str(getattr(hf, f"{kind}_token")) for kind in self.kinds}
        ids = {kind: hf.tokenizer.convert_tokens_to_ids(token) for kind, token in self.tokens.items()}
        for kind, token in self.tokens.items():
            if ids[kind] is None:
                what = f"the tokenizer has no {token!r}, which {type(hf).__name__} puts for {WORDS[kind].one}"
                raise TokenizerError(_WHERE, what, "use the tokenizer that belongs to the processor")
        self.token_ids: dict[Kind, int] = ids
        self._silent: dict[int, Replacement] = {}  # by samples: no more than the hops of the longest clip
        self.replacement = lru_cache(SIZES_KEPT)(self._replacement)

    @classmethod
    def load(
        cls,
        name: str,
        revision: str | None = None,
        trust_remote_code: bool = False,
        kinds: Collection[Kind] = (),
        shown: Collection[Kind] = (),
    ) -> MediaProcessor:
        """The processor of a folder or hub name.

        Args:
            name: folder or hub name.
            revision: of the hub.
            trust_remote_code: whether code beside the files may run.
            kinds: to use it for; none: images, or audio where it takes no images, and what else is `shown`.
            shown: what rows seem to have; where the processor does not take it, it is not used for it.

        Raises:
            TokenizerError: there is none, it cannot be loaded, or it does not take such media.
        """
        from raysvc import hub

        try:
            with hub.answering():
                hf = _load(name, revision, trust_remote_code)
                taken = _taken(hf)
                used = [kind for kind in taken if kind in (kinds or {taken[0], *shown})]
                video = VideoPatches(_video_config(name, revision)) if "video" in used else None
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            first = str(error).strip().split("\n")[0]
            raise TokenizerError(
                _WHERE,
                f"the processor of {name!r} could not be loaded ({type(error).__name__}: {first})",
                "install what it names"
                if isinstance(error, ImportError)
                else "save it beside the tokenizer with processor.save_pretrained",
            ) from error
        missing = [WORDS[kind].many for kind in kinds if kind not in taken]
        if missing or not taken:
            raise TokenizerError(
                _WHERE,
                f"the processor of {name!r} ({type(hf).__name__}) takes no {' or '.join(missing) or 'images or audio'}",
                "use a model that takes such media, or leave them out with source.ignore",
            )
        return cls(hf, used, video)

    @property
    def chat_template(self) -> Any:
        """Template text, name -> text, or None."""
        return getattr(self.hf, "chat_template", None)

    def check(self) -> None:
        """Refuse a processor whose arrays of two media are not those of each, one after the other, as shards hold them.

        Raises:
            TokenizerError: they are not, or it does not say what a placeholder becomes.
        """
        for kind in self.kinds:
            if kind != "video":  # `VideoPatches` makes its arrays
                fault = self._fault(kind)
                if fault:
                    what = f"{type(self.hf).__name__} {fault}"
                    raise TokenizerError(_WHERE, what, f"use one of the models of {MODELS_PAGE}")

    def _fault(self, kind: Kind) -> str:
        """Returns what is wrong with the arrays of a kind; "" where nothing is."""
        try:
            for size in _trials(kind, self)[1]:
                self.replacement(kind, *size)
            media: list[tuple[Kind, Any]] = [(kind, one) for one in _trials(kind, self)[0]]
            each, both = [self.arrays([one]) for one in media], self.arrays(media)
        except ProcessorFault as error:
            name = type(error.__cause__ or error).__name__
            return f"does not say what {WORDS[kind].one} becomes ({name}: {str(error)[:120]})"
        for name, value in both.items():
            pieces = [one[name] for one in each if name in one]
            shapes = sorted({piece.shape[1:] for piece in pieces})
            if len(shapes) > 1:
                return f"gives {name} of shapes {', '.join(str(list(one)) for one in shapes)}, which do not lie in one array"
            if len(pieces) < len(each) or not np.array_equal(value, np.concatenate(pieces)):
                return f"gives other {name} for two {WORDS[kind].many} than for each of them"
        return ""

    def identity(self) -> dict[str, Any]:
        """Returns what decides texts and pixels, as JSON."""
        own = {key: value for key, value in self.hf.to_dict().items() if key not in _ELSEWHERE}
        parts = {_IN_IDENTITY[kind]: self._settings(kind) for kind in self.kinds}
        found = {"processor": type(self.hf).__name__, "own": own, **parts}
        if self._tile_side:
            found["patches"] = "tiles"
        return dict(json.loads(json.dumps(found, sort_keys=True, default=str)))

    def _settings(self, kind: Kind) -> dict[str, Any]:
        if kind == "video":
            return self._videos.settings
        part = self.hf.image_processor if kind == "image" else self.hf.feature_extractor
        return {key: value for key, value in part.to_dict().items() if key not in _PATHS}

    def arrays(self, media: Sequence[tuple[Kind, Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns what the processor gives for media beside the ids of a text: `pixel_values`, `image_grid_thw`, `input_features`, ...

        Args:
            media: at least one with its kind, decoded; of one row, in the order of its placeholders.

        Raises:
            RowFault: a video cannot be decoded.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        others = [(kind, one) for kind, one in media if kind != "video"]
        if others:
            found = self._of_tiles(others) if self._tile_side else self._made(others)
            if MASK in found and found[PIXELS].ndim == 5:  # rule 4: [1 text, tiles, ...]
                found = {name: found[name][0] for name in found}
                found[MASK] = found[MASK].astype(np.uint8)  # an eighth of the bytes, of as many as pixels
        if len(others) < len(media):
            of_videos = self._videos.arrays([one for kind, one in media if kind == "video"])
            if "second_per_grid_ts" not in self.hf.model_input_names:
                del of_videos["second_per_grid_ts"]
            found |= of_videos
        return found

    def _made(self, media: Sequence[tuple[Kind, Any]]) -> dict[str, npt.NDArray[Any]]:
        text = "".join(self.tokens[kind] for kind, _ in media)
        given = self._arguments(media)
        with _asked():
            made = self.hf(text=[text], **given, return_tensors="np")
            return {name: np.asarray(value) for name, value in made.items() if name not in TEXT_KEYS}

    def _of_tiles(self, images: Sequence[tuple[Kind, Any]]) -> dict[str, npt.NDArray[Any]]:
        """Rule 4: `pixel_values` [tiles, C, H, W], and `image_sizes` [images, 2]."""
        each = [self._made([one]) for one in images]
        tiles = np.concatenate([one[PIXELS][0] for one in each])
        return {PIXELS: tiles, SIZES: np.concatenate([one[SIZES] for one in each])}

    @cached_property
    def _tile_side(self) -> int:
        """Pixels of a side of a tile of LLaVA-NeXT; 0 of any other processor."""
        if self.kinds != ("image",) or not hasattr(self.hf.image_processor, "image_grid_pinpoints"):
            return 0
        from PIL import Image

        found = self._made([("image", Image.new("RGB", PROBES[0]))])
        tiled = found.keys() == {PIXELS, SIZES} and found[PIXELS].ndim == 5
        return int(found[PIXELS].shape[-1]) if tiled else 0

    def blanks(self) -> dict[Kind, tuple[dict[str, npt.NDArray[Any]], int]]:
        """Kind -> (arrays of a small blank medium, its patches)."""
        from PIL import Image

        side, rate = PROBES[0][0], 1 if "audio" not in self.kinds else self._rate
        made: dict[Kind, tuple[Any, tuple[int, ...]]] = {
            "image": (lambda: Image.new("RGB", PROBES[0]), PROBES[0]),
            "audio": (lambda: np.zeros(rate, np.float32), (rate, rate)),
            "video": (lambda: _BlankVideo(b"", VideoSize(8, side, side, 2, 1)), (8, side, side, 2, 1)),
        }
        return {
            kind: (self.arrays([(kind, made[kind][0]())]), self.replacement(kind, *made[kind][1]).patches)
            for kind in self.kinds
        }

    def expanded(self, text: str, media: Sequence[tuple[Kind, Any]]) -> list[int]:
        """Ids of a rendered text with its decoded media, by the processor alone: what everything else is compared with.

        Raises:
            RowFault: a video cannot be decoded.
        """
        bos = self.hf.tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)  # as `apply_chat_template` of a processor does it
        videos = [one for kind, one in media if kind == "video"]
        if not videos:
            made = self.hf(text=[text], **self._arguments(media), add_special_tokens=not has_bos)
            return [int(token) for token in made["input_ids"][0]]
        token, grids = self.tokens["video"], self._videos.arrays(videos)["video_grid_thw"].tolist()
        of_videos = [token * self._videos.tokens(tuple(grid)) for grid in grids]
        images = [one for kind, one in media if kind == "image"]
        of_images = (
            self.hf._process_images(images, **self.hf._merge_kwargs()["images_kwargs"])[1] if images else []
        )
        (whole,), _ = self.hf.get_text_with_replacements([text], of_images, of_videos)
        return [int(token) for token in self.hf.tokenizer(whole, add_special_tokens=not has_bos)["input_ids"]]

    def _arguments(self, media: Sequence[tuple[Kind, Any]]) -> dict[str, Any]:
        by_kind = {kind: [one for other, one in media if other == kind] or None for kind in self.kinds}
        found: dict[str, Any] = {"images": by_kind["image"]} if "image" in by_kind else {}
        return (
            {**found, "audio": by_kind["audio"], "sampling_rate": self._rate} if "audio" in by_kind else found
        )

    def _replacement(self, kind: Kind, *size: int) -> Replacement:
        if kind == "video":
            return self._of_video(VideoSize(*size))
        return self._of_image(*size) if kind == "image" else self._of_audio(*size)

    @property
    def _videos(self) -> VideoPatches:
        assert self._video is not None
        return self._video

    def _of_video(self, size: VideoSize) -> Replacement:
        grid = self._videos.grid(len(self._videos.sampled(size)), size.width, size.height)
        tokens = self._videos.tokens(grid)
        return Replacement(self.tokens["video"] * tokens, tokens, math.prod(grid))

    def _of_image(self, width: int, height: int) -> Replacement:
        if self._is_plain:
            tokens, patches = self._counted(width, height)
            return Replacement(self.tokens["image"] * tokens, tokens, patches)
        text = self._by_blank(width, height)
        if self._counts:
            patches = self._counted(width, height)[1]
        else:
            made = self.arrays([("image", _blank_image(width, height))])
            with _asked():
                patches = len(made[PIXELS])
        return Replacement(text, text.count(self.tokens["image"]), patches)

    @property
    def _counts(self) -> bool:
        """Returns whether it counts tokens and patches; SmolVLM's does not."""
        return hasattr(self.hf, "_get_num_multimodal_tokens")

    @cached_property
    def _is_plain(self) -> bool:
        """Rule 2: the replacement is the image token, as often as the processor counts."""
        token = self.tokens["image"]
        return self._counts and all(
            self._by_blank(*size) == token * self._counted(*size)[0] for size in PROBES
        )

    def _counted(self, width: int, height: int) -> tuple[int, int]:
        with _asked():
            found = self.hf._get_num_multimodal_tokens(image_sizes=[(height, width)])
            tokens, patches = int(found["num_image_tokens"][0]), int(found["num_image_patches"][0])
        return tokens, self._tiles(width, height) if self._tile_side else patches

    def _tiles(self, width: int, height: int) -> int:
        """Those of an image of LLaVA-NeXT, which itself counts 1: a whole view, and the cells of its grid."""
        from transformers.image_processing_utils import select_best_resolution

        grid = select_best_resolution((height, width), self.hf.image_processor.image_grid_pinpoints)
        return 1 + math.prod(int(side) // self._tile_side for side in grid)

    def _by_blank(self, width: int, height: int) -> str:
        blank = _blank_image(width, height)
        with _asked():
            return str(self.hf._process_images([blank], **self.hf._merge_kwargs()["images_kwargs"])[1][0])

    @property
    def _rate(self) -> int:
        return int(self.hf.feature_extractor.sampling_rate)

    def _of_audio(self, samples: int, rate: int) -> Replacement:
        if rate != self._rate:
            raise ProcessorFault(
                f"the processor takes {self._rate} Hz: ffmpeg -i IN -ar {self._rate} OUT.wav"
            )
        most = getattr(self.hf.feature_extractor, "n_samples", None)
        if most is not None and samples > most:
            raise ProcessorFault(f"the processor hears the first {most / rate:g} s alone: cut it")
        found = self._by_silence(-(-samples // self._hop) * self._hop)
        if found.tokens < 2:  # models tell by two neighbours that placeholders are expanded
            raise ProcessorFault(f"it is too short: it takes {found.tokens} tokens")
        return found

    @cached_property
    def _hop(self) -> int:
        """Rule 3: samples of which only the number of begun ones counts; 1 where every sample may count."""
        hop = int(getattr(self.hf.feature_extractor, "hop_length", 1))
        whole = [
            (hop * hops - less, hop * hops)
            for hops in (20, 21, 22, 23, 300)
            for less in (1, hop // 2, hop - 1)
        ]
        return hop if all(self._by_silence(a) == self._by_silence(b) for a, b in whole) else 1

    def _by_silence(self, samples: int) -> Replacement:
        if samples not in self._silent:
            silence, rate = np.zeros(samples, np.float32), self._rate
            with _asked():
                options = {**self.hf._merge_kwargs()["audio_kwargs"], "sampling_rate": rate}
                made, (text,) = self.hf._process_audio([silence], **options)
                patches = len(made["input_features"])
            self._silent[samples] = Replacement(str(text), str(text).count(self.tokens["audio"]), patches)
        return self._silent[samples]


def _blank_image(width: int, height: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (width, height))


class _BlankVideo(EncodedVideo):
    """A video of black frames, which nobody has to decode."""

    __slots__ = ()

    def frames(self, wanted: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """See `EncodedVideo`."""
        return (np.zeros((self.size.height, self.size.width, 3), np.uint8) for _ in wanted)


def _trials(kind: Kind, processor: MediaProcessor) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Two media of a kind that differ in size, and their sizes."""
    rng = np.random.default_rng(0)
    if kind == "audio":
        rate = processor._rate
        return [rng.random(rate, np.float32), rng.random(rate // 2, np.float32)], [
            (rate, rate),
            (rate // 2, rate),
        ]
    from PIL import Image

    sizes = [PROBES[1], PROBES[3]]
    return [Image.fromarray(rng.integers(0, 255, (high, wide, 3), np.uint8)) for wide, high in sizes], [
        *sizes
    ]


_IN_IDENTITY: dict[Kind, str] = {"image": "images", "audio": "audio", "video": "videos"}
_ELSEWHERE = (
    "image_processor",
    "feature_extractor",
    "tokenizer",
    "video_processor",
    "processor_class",
    "chat_template",
    "auto_map",
)
_PATHS = (
    "_name_or_path",
    "feature_extractor_type",
    "processor_class",
    "auto_map",
    "_processor_class",
    "image_processor_type",
)


def kinds_in(identity: Mapping[str, Any]) -> tuple[Kind, ...]:
    """Returns what kinds of media a processor of such an identity is used for."""
    return tuple(kind for kind, name in _IN_IDENTITY.items() if name in identity)


def _taken(hf: Any) -> list[Kind]:
    """The kinds of media that a processor takes, what it is used for first."""
    images = getattr(hf, "image_processor", None) is not None
    if images and not getattr(hf, "image_token", None):
        return []
    taken: list[Kind] = ["image"] if images else []
    if getattr(hf, "feature_extractor", None) is not None and getattr(hf, "audio_token", None):
        taken.append("audio")
    if type(hf).__name__ in PROCESSORS and getattr(hf, "video_token", None):
        taken.append("video")
    return taken


def _video_config(name: str, revision: str | None) -> Mapping[str, Any]:
    """Returns what the files say of videos, in the order in which transformers looks."""
    own = _config(name, CONFIGS[0], revision) or {}
    if isinstance(own.get("video_processor"), dict):
        return dict(own["video_processor"])
    return _config(name, VIDEO_CONFIG, revision) or _config(name, CONFIGS[1], revision) or {}


def _load(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoImageProcessor, AutoProcessor

    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    kind = _class_of(name, revision)
    if kind is None:
        hf = AutoProcessor.from_pretrained(name, **options)
    else:
        hf = _without_video(kind).from_pretrained(name, **options)
    images = getattr(hf, "image_processor", None)
    if images is not None and not type(images).__name__.endswith("Pil"):
        hf.image_processor = AutoImageProcessor.from_pretrained(name, backend="pil", **options)
    return hf


def _class_of(name: str, revision: str | None) -> Any:
    """The class that the files name; None where only AutoProcessor knows."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    for each in (*CONFIGS, "tokenizer_config.json"):
        named = (_config(name, each, revision) or {}).get("processor_class")
        if isinstance(named, str):
            return processor_class_from_name(named)
    return None


def _without_video(kind: Any) -> Any:
    """The same processor with None for its video processor: those need torchvision."""
    wanted = kind.get_attributes()
    if "video_processor" not in wanted:
        return kind
    place = wanted.index("video_processor")
    others = [name for name in wanted if name != "video_processor"]
    loader: Any = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: others)})

    def arguments(cls: Any, *args: Any, **named: Any) -> list[Any]:
        found = loader._get_arguments_from_pretrained(*args, **named)
        return [*found[:place], None, *found[place:]]

    def check(self: Any, name: str, value: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, value)

    own = {"_get_arguments_from_pretrained": classmethod(arguments), "check_argument_for_proper_class": check}
    return type(kind.__name__, (kind,), own)


def config_files(name: str, revision: str | None = None) -> list[Path]:
    """The files that make the processor of a folder or hub name, beside those of its tokenizer; [] where it has none."""
    found = (_path_of(name, file, revision) for file in (*CONFIGS, VIDEO_CONFIG))
    return [path for path in found if path is not None and path.is_file()]


def _config(name: str, file: str, revision: str | None) -> Mapping[str, Any] | None:
    path = _path_of(name, file, revision)
    try:
        found = None if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _path_of(name: str, file: str, revision: str | None) -> Path | None:
    if os.path.isdir(name):
        return Path(name) / file
    from transformers.utils import cached_file

    try:
        return Path(cached_file(name, file, revision=revision))
    except OSError:
        return None
