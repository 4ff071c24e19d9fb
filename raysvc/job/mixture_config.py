"""Several sources in one stream: section `mixture`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raysvc.job.plan_config import known_shuffle
from raysvc.job.section import PositiveInt, Section
from raysvc.job.text_config import SourceConfig


class MixtureSourceConfig(Section):
    """One source of a mixture."""

    source: SourceConfig = Field(description="Same keys as the section source.")
    weight: float | None = Field(
        default=None, ge=0, description="Share of the stream, relative to the other sources."
    )
    epochs: float | None = Field(default=None, gt=0, description="Passes over this source in one epoch.")
    from_step: int = Field(
        default=0, ge=0, description="The source joins at this step; earlier steps do not change."
    )
    shuffle: str | None = Field(default=None, description="As `plan.shuffle`, for this source.")

    @field_validator("shuffle")
    @classmethod
    def _shuffle_is_known(cls, value: str | None) -> str | None:
        return value if value is None else known_shuffle(value)


class AdaptConfig(Section):
    """Starve the sources of a mixture whose loss stays high; see `raysvc.training.adapting`."""

    every_steps: PositiveInt = Field(
        description="Look at the losses of so many steps at a time; what follows holds as many steps later. At least server.look_ahead_steps + 2."
    )
    starve_above: float = Field(
        gt=1,
        description="A source gets no more rows when its mean loss is above this times the median of the others'.",
    )


class MixtureConfig(Section):
    """Several sources in one stream, by exact counts; each is tokenized into a cache entry of its own."""

    sources: dict[str, MixtureSourceConfig] = Field(
        min_length=1, description="Name -> source, with a weight or with epochs; append new ones at the end."
    )
    by: Literal["rows", "tokens"] = Field(
        default="rows",
        description="What the weights count; with a window, rows of the source, and tokens as a sample of its slices has them.",
    )
    adapt: AdaptConfig | None = Field(
        default=None, description="Starve sources whose loss stays high, while `raysvc train` trains."
    )

    def decides(self) -> dict[str, Any]:
        """The fields as JSON; a shuffle only where a source has its own, and `adapt` where it is given."""
        known = self.model_dump(mode="json")
        if self.adapt is None:
            del known["adapt"]
        for each in known["sources"].values():
            for name in ("follow", "stream", "ray", "args", "version"):
                if not each["source"][name]:
                    del each["source"][name]
            if each["shuffle"] is None:
                del each["shuffle"]
        return known

    @model_validator(mode="after")
    def _weights_or_epochs(self) -> MixtureConfig:
        sources = self.sources.values()
        kinds = {(each.weight is None, each.epochs is None) for each in sources}
        if kinds not in ({(False, True)}, {(True, False)}):
            raise ValueError("give every source a weight, or every source epochs")
        if self.by == "tokens" and kinds == {(True, False)}:
            raise ValueError("by: tokens needs weights")
        if self.adapt is not None and kinds == {(True, False)}:
            raise ValueError("adapt changes weights; give every source a weight")
        if not any(each.from_step == 0 and each.weight != 0 for each in sources):
            raise ValueError("no source with a weight above 0 begins at step 0")
        return self
