"""A `transformers` processor: how many tokens a medium takes, and the arrays that a model gets of it.

1. The processor is loaded from the files beside the tokenizer, with its image processor on numpy and Pillow (`pil`): every
   node makes the same pixels, whether torchvision is there or not. Video processors are left out.
2. The text that replaces the placeholder of an image follows from its size. Where some probes show that it is the image
   token, as often as `_get_num_multimodal_tokens` says, only that is asked. Any other processor is given a blank image of
   the size, once for each size.
3. The text that replaces the placeholder of an audio clip is asked for silence of its length, once for each length: up to the
   next whole hop of the features, where some probes show that only hops count.

Always true:
- a text with its placeholders replaced has the ids that the processor itself gives for the same media;
- the identity says what decides texts and pixels: classes and their settings, never a path;
- nothing is decoded to count tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.errors import TokenizerError
from raysvc.media.kinds import Kind

CONFIGS = ("processor_config.json", "preprocessor_config.json")
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
PROBES = ((64, 64), (640, 480), (480, 640), (1000, 90), (31, 700))  # width, height
SIZES_KEPT = 1 << 16
_WHERE = "tokenizer"


class Replacement(NamedTuple):
    """What stands for one medium.

    Attributes:
        text: instead of its placeholder.
        tokens: of its kind in it.
        patches: encoder work, in the processor's own unit.
    """

    text: str
    tokens: int
    patches: int


def has_processor(name: str, revision: str | None = None) -> bool:
    """Whether a tokenizer's folder or hub name has a processor."""
    return any(_config(name, each, revision) is not None for each in CONFIGS)


