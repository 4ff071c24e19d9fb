"""Defines what a model of media is given beside tokens: the arrays of media, and positions in three dimensions where it has them.

This file imports torch; import it inside the function that needs it.

Axes: B lines, L width, S rows of a micro-batch, W tokens of the longest row.
Always true:
- a row's positions are those that the model computes for the row alone, whatever the layout;
- for each kind of media that rows may have, a micro-batch without any runs the encoder too, on a blank that counts nothing, and
  encoders run in one order: ranks wait for each other's gradients, and under FSDP for each other's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raysvc.actors.model.load_model import check_media_model
from raysvc.collate.shard import BOUNDS
from raysvc.errors import ConfigError

BLANK = "blank_media"  # name of the arrays that count nothing, one mapping for each kind
GRID = "image_grid_thw"
OF_VIDEOS = {"pixel_values_videos": "pixel_values", "video_grid_thw": GRID}  # name -> of images
SOUND, SOUND_MASK = "input_features", "feature_attention_mask"
TILE_MASK = "pixel_attention_mask"
ENCODER_CONFIGS = ("vision_config", "audio_config")
IMAGE_SIZES = "image_sizes"  # beside tiles, of which a model takes as many for each image as they say
KIND_OF = {
    **dict.fromkeys([*OF_VIDEOS, "second_per_grid_ts"], "video"),
    SOUND: "audio",
    SOUND_MASK: "audio",
}


def media_inputs(lm: Any, tensors: Mapping[str, torch.Tensor], row_BL: torch.Tensor) -> dict[str, Any]:
    """Further arguments of the model; {} where rows never have media.

    Args:
        lm: the model.
        tensors: of a micro-batch, as `Shard.micro`.
        row_BL: number of each token's row.

    Raises:
        ConfigError: the model reads text alone, or is not in `MEDIA_MODELS`.
    """
    media = {name: _typed(tensors[name]) for name in tensors if name + BOUNDS in tensors}
    if not media:
        return {}
    if not any(hasattr(lm.config, name) for name in ENCODER_CONFIGS):
        what = f"the rows have media, and {type(lm).__name__} reads text alone"
        raise ConfigError("trainer.model", what, "give tiny-vision, or the model of the rows' processor")
    check_media_model(lm.config.model_type)
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in media.items():
        kinds.setdefault(KIND_OF.get(name, "image"), {})[name] = value
    ordered = sorted(kinds.values(), key=lambda own: SOUND not in own)
    missing = [own for own in ordered if not any(len(value) for value in own.values())]
    found: dict[str, Any] = {name: value for name, value in media.items() if len(value)}
    if found and hasattr(lm.base_model, "get_rope_index"):
        found["position_ids"] = _positions(lm, tensors, found, row_BL)
    found |= _of_one_text(found)
    return {**found, BLANK: [_blank(lm, own) for own in missing]} if missing else found


@contextmanager
def blanks_encoded(
    lm: Any, blanks: Sequence[Mapping[str, torch.Tensor]], inputs: Mapping[str, Any]
) -> Iterator[list[torch.Tensor]]:
    """Run the encoders on blanks, in the order in which a forward pass inside runs them on media: sound first, then the
    language model.

    Args:
        lm: the model.
        blanks: of the kinds of media that are not in the micro-batch.
        inputs: of the forward pass.

    Yields:
        A 0 for each blank, with a gradient of 0 for each weight of its encoder; complete after the forward pass.
    """
    zeros: list[torch.Tensor] = []

    def run(*_: Any) -> None:
        zeros.extend(_zero(lm, blank) for blank in blanks)

    if not blanks or SOUND not in inputs:
        run()
        yield zeros
        return
    hook = lm.base_model.language_model.register_forward_pre_hook(run)
    try:
        yield zeros
    finally:
        hook.remove()


def _zero(lm: Any, blank: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if SOUND in blank:
        return _of_sound(lm.base_model, blank).sum() * 0.0
    found = lm.base_model.get_image_features(**blank, return_dict=True).pooler_output
    features = [found] if isinstance(found, torch.Tensor) else found
    return sum((one.sum() for one in features), torch.zeros((), device=features[0].device)) * 0.0


def _of_sound(base: Any, blank: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if hasattr(base, "get_audio_features"):
        found: torch.Tensor = base.get_audio_features(**blank, return_dict=True).last_hidden_state
        return found
    heard: torch.Tensor = base.multi_modal_projector(base.audio_tower(blank[SOUND]).last_hidden_state)
    return heard


def _of_one_text(media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tiles with masks as Idefics3 takes them: [1 text, tiles, ...]; {} of other models."""
    return {name: media[name][None] for name in ("pixel_values", TILE_MASK)} if TILE_MASK in media else {}


