"""The numpy types of columns that rows carry.

Always true:
- bfloat16 is `BF16` in numpy: a record of 16 bits that says what they are, `values["bfloat16"]` are the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BF16: np.dtype[Any] = np.dtype([("bfloat16", "<u2")])


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a column's values; text is an object."""
    if name == "string":
        return np.dtype(object)
    return BF16 if name == "bfloat16" else np.dtype(name)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The inverse of `numpy_dtype`."""
    return "bfloat16" if dtype == BF16 else dtype.name


def bf16_of(values: Any) -> Any:
    """Numbers as bfloat16, rounded to the nearest, ties to even.

    >>> bf16_of([1.0, 1.00390625])["bfloat16"].tolist()
    [16256, 16256]
    """
    numbers = np.ascontiguousarray(values, np.float32)
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    kept = np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype("<u2")
    return np.ascontiguousarray(kept).view(BF16).reshape(numbers.shape)


def float32_of(values: Any) -> Any:
    """bfloat16 as the same numbers in float32.

    >>> float32_of(bf16_of([1.0, -0.15625])).tolist()
    [1.0, -0.15625]
    """
    return (values["bfloat16"].astype(np.uint32) << np.uint32(16)).view(np.float32)


def scalar_of(value: float | int, dtype: np.dtype[Any]) -> Any:
    """One number as [] of a type; text is ''.

    Raises:
        ValueError: the type does not hold it.
    """
    if dtype.kind in "OU":
        return ""
    if dtype == BF16:
        return bf16_of([value])[0]
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise ValueError(f"{value} is not a {dtype.name}")
    made = np.array(value).astype(dtype)
    if dtype.kind in "iub" and made != value:
        raise ValueError(f"{value} is not a {dtype.name}")
    return made[()]