class MediaProcessor:
    """A loaded processor.

    Attributes:
        hf: the `transformers` processor.
        kind: of the media that it takes: `image`, or `audio` where it has no image processor.
        token: placeholder of a medium in a rendered text.
        token_id: its id.
    """

    def __init__(self, hf: Any) -> None:
        """Use `MediaProcessor.load`."""
        self.hf = hf
        self.kind: Kind = "image" if getattr(hf, "image_processor", None) is not None else "audio"
        self.token = str(getattr(hf, f"{self.kind}_token"))
        self.token_id = int(hf.tokenizer.convert_tokens_to_ids(self.token))
        self._silent: dict[int, Replacement] = {}  # by samples: no more than the hops of the longest clip
        self.replacement = lru_cache(SIZES_KEPT)(self._replacement)

    @classmethod
    def load(cls, name: str, revision: str | None = None, trust_remote_code: bool = False) -> MediaProcessor:
        """The processor of a folder or hub name.

        Raises:
            TokenizerError: there is none, it cannot be loaded, or it replaces no placeholder of images or audio.
        """
        from raysvc import hub

        try:
            with hub.answering():
                hf = _load(name, revision, trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            first = str(error).strip().split("\n")[0]
            raise TokenizerError(
                _WHERE,
                f"the processor of {name!r} could not be loaded ({type(error).__name__}: {first})",
                "save it beside the tokenizer with processor.save_pretrained",
            ) from error
        of_images = getattr(hf, "image_processor", None) is not None and getattr(hf, "image_token", None)
        of_audio = getattr(hf, "feature_extractor", None) is not None and getattr(hf, "audio_token", None)
        if not of_images and (not of_audio or getattr(hf, "image_processor", None) is not None):
            raise TokenizerError(
                _WHERE,
                f"the processor of {name!r} ({type(hf).__name__}) has no token for images or audio",
                "use a model that takes media, or leave them out with source.ignore",
            )
        return cls(hf)

    @property
    def chat_template(self) -> Any:
        """Template text, name -> text, or None."""
        return getattr(self.hf, "chat_template", None)

    def identity(self) -> dict[str, Any]:
        """What decides texts and pixels, as JSON."""
        own = {key: value for key, value in self.hf.to_dict().items() if key not in _ELSEWHERE}
        part = self.hf.image_processor if self.kind == "image" else self.hf.feature_extractor
        settings = {key: value for key, value in part.to_dict().items() if key not in _PATHS}
        name = "images" if self.kind == "image" else "audio"
        found = {"processor": type(self.hf).__name__, "own": own, name: settings}
        return dict(json.loads(json.dumps(found, sort_keys=True, default=str)))

    def arrays(self, media: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        """What the processor gives for media beside the ids of a text: `pixel_values`, `image_grid_thw`, `input_features`, ...

        Args:
            media: at least one, decoded; of one row, in the order of its placeholders.
        """
        made = self.hf(text=[self.token * len(media)], **self._argument(media), return_tensors="np")
        return {name: np.asarray(value) for name, value in made.items() if name not in TEXT_KEYS}

    def expanded(self, text: str, media: Sequence[Any]) -> list[int]:
        """Ids of a rendered text with its decoded media, by the processor alone: what everything else is compared with."""
        bos = self.hf.tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)  # as `apply_chat_template` of a processor does it
        made = self.hf(text=[text], **self._argument(media), add_special_tokens=not has_bos)
        return [int(token) for token in made["input_ids"][0]]

    def _argument(self, media: Sequence[Any]) -> dict[str, Any]:
        if self.kind == "image":
            return {"images": list(media) or None}
        return {"audio": list(media) or None, "sampling_rate": self._rate}

    def _replacement(self, *size: int) -> Replacement:
        return self._of_image(*size) if self.kind == "image" else self._of_audio(*size)

    def _of_image(self, width: int, height: int) -> Replacement:
        tokens, patches = self._counted(width, height)
        if self._is_plain:
            return Replacement(self.token * tokens, tokens, patches)
        text = self._by_blank(width, height)
        return Replacement(text, text.count(self.token), patches)

    @cached_property
    def _is_plain(self) -> bool:
        """Rule 2: the replacement is the image token, as often as the processor counts."""
        return all(self._by_blank(*size) == self.token * self._counted(*size)[0] for size in PROBES)

    def _counted(self, width: int, height: int) -> tuple[int, int]:
        found = self.hf._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found["num_image_tokens"][0]), int(found["num_image_patches"][0])

    def _by_blank(self, width: int, height: int) -> str:
        from PIL import Image

        options = self.hf._merge_kwargs()["images_kwargs"]
        blank = Image.new("RGB", (width, height))
        return str(self.hf._process_images([blank], **options)[1][0])

    @property
    def _rate(self) -> int:
        return int(self.hf.feature_extractor.sampling_rate)

    def _of_audio(self, samples: int, rate: int) -> Replacement:
        if rate != self._rate:
            raise ValueError(f"the processor takes {self._rate} Hz: ffmpeg -i IN -ar {self._rate} OUT.wav")
        most = getattr(self.hf.feature_extractor, "n_samples", None)
        if most is not None and samples > most:
            raise ValueError(f"the processor hears the first {most / rate:g} s alone: cut it")
        found = self._by_silence(-(-samples // self._hop) * self._hop)
        if found.tokens < 2:  # models tell by two neighbours that placeholders are expanded
            raise ValueError(f"it is too short: it takes {found.tokens} tokens")
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
            options = {**self.hf._merge_kwargs()["audio_kwargs"], "sampling_rate": self._rate}
            made, (text,) = self.hf._process_audio([np.zeros(samples, np.float32)], **options)
            patches = len(made["input_features"])
            self._silent[samples] = Replacement(str(text), str(text).count(self.token), patches)
        return self._silent[samples]


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
    """The same processor for images alone: video processors need torchvision."""
    wanted = kind.get_attributes()
    if "video_processor" not in wanted:
        return kind
    left = [name for name in wanted if name != "video_processor"]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: left)})


def config_files(name: str, revision: str | None = None) -> list[Path]:
    """The files that make the processor of a folder or hub name, beside those of its tokenizer; [] where it has none."""
    found = (_path_of(name, file, revision) for file in (*CONFIGS, "video_preprocessor_config.json"))
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
