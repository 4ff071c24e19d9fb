"""A `transformers` processor: how many tokens an image takes, and the arrays that a model gets of it.

1. The processor is loaded from the files beside the tokenizer, with its image processor on numpy and Pillow (`pil`): every
   node makes the same pixels, whether torchvision is there or not. Video processors are left out.
2. The text that replaces the placeholder of an image follows from its size. Where some probes show that it is the image
   token, as often as `_get_num_multimodal_tokens` says, only that is asked. Any other processor is given a blank image of
   the size, once for each size.

Always true:
- a text with its placeholders replaced has the ids that the processor itself gives for the same images;
- the identity says what decides texts and pixels: classes and their settings, never a path;
- nothing is decoded to count tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.errors import TokenizerError

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIGS = ("processor_config.json", "preprocessor_config.json")
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
PROBES = ((64, 64), (640, 480), (480, 640), (1000, 90), (31, 700))  # width, height
SIZES_KEPT = 1 << 16
_WHERE = "tokenizer"


class Replacement(NamedTuple):
    """What stands for one image.

    Attributes:
        text: instead of its placeholder.
        tokens: image tokens in it.
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
        image_token: placeholder of an image in a rendered text.
        image_token_id: its id.
    """

    def __init__(self, hf: Any) -> None:
        """Use `MediaProcessor.load`."""
        self.hf = hf
        self.image_token = str(hf.image_token)
        self.image_token_id = int(hf.tokenizer.convert_tokens_to_ids(self.image_token))
        self.replacement = lru_cache(SIZES_KEPT)(self._replacement)

    @classmethod
    def load(cls, name: str, revision: str | None = None, trust_remote_code: bool = False) -> MediaProcessor:
        """The processor of a folder or hub name.

        Raises:
            TokenizerError: there is none, it cannot be loaded, or it replaces no placeholder of images.
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
        if getattr(hf, "image_processor", None) is None or not getattr(hf, "image_token", None):
            raise TokenizerError(
                _WHERE,
                f"the processor of {name!r} ({type(hf).__name__}) has no token for images",
                "use a model that takes images, or leave the images out with source.ignore",
            )
        return cls(hf)

    @property
    def chat_template(self) -> Any:
        """Template text, name -> text, or None."""
        return getattr(self.hf, "chat_template", None)

    def identity(self) -> dict[str, Any]:
        """What decides texts and pixels, as JSON."""
        own = {key: value for key, value in self.hf.to_dict().items() if key not in _ELSEWHERE}
        images = {key: value for key, value in self.hf.image_processor.to_dict().items() if key not in _PATHS}
        found = {"processor": type(self.hf).__name__, "own": own, "images": images}
        return dict(json.loads(json.dumps(found, sort_keys=True, default=str)))

    def pixel_arrays(self, images: Sequence[Image]) -> dict[str, npt.NDArray[Any]]:
        """What the processor gives for images beside the ids of a text: `pixel_values`, `image_grid_thw`, ...

        Args:
            images: at least one, RGB; of one row, in the order of its placeholders.
        """
        made = self.hf(text=[self.image_token * len(images)], images=list(images), return_tensors="np")
        return {name: np.asarray(value) for name, value in made.items() if name not in TEXT_KEYS}

    def expanded(self, text: str, images: Sequence[Image]) -> list[int]:
        """Ids of a rendered text with its images, by the processor alone: what everything else is compared with."""
        bos = self.hf.tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)  # as `apply_chat_template` of a processor does it
        made = self.hf(text=[text], images=list(images) or None, add_special_tokens=not has_bos)
        return [int(token) for token in made["input_ids"][0]]

    def _replacement(self, width: int, height: int) -> Replacement:
        tokens, patches = self._counted(width, height)
        if self._is_plain:
            return Replacement(self.image_token * tokens, tokens, patches)
        text = self._by_blank(width, height)
        return Replacement(text, text.count(self.image_token), patches)

    @cached_property
    def _is_plain(self) -> bool:
        """Rule 2: the replacement is the image token, as often as the processor counts."""
        return all(self._by_blank(*size) == self.image_token * self._counted(*size)[0] for size in PROBES)

    def _counted(self, width: int, height: int) -> tuple[int, int]:
        found = self.hf._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found["num_image_tokens"][0]), int(found["num_image_patches"][0])

    def _by_blank(self, width: int, height: int) -> str:
        from PIL import Image

        options = self.hf._merge_kwargs()["images_kwargs"]
        blank = Image.new("RGB", (width, height))
        return str(self.hf._process_images([blank], **options)[1][0])


_ELSEWHERE = (
    "image_processor",
    "tokenizer",
    "video_processor",
    "processor_class",
    "chat_template",
    "auto_map",
)
_PATHS = ("_name_or_path", "processor_class", "auto_map", "_processor_class", "image_processor_type")


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
