"""Nulls in objects of JSON: values that somebody wrote, or what a writer of tables filled in.

`Dataset.to_json` gives every object the keys of all rows, with null where a row has none. Nothing in a row tells these
from nulls that mean something, so they are counted, and left out where a job says so.

Always true:
- a null inside a list stays, and so does what stands in a text;
- what came in is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysvc.chat.row_errors import RowFault

NULLS_IN_CALLS = "nulls in arguments of calls"
NULLS_IN_TOOLS = "nulls in tools"
NULLS = frozenset({NULLS_IN_CALLS, NULLS_IN_TOOLS})  # noted, and nothing is changed by it
_MEANT = "default"  # of a schema, where null says something


def holds_null(value: Any) -> bool:
    """Whether an object in a value has a null that is no default of a schema."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if any(item is None and key != _MEANT for key, item in one.items()):
                return True
            left += one.values()
        elif isinstance(one, list):
            left += one
    return False


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the keys of its objects whose value is null.

    Raises:
        RowFault: it is nested deeper than Python can follow.
    """
    try:
        return {key: _without(value) for key, value in row.items() if value is not None}
    except RecursionError:
        raise RowFault("the row is nested too deep", "source.drop_nulls looks at all of it") from None


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if item is not None}
    return [_without(item) for item in value] if isinstance(value, list) else value
