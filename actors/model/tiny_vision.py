"""`tiny-vision`: a randomly initialised Qwen2-VL of two layers, for trying on images and videos. No weights are downloaded.

Always true:
- it is `transformers`' own class, Qwen2.5-VL where the processor is that one's, and what it saves is read as such;
- patches and placeholders are those of the processor that the rows were built with.

This file imports neither torch nor transformers before a model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from raysvc.chat.garbage import no_collection
from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

NAME = "tiny-vision"
HEAD_WIDTH = 16
SPREAD = (
    0.2  # standard deviation of new weights; with 0.02 an image changes next to nothing of so small a model
)
FAMILIES: dict[str, Literal["qwen2_vl", "qwen2_5_vl"]] = {
    "Qwen2VLProcessor": "qwen2_vl",
    "Qwen2_5_VLProcessor": "qwen2_5_vl",
}
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


class TinyVision(BaseModel):
    """Holds what of a processor and a tokenizer decides the model.

    Attributes:
        family: which class.
        patch_size: pixels of a side.
        temporal_patch_size: frames.
        merge_size: patches of a side that become one token.
        token_ids: name in the model's configuration -> id.
    """

    model_config = ConfigDict(frozen=True)
    family: Literal["qwen2_vl", "qwen2_5_vl"]
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    token_ids: Mapping[str, int]

    @classmethod
    def of(cls, processor: Mapping[str, Any], token_id: Callable[[str], int | None]) -> TinyVision:
        """Makes a model for rows that were built with a processor.

        Args:
            processor: its identity.
            token_id: id of a token; None where the tokenizer has no such token.

        Raises:
            ConfigError: it is the processor of another family.
        """
        settings = processor.get("images") or processor.get("videos") or {}
        ids = {name: found for name, text in TOKENS.items() if (found := token_id(text)) is not None}
        family = FAMILIES.get(processor["processor"])
        if family is None or len(ids) < len(TOKENS):
            what = f"{NAME} looks at patches of Qwen2-VL or Qwen2.5-VL, and the rows have those of {processor['processor']}"
            remedy = "tokenize with the processor of one of these, or name a model of the processor's family"
            raise ConfigError("trainer.model", what, remedy)
        sizes = {name: int(settings[name]) for name in ("patch_size", "temporal_patch_size", "merge_size")}
        return cls(family=family, token_ids=ids, **sizes)


def tiny_vision_model(sizes: Mapping[str, int], vision: TinyVision) -> torch.nn.Module:
    """Two layers of text over two layers of an encoder.

    Args:
        sizes: of the text, as `LlamaConfig` names them.
        vision: of what it sees.
    """
    with no_collection():
        import transformers

    width, newer = sizes["hidden_size"], vision.family == "qwen2_5_vl"
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**sizes, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    encoder: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.merge_size,
    }
    if newer:
        window = 4 * vision.patch_size * vision.merge_size  # pixels of a side
        encoder |= {
            "hidden_size": 2 * HEAD_WIDTH,
            "out_hidden_size": width,
            "intermediate_size": 4 * HEAD_WIDTH,
        }
        encoder |= {"window_size": window, "fullatt_block_indexes": [1]}
    else:
        encoder |= {"embed_dim": 2 * HEAD_WIDTH, "hidden_size": width, "mlp_ratio": 2}
    name = "Qwen2_5_VL" if newer else "Qwen2VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=encoder, tie_word_embeddings=True, **vision.token_ids
    )
    model: torch.nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0.0, SPREAD)
    return model
