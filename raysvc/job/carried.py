"""What a job says of the columns that its rows carry beside tokens and mask.

Always true:
- a column has one type and one shape in all rows;
- a value has the shape of its column: one per row, or one per token that `align` names;
- bfloat16 is `BF16` in numpy: a record of 16 bits that says what they are, `values["bfloat16"]` are the bits.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

ColumnDtype = Literal[
    "string",
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
Align = Literal["this_token", "next_token", "response"]
BF16: np.dtype[Any] = np.dtype([("bfloat16", "<u2")])
MAX_NUMBERS = 1 << 24  # in one value of a column
MARK = b"raysvc.dtype"  # metadata of an Arrow field that is to be written: "bfloat16" where uint16 holds its bits
RESERVED = frozenset(
    [
        "input_ids",
        "loss_mask",
        "source_row",
        "chosen",
        "label",
        "mismatched",
        "step_labels",
        "attention_mask",
        "labels",
        "position_ids",
        "segment_ids",
        "seq_lengths",
        "row_tokens",
        "row_group",
        "row_group_rows",
        "row_group_tokens",
        "row_ids",
        "cu_seqlens",
        "cu_seqlens_offsets",
        "loss_weights",
        "group_weights",
        "media",
        "media_tokens",
        "media_patches",
    ]
)


class CarriedColumn(BaseModel):
    """A column of the source that goes with its row to the worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: ColumnDtype | None = Field(
        default=None, description="None: text, bool, int64 or float64, as the first row has it."
    )
    per: Literal["row", "token"] = Field(default="row", description="One value per row, or one per token.")
    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="Shape of one value: [94, 8] for layers x experts; [] for a number."
    )
    pad: float | int = Field(
        default=0, description="Value of cells without a token; if given, also of rows that lack the column."
    )
    align: Align = Field(
        default="this_token",
        description="Which token a value belongs to: its own, the next one, or (response) one value per trained token.",
    )

    @model_validator(mode="after")
    def _possible(self) -> CarriedColumn:
        if self.per == "row" and self.align != "this_token":
            raise ValueError("align is about tokens; give per: token")
        if self.per == "token" and self.dtype in (None, "string"):
            raise ValueError("a column per token needs a dtype of numbers")
        if self.shape and self.dtype in (None, "string"):
            raise ValueError("a column with a shape needs a dtype of numbers")
        if prod(self.shape) > MAX_NUMBERS:
            raise ValueError(f"shape {list(self.shape)} has more than {MAX_NUMBERS} numbers a value")
        if self.dtype is not None and self.dtype != "string":
            pad_of(self)
        return self


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


def pad_of(column: CarriedColumn) -> Any:
    """The value of cells without a token.

    Raises:
        ValueError: the type does not hold it.
    """
    return scalar_of(column.pad, numpy_dtype(column.dtype or "float64"))
