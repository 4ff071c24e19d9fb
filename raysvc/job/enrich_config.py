"""Defines what a job says of the columns that models compute for its rows: section `enrich`.

Always true:
- one model for all rows, or one for each value of a column (or of each source of a mixture), never both.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raysvc.job.section import PositiveInt, Section

Dtype = Literal["float32", "bfloat16"]
SOURCE = "source"  # `by`: the name of a source of the mixture


class RefLogprobsConfig(Section):
    """Column `ref_logprobs`: the log-probability of every target under a reference."""

    model: str | None = Field(default=None, description="Folder or hub name; None: trainer.model.")
    dtype: Dtype = Field(default="float32", description="Of weights and forward pass.")


class TeacherConfig(Section):
    """Columns `teacher_ids` and `teacher_logprobs`: the likeliest entries of a teacher at every target."""

    model: str | None = Field(default=None, description="Folder or hub name of the teacher of all rows.")
    by: str | None = Field(
        default=None,
        description="A carried column whose value names the row's teacher; `source`: the mixture's source does.",
    )
    models: dict[str, str] = Field(default_factory=dict, description="Value of `by` -> folder or hub name.")
    top_k: PositiveInt = Field(default=64, description="Entries of a target.")
    dtype: Dtype = Field(default="float32", description="Of weights and forward pass.")

    @model_validator(mode="after")
    def _one_or_several(self) -> TeacherConfig:
        if (self.model is None) == (self.by is None) or bool(self.models) != (self.by is not None):
            raise ValueError("give a model, or by and models")
        return self


class EnrichConfig(Section):
    """Columns that models compute for the rows of the entry."""

    ref_logprobs: RefLogprobsConfig | None = Field(
        default=None,
        description="The reference of dpo, ipo and kto; {} for trainer.model, which they take by themselves.",
    )
    teacher: TeacherConfig | None = Field(default=None, description="The teacher of distill.")
    micro_batch_tokens: PositiveInt = Field(
        default=8192, description="Tokens of one forward pass, padding included; a longer row is alone."
    )
