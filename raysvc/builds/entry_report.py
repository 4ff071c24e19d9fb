"""The report of an entry, as far as it can be believed.

Always true:
- a field that raysvc reads has the type it was written with, or reading the report is an EntryError;
- a field that is missing is an EntryError when it is asked for, never a KeyError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from pydantic import BaseModel, ConfigDict, ValidationError

from raysvc.cache.part_info import REBUILD
from raysvc.errors import EntryError


class _Example(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    source_row: int
    reason: str
    detail: str = ""
    dataset: str = ""


class _Fields(BaseModel):
    """What raysvc reads of a report; a builder may have written more, and an early one less."""

    model_config = ConfigDict(strict=True, extra="allow")

    pad_token_id: int = 0
    vocab_size: int = 0
    row_counts: dict[str, int | dict[str, int]] = {}
    examples: list[_Example] = []
    verification: dict[str, int | list[str]] = {}
    encoders: dict[str, int] = {}
    left_out: list[str] = []
    text_widths: dict[str, int] = {}
    length_percentiles: dict[str, int] = {}
    seconds: float = 0.0
    source_bytes: int = 0
    source_rows: list[int] = []
    paths: list[str] = []


class Report(dict[str, Any]):
    """Fields by name."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        """Check the fields.

        Args:
            fields: as the manifest holds them.
            where: URI of the entry, for messages.

        Raises:
            EntryError: a field of another type than any builder writes.
        """
        try:
            _Fields.model_validate(dict(fields))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(str(step) for step in first["loc"][:2])[:60]
            raise EntryError(where, f"its report has a wrong {place} ({first['msg']})", REBUILD) from None
        super().__init__(fields)
        self._where = where

    def __missing__(self, name: str) -> Never:
        raise EntryError(self._where, f"its report has no {name}", REBUILD)
