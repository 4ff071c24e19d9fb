"""Defines what is known of an entry while slices of it are to come: what travels to whoever reads it meanwhile, and loads no reader."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class GrowingSpec(BaseModel):
    """Holds what is known of an entry before it is built.

    Attributes:
        has_end: of every kind, whether its source ends.
        key: of the recipe.
        recipe: without the files of the source.
        report: as far as the builder knows it before it begins, `source_rows` with it.
        contents: digest of what each slice holds.
    """

    model_config = ConfigDict(frozen=True)
    has_end: ClassVar[bool] = True
    key: str
    recipe: dict[str, Any]
    report: dict[str, Any]
    contents: tuple[str, ...]


class FollowedSpec(BaseModel):
    """Holds what is known of it before its source is looked at again.

    Attributes:
        key: of the recipe, which names the first listing.
        recipe: as an entry has it.
        report: what a builder knows before it begins.
        listings: name of the folder of listings.
        uid: of the first listing.
    """

    model_config = ConfigDict(frozen=True)
    has_end: ClassVar[bool] = False
    key: str
    recipe: dict[str, Any]
    report: dict[str, Any]
    listings: str
    uid: str


class AddedSpec(BaseModel):
    """Holds what is known of columns that are computed while the slices of their rows come.

    Attributes:
        key: of the recipe.
        recipe: that of the rows, with what is added.
        folder: of the rows.
        base: what is known of the rows.
    """

    model_config = ConfigDict(frozen=True)
    key: str
    recipe: dict[str, Any]
    folder: str
    base: GrowingSpec | FollowedSpec | AddedSpec

    @property
    def has_end(self) -> bool:
        """Returns what the rows say."""
        return self.base.has_end


Coming = GrowingSpec | FollowedSpec | AddedSpec
