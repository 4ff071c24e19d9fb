"""The report of an entry, or of several as one, as far as it can be believed.

Always true:
- a field that raysvc reads has the type it was written with, or reading the report is an EntryError;
- a field that is missing is an EntryError when it is asked for, never a KeyError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, Never

from pydantic import BaseModel, ConfigDict, ValidationError

from raysvc.cache.part_info import REBUILD
from raysvc.chat.row_counts import RowCounts
from raysvc.errors import EntryError

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry


class _Example(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    source_row: int
    reason: str
    detail: str = ""
    dataset: str = ""


class _Fields(BaseModel):
    """Holds what raysvc reads of a report; a builder may have written more, and an early one less."""

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


def joined_report(entries: Sequence[Entry], names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Returns what the builders of some entries of one tokenizer reported, added up; where one grows, what is known before it ends.

    Args:
        names: of the sources of a mixture, which quarantined rows are told by.
    """
    from raysvc.builds.build_report import percentiles

    reports = [one.report for one in entries]
    if len(entries) == 1:
        return reports[0]
    if not all("row_counts" in one for one in reports):
        known = {name: value for name, value in reports[0].items() if all(name in one for one in reports)}
        return {**known, **_known_before(reports)}
    lengths = percentiles(chain.from_iterable(one.lengths_by_slice() for one in entries))
    examples = [
        {**example, **({"dataset": names[number]} if names else {})}
        for number, one in enumerate(reports)
        for example in one["examples"]
    ]
    return {**_added(reports), "examples": examples, "length_percentiles": lengths}


def _added(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    verifications = [one["verification"] for one in reports]
    row_counts = reduce(RowCounts.__add__, (RowCounts(**one["row_counts"]) for one in reports))
    switched = {
        reason for verification in verifications for reason in verification["switched_to_the_reference"]
    }
    return {
        **reports[0],
        "row_counts": row_counts.to_json(),
        "verification": {
            "rows_compared_with_the_reference": sum(
                verification["rows_compared_with_the_reference"] for verification in verifications
            ),
            "switched_to_the_reference": sorted(switched),
        },
        "left_out": sorted({name for one in reports for name in one.get("left_out", ())}),
        "encoders": dict(sum((Counter(one["encoders"]) for one in reports), Counter[str]())),
        "seconds": round(sum(one["seconds"] for one in reports), 3),
        **_known_before(reports),
    }


def _known_before(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what is known of several builds before a row is tokenized."""
    return {
        "source_bytes": sum(one.get("source_bytes", 0) for one in reports),
        "paths": [path for one in reports for path in one["paths"]],
    }
