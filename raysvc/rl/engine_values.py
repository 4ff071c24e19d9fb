"""Turns what engines give into arrays: tensors of any dtype numpy has a place for, and values per token laid at their token.

Axes: L tokens of a sequence.
Always true:
- bfloat16 keeps its bits;
- a value lies at the token it is about, and a token that has none gets 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.job.carried import Align
from raysvc.job.column_dtypes import BF16

Array = npt.NDArray[Any]


def array_of(values: Any) -> Array:
    """Numbers as numpy: a list, an array, a tensor on the CPU, or a list of tensors of one shape.

    Raises:
        ValueError, TypeError, RuntimeError, OverflowError: numpy, or torch, does not take them.
    """
    if isinstance(values, list | tuple) and values and _is_tensor(values[0]):
        import torch

        values = torch.stack(tuple(values))
    return _of_tensor(values) if _is_tensor(values) else np.asarray(values)


def is_finite(values: Array) -> bool:
    """Returns whether no number is infinite or NaN."""
    if values.dtype == BF16:
        return bool((values["bfloat16"] & 0x7F80 != 0x7F80).all())
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def laid(values: Array, mask: npt.NDArray[np.uint8], align: Align) -> Array | None:
    """[L, *shape], each value at the token it is about; None: they are not as many as `align` wants.

    Args:
        values: `this_token`: [L or L - 1, *shape], the last token was not forwarded. `next_token`: [L or L - 1, *shape],
            value t is about token t + 1. `response`: one per trained token, in their order.
        mask: [L], 1 where a token is trained.
    """
    length, trained = len(mask), mask.astype(np.bool_)
    places, counts = {
        "this_token": (np.arange(length), (length, length - 1)),
        "next_token": (np.arange(1, length), (length, length - 1)),
        "response": (np.flatnonzero(trained), (int(trained.sum()),)),
    }[align]
    if len(values) not in counts:
        return None
    count = min(len(values), len(places))
    out = np.zeros((length, *values.shape[1:]), values.dtype)
    out[places[:count]] = values[:count]
    return out


def _is_tensor(values: Any) -> bool:
    return hasattr(values, "detach") and hasattr(values, "numpy")


def _of_tensor(tensor: Any) -> Array:
    import torch

    plain = tensor.detach()
    if plain.dtype != torch.bfloat16:
        return np.asarray(plain)
    bits: Array = plain.contiguous().view(torch.int16).numpy()
    return bits.view(BF16)