def _typed(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_floating_point() else value.long()


def _blank(lm: Any, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The least that the encoder of one kind takes; in place of a video an image, which has the same encoder."""
    if OF_VIDEOS.keys() <= media.keys():
        media = {OF_VIDEOS[name]: value for name, value in media.items() if name in OF_VIDEOS}
    if GRID not in media:
        ones = {name: value.new_ones((1, *value.shape[1:])) for name, value in media.items()}
        if IMAGE_SIZES in ones:
            ones["pixel_values"] = ones["pixel_values"].expand(_tiles_of_one(lm), -1, -1, -1)
        return {**ones, **_of_one_text(ones)}  # zeros are what Idefics3 takes for padding
    side = lm.config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, side, side]], device=media[GRID].device)
    others = {name: value for name, value in media.items() if name != GRID}
    return {
        **{name: value.new_zeros((side * side, *value.shape[1:])) for name, value in others.items()},
        GRID: grid,
    }


def _tiles_of_one(lm: Any) -> int:
    """Tiles of an image of one pixel, by the rule of LLaVA-NeXT."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    config = lm.config
    count: int = image_size_to_num_patches(
        (1, 1), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return count


def _positions(
    lm: Any, tensors: Mapping[str, torch.Tensor], media: Mapping[str, torch.Tensor], row_BL: torch.Tensor
) -> torch.Tensor:
    """[3, B, L], or [4, B, L] with those of the text first where several rows share a line."""
    several = "segment_ids" in tensors
    there = tensors["segment_ids" if several else "attention_mask"] > 0
    place_BL = tensors["position_ids"].long()
    row, place = row_BL[there], place_BL[there]
    shape = (len(tensors["seq_lengths"]), int(tensors["seq_lengths"].max()))
    ids_SW = torch.zeros(shape, dtype=torch.long, device=row.device)
    mask_SW = torch.zeros_like(ids_SW)
    ids_SW[row, place] = tensors["input_ids"].long()[there]
    mask_SW[row, place] = 1
    found, _ = lm.base_model.get_rope_index(
        input_ids=ids_SW, attention_mask=mask_SW, **_sizes(lm, media, ids_SW)
    )
    out = place_BL.expand(3, *place_BL.shape).clone()
    out[:, there] = found[:, row, place].to(out.dtype)
    return torch.cat([place_BL[None], out]) if several else out


def _sizes(lm: Any, media: Mapping[str, torch.Tensor], ids_SW: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns what `get_rope_index` is told of the media: Qwen2.5-Omni asks how long each clip is, others which tokens are whose."""
    sizes = {name: media[name] for name in (GRID, "video_grid_thw", "second_per_grid_ts") if name in media}
    if hasattr(lm.config, "audio_config"):
        return sizes | ({"audio_seqlens": media[SOUND_MASK].sum(-1)} if SOUND_MASK in media else {})
    kinds_SW = (ids_SW == lm.config.image_token_id).int() + 2 * (ids_SW == lm.config.video_token_id).int()
    return {**sizes, "mm_token_type_ids": kinds_SW}
