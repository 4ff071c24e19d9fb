"""Defines what a job says of the columns that its rows carry beside tokens and mask.

Always true:
- a column has one type and one shape in all rows;
- a value has the shape of its column: one per row, or one per token that `align` names;
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

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
        "row_trajectory_tokens",
        "turn_index",
        "turn_count",
        "turn_tokens",
        "row_ids",
        "cu_seqlens",
        "cu_seqlens_offsets",
        "loss_weights",
        "group_weights",
        "sequence_weights",
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


def pad_of(column: CarriedColumn) -> Any:
    """The value of cells without a token.

    Raises:
        ValueError: the type does not hold it.
    """
    from raysvc.job.column_dtypes import numpy_dtype, scalar_of

    return scalar_of(column.pad, numpy_dtype(column.dtype or "float64"))
