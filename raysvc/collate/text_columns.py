"""Text that goes with a row to the worker: of one width in the whole run, so that bytes follow from the plan; with a window, of one width
in a mini-batch, since its entry may not be finished.

Axes: N rows.
Always true:
- a text is whole: the width is that of the longest one of the entry, or of the mini-batch; text that is missing is "";
- columns of text that do not travel are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from raysvc.row_batch import RowBatch

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry


def text_widths(entries: Sequence[Entry], columns: Sequence[str]) -> dict[str, int]:
    """Column of text among `columns` -> characters of the longest one, of an entry or of all of a mixture."""
    found = [(n, w) for one in entries for n, w in one.report.get("text_widths", {}).items() if n in columns]
    return {name: max(1, *(width for other, width in found if other == name)) for name, _ in found}


def text_names(rows: RowBatch, columns: Sequence[str]) -> tuple[str, ...]:
    """Those of `columns` that hold text."""
    return tuple(name for name in columns if name in rows.rows and rows.rows[name].dtype == object)


def widest_of(rows: RowBatch, names: Sequence[str]) -> dict[str, int]:
    """Column of text -> characters of the longest one of these rows, at least 1."""
    return {
        name: max((len(text or "") for text in rows.rows[name].tolist()), default=0) or 1 for name in names
    }


def of_fixed_width(rows: RowBatch, widths: Mapping[str, int]) -> RowBatch:
    """The rows with these columns as numpy's text of a fixed width."""
    texts = {name: rows.rows[name] for name in widths if name in rows.rows}
    if not texts:
        return rows
    fixed = {
        name: np.array([text or "" for text in values.tolist()], f"<U{widths[name]}")
        for name, values in texts.items()
    }
    return replace(rows, rows={**rows.rows, **fixed})
