"""Finds where every row of a step comes from, and where it went.

Always true:
- one line a row, dummies included, in the order of mini-batches, ranks and lines;
- `plan_position` is the place of the row's group in the order of its epoch: with the seed, all that decided it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.inspect.row_view import DUMMY, RowPicture
from raysvc.row_ids import written

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.plan.schedule import Schedule


@dataclass(frozen=True)
class LineageRow:
    """One row; what a dummy does not have is None."""

    mini: int
    rank: int
    micro: int
    line: int
    column: int
    row_id: str | None
    source: str | None
    source_row: int | None
    plan_position: int | None
    tokens: int
    trained: int


def lineage(
    pictures: Sequence[RowPicture], step: int, schedule: Schedule, entry: CacheEntry | None
) -> list[LineageRow]:
    """The lines of some rows of `step`; without an entry (rollouts) source and source row are not known."""
    real = sorted({picture.row_id for picture in pictures} - {DUMMY})
    origins = {} if entry is None else dict(zip(real, entry.origins(real), strict=True))
    return [_row(picture, step, schedule, origins) for picture in pictures]


def _row(
    picture: RowPicture, step: int, schedule: Schedule, origins: Mapping[int, tuple[str, int]]
) -> LineageRow:
    assert picture.place is not None, "a row of a shard has a place"
    real = picture.row_id != DUMMY
    first = schedule.position_of(step) + picture.place.mini * schedule.mini_batch_size
    source, source_row = origins.get(picture.row_id, (None, None))
    known: dict[str, Any] = {
        "row_id": written(picture.row_id) if real else None,
        "source": source,
        "source_row": source_row,
        "plan_position": first + (picture.group or 0) if real else None,
    }
    return LineageRow(*picture.place, **known, tokens=picture.length, trained=picture.trained)
