"""Defines what a model of `transformers` is called with, so that it can tell the rows of a micro-batch apart.

Axes: B lines, L tokens of a line.
Always true:
- an input set is made of ids and positions alone: a row begins where positions do not go on by one;
- nothing here says which model needs what: `row_isolation.py` tries.

This file imports torch; import it inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ModelInputs:
    """Makes of a micro-batch's arrays what a model is called with: `model(**inputs(tensors))`.

    Attributes:
        layout: of the micro-batches.
        name: of the input set: what is passed beside ids, and the mask of padded lines.
        config: of the model.
    """

    layout: str
    name: str
    config: Any

    def __call__(self, tensors: Tensors) -> dict[str, Any]:
        """Makes the inputs from `input_ids` and `position_ids` [B, L], and `attention_mask` of a padded layout."""
        names = ["input_ids", "position_ids"]
        if self.layout.startswith("padded"):
            names.append("attention_mask")
        inputs = {name: tensors[name].long() for name in names}
        return {**inputs, **INPUT_SETS[self.name](self.config, inputs)}


def _no_more(config: Any, inputs: Tensors) -> dict[str, Any]:
    return {}


def _boundaries(config: Any, inputs: Tensors) -> dict[str, Any]:
    """Returns what kernels of attention, convolutions and recurrent layers are told."""
    begins_BL = _begins(inputs["position_ids"])
    cells = begins_BL.numel()
    bounds = torch.nn.functional.pad(torch.nonzero(begins_BL.flatten())[:, 0], (0, 1), value=cells).int()
    longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": (begins_BL.flatten().cumsum(0).view(begins_BL.shape) - 1).int(),
    }


def _masks(config: Any, inputs: Tensors) -> dict[str, Any]:
    """Block-diagonal masks, one for each kind of attention layer that the model has, made by `transformers`."""
    from transformers.masking_utils import create_masks_for_generate

    ids_BL = inputs["input_ids"]
    dtype = config.get_text_config().dtype or torch.float32
    shape = torch.empty((*ids_BL.shape, 0), dtype=dtype, device=ids_BL.device)
    masks = create_masks_for_generate(config, shape, None, None, position_ids=inputs["position_ids"])
    return {"attention_mask": masks}


def _boundaries_and_masks(config: Any, inputs: Tensors) -> dict[str, Any]:
    return {**_boundaries(config, inputs), **_masks(config, inputs)}


POSITIONS, BOUNDARIES = "position_ids", "cu_seq_lens and seq_idx"
INPUT_SETS: dict[str, Callable[[Any, Tensors], dict[str, Any]]] = {
    POSITIONS: _no_more,
    BOUNDARIES: _boundaries,
    "a block-diagonal attention_mask": _masks,
    "both": _boundaries_and_masks,
}


def _begins(position_BL: torch.Tensor) -> torch.Tensor:
    """bool [B, L]: where a row begins; a cell of padding is a row of its own."""
    return torch.nn.functional.pad(position_BL.diff(dim=1) != 1, (1, 0), value=True)
