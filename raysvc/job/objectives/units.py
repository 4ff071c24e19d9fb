"""Names what rows are counted in: two rows of a pair are one pair.

Always true:
- a count says its unit: `pairs`, `examples` that stand beside a mismatched row, or `rows` that count for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raysvc.progress import how_many

UNITS = {"preference": "pairs", "kto": "examples"}  # by the format of the rows


class Count(NamedTuple):
    """Counts pairs, examples or rows."""

    number: int
    unit: str

    def __str__(self) -> str:
        return how_many(self.number, self.unit.removesuffix("s"))


def count_of(line: Mapping[str, Any]) -> Count:
    """Returns how much a line of a log or a summary is of."""
    unit = next((name for name in UNITS.values() if name in line), "rows")
    return Count(line[unit], unit)


def untrained_text(found: Mapping[str, Any]) -> list[str]:
    """Says of each reason how many rows, or pairs, no step trained.

    Args:
        found: as `raysvc.inspect.left_out` returns it.
    """
    if (untrained := found.get("untrained", {})) is None:
        return ["rows in no step are not counted of so many"]
    unit = found.get("unit", "rows")
    return [f"{how_many(count, unit.removesuffix('s'))} {why}" for why, count in untrained.items()]
