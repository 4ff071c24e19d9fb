"""Counts what a sequence costs a rank: a * L + b * L^2, in integers.

Always true:
- costs are exact integers, so that a plan is the same on every machine;
- cost grows with length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of L tokens: `linear * L + quadratic * L^2`; only the ratio matters.

    The default is a decoder of hidden size 2048: dense layers cost 24 h^2 per token and causal attention 2 h
    L, which is 12 h * L + L^2.
    """

    linear: int = 24576
    quadratic: int = 1

    @classmethod
    def of_model(cls, model_config: Mapping[str, Any]) -> CostModel:
        """Coefficients of a `transformers` model config (`hidden_size`, `num_hidden_layers`, ...).

        Multiply-adds of one layer: projections per token, and L * width of heads for the two products of
        causal attention; the output layer is added to the linear part.
        """
        hidden = int(model_config["hidden_size"])
        layers = int(model_config["num_hidden_layers"])
        heads = int(model_config.get("num_attention_heads") or 1)
        key_heads = int(model_config.get("num_key_value_heads") or heads)
        head_dim = int(model_config.get("head_dim") or hidden // heads)
        inner = int(model_config.get("intermediate_size") or 4 * hidden)
        attention = 2 * hidden * head_dim * (heads + key_heads)
        dense = layers * (attention + 3 * hidden * inner) + hidden * int(model_config.get("vocab_size") or 0)
        return cls(linear=max(1, round(dense / (layers * heads * head_dim))), quadratic=1)

    def of(self, lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """int64, the cost of each of `lengths`."""
        long = lengths.astype(np.int64)
        return self.linear * long + self.quadratic * long * long
