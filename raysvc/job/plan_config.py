"""Section `plan` of a job: which rows go where, in which order and shape."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from raysvc.job.row_id_file import read_row_ids, row_id
from raysvc.job.section import FUNCTION, PositiveInt, Section

Layout = Literal["padded_right", "padded_left", "packed", "stream"]
CpSplit = Literal["zigzag", "head_tail", "contiguous"]
Tail = Literal["pad", "drop", "wrap"]
Packing = Literal["balanced", "best_fit", "first_fit"]
Oversize = Literal["error", "truncate", "drop", "alone"]
SHUFFLES = re.compile(r"none|full|block\([1-9]\d*\)|window(\([1-9]\d{0,3}\))?")
_Number = Annotated[int, Field(ge=0, lt=1 << 63)]
_Text = Annotated[str, Field(pattern=r"^\d+(:\d+){0,2}$")]
RowId = Annotated[_Number, BeforeValidator(row_id, json_schema_input_type=_Number | _Text)]


class RowsConfig(Section):
    """Which rows a plan is of. The others are in no step, and leave no hole but where a source is shuffled in a window."""

    include: tuple[RowId, ...] | None = Field(
        default=None,
        description="Row ids: a list, or a file or folder of them as text, JSON or Parquet with a column row_id. None: all rows.",
    )
    exclude: tuple[RowId, ...] = Field(
        default=(), description="Row ids that are left out, in the same forms."
    )

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _ids_of_a_file(cls, value: object) -> object:
        return read_row_ids(value) if isinstance(value, str) else value


class PlanConfig(Section):
    """Which rows go where, and in which shape."""

    batch_size: PositiveInt = Field(
        default=32, description="Groups per step: rows, or conversations with train_on: each_assistant_turn."
    )
    mini_batch_size: PositiveInt | None = Field(
        default=None, description="Groups per optimizer step; default batch_size."
    )
    epochs: PositiveInt = Field(default=1, description="Passes over all groups, each in its own order.")
    update_epochs: PositiveInt = Field(
        default=1, description="Passes over the mini-batches of one step (RL)."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
    shuffle: str = Field(
        default="full",
        description="none, full, block(n): shuffle blocks of n rows, or window: shuffle slices, and rows among the W slices of a moving window; window(W) says how many.",
    )
    order: str | None = Field(
        default=None,
        pattern=FUNCTION,
        description="module:name of a function of (epoch, rows) that orders the groups in place of `shuffle`; see docs/concepts.md.",
    )
    tail: Tail = Field(
        default="pad",
        description="What to do with the groups of a last step that is not full: pad makes a short step, drop leaves them out, wrap fills it from the start of the epoch.",
    )
    layout: Layout = Field(default="padded_right", description="Layout of the arrays; see docs/concepts.md.")
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="Rows per forward on one rank; default 8 unless micro_batch_tokens is set."
    )
    micro_batch_tokens: PositiveInt | None = Field(
        default=None,
        description="Token budget of one forward on one rank. For `packed`: the capacity of a line; default: the longest row, and at least 4096.",
    )
    packing: Packing = Field(
        default="balanced",
        description="How rows are packed into lines: balanced evens out ranks, best_fit needs the fewest lines, first_fit is first-fit-decreasing.",
    )
    oversize: Oversize = Field(default="error", description="What to do with a row over the token budget.")
    cost: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None,
        description="[a, b]: a row of L tokens costs a*L + b*L^2, which evens out ranks; None: derived from trainer.model.",
    )
    pad_to_multiple: PositiveInt = Field(default=1, description="Widths are rounded up to this.")
    align: PositiveInt = Field(default=1, description="Packed: every sequence starts at a multiple of this.")
    cp_split: CpSplit | None = Field(
        default=None,
        description="How lines are cut for the context-parallel ranks of a mesh: zigzag (by row), head_tail or contiguous (by line); None: not.",
    )
    window: PositiveInt | None = Field(default=None, description="layout=stream: tokens per window.")
    columns: tuple[str, ...] = Field(
        default=("input_ids", "attention_mask", "position_ids", "labels"),
        description="Arrays to send: any of input_ids, attention_mask, position_ids, loss_mask, labels, and carried columns.",
    )
    pad_values: dict[str, Annotated[float, Field(allow_inf_nan=True)]] = Field(
        default_factory=dict,
        description="Column -> value of cells without a token. Default: what source.carry says, else 0.",
    )
    skip_rows: tuple[RowId, ...] = Field(
        default=(),
        description="Row ids that are never trained: a list, or a file (one id per line, such as 2:17:451, or a JSON list).",
    )

    rows: RowsConfig | None = Field(
        default=None, description="The rows that the plan is of, as a list of ids; None: all."
    )

    @field_validator("columns")
    @classmethod
    def _some_columns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value):
            problem = "names a column twice" if value else "names no column"
            raise ValueError(f"{problem}; name each array once, or leave the key out")
        return value

    @field_validator("skip_rows", mode="before")
    @classmethod
    def _ids_of_a_file(cls, value: object) -> object:
        return read_row_ids(value) if isinstance(value, str) else value

    @field_validator("shuffle")
    @classmethod
    def _shuffle_is_known(cls, value: str) -> str:
        return known_shuffle(value)

    @model_validator(mode="after")
    def _consistent(self) -> PlanConfig:
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise ValueError("give micro_batch_size or micro_batch_tokens, not both")
        if self.layout == "packed" and self.micro_batch_size is not None:
            raise ValueError("layout: packed has lines of micro_batch_tokens and no micro_batch_size")
        if self.layout == "stream" and self.order is not None:
            raise ValueError("layout: stream cuts rows into windows, and order is one of groups")
        if self.layout == "stream" and self.window is None:
            raise ValueError("layout: stream needs window, the tokens of one row")
        if self.shuffle.startswith("window") and self.layout == "stream":
            raise ValueError(
                f"layout: stream cuts rows without regard to slices, and shuffle: {self.shuffle} goes by them; use packed, or shuffle: full"
            )
        if self.shuffle.startswith("window") and self.order is not None:
            raise ValueError(
                f"order needs all rows, and shuffle: {self.shuffle} has some; leave one of them out"
            )
        if self.mini_batch_size is not None and self.mini_batch_size > self.batch_size:
            raise ValueError(
                f"mini_batch_size ({self.mini_batch_size}) is above batch_size ({self.batch_size})"
            )
        return self


def known_shuffle(value: str) -> str:
    """The shuffle, if it is one.

    Raises:
        ValueError: it is none.
    """
    if not SHUFFLES.fullmatch(value):
        raise ValueError(f"{value!r} is not one of none, full, block(n), window, window(W) with n, W >= 1")
    return value
