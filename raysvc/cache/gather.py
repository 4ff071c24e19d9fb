"""Rows by number out of several parts, as flat arrays.

Axes: N rows asked for, T tokens of all of them.

Always true:
- rows come in the order in which they were asked for, and may be asked for twice;
- tokens are compared with their checksums before they are copied;
- no Python object is made per token: a row is one slice, and all slices are joined in one copy; those of a column of
  several numbers a token are not joined, and copied by nobody here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from raysvc.cache.parts import PartView
from raysvc.ragged import offsets_of
from raysvc.row_batch import Array, RowBatch, WideRows

Ids = npt.NDArray[np.int64]


def parts_of(row_ids: Ids, starts: Ids) -> Ids:
    """Index of the part that holds each row, int64 [N].

    Args:
        row_ids: int64 [N].
        starts: int64 [parts + 1], first row of each part, and the number of rows.

    Raises:
        IndexError: a row that is not in the entry.
    """
    if len(row_ids) and (row_ids.min() < 0 or row_ids.max() >= starts[-1]):
        raise IndexError(f"rows {row_ids.min()} to {row_ids.max()} of an entry of {starts[-1]} rows")
    return np.searchsorted(starts, row_ids, side="right") - 1


def gather(row_ids: Ids, starts: Ids, views: Mapping[int, PartView]) -> RowBatch:
    """Copy rows into fresh arrays.

    Args:
        row_ids: int64 [N].
        starts: as in `parts_of`.
        views: part index -> its arrays, for every part that holds one of the rows, and at least one.
    """
    first = next(iter(views.values()))
    begins, ends = np.empty(len(row_ids), np.int64), np.empty(len(row_ids), np.int64)
    rows = {n: np.empty((len(row_ids), *values.shape[1:]), values.dtype) for n, values in first.rows.items()}
    rows |= {name: np.empty(len(row_ids), object) for name in first.texts}
    slices: dict[str, list[Array]] = {
        name: [values[:0]] * len(row_ids) for name, values in first.tokens.items()
    }
    for index, places in _by_part(parts_of(row_ids, starts)):
        view, local = views[index], row_ids[places] - starts[index]
        begins[places], ends[places] = view.offsets[local], view.offsets[local + 1]
        view.check_rows(begins[places], ends[places])
        for name, values in view.rows.items():
            rows[name][places] = values[local]
        for name, texts in view.texts.items():
            rows[name][places] = [texts[row].as_py() for row in local.tolist()]
        _slice_tokens(view, places, begins, ends, slices)
    offsets = offsets_of(ends - begins)
    wide = {
        name: WideRows(values.dtype, values.shape[1:], slices[name])
        for name, values in first.tokens.items()
        if values.ndim > 1
    }
    tokens = {
        name: np.concatenate([first.tokens[name][:0], *parts])
        for name, parts in slices.items()
        if name not in wide
    }
    return RowBatch(row_ids, offsets, tokens, rows, wide)


def _by_part(part_index: Ids) -> Iterator[tuple[int, Ids]]:
    """Each part with the places of its rows in the request."""
    order = np.argsort(part_index, kind="stable")
    used, firsts = np.unique(part_index[order], return_index=True)
    yield from zip(used.tolist(), np.split(order, firsts[1:]), strict=False)  # no rows: one split, none used


def _slice_tokens(
    view: PartView, places: Ids, begins: Ids, ends: Ids, slices: dict[str, list[Array]]
) -> None:
    spans = list(zip(places.tolist(), begins[places].tolist(), ends[places].tolist(), strict=True))
    for name, values in view.tokens.items():
        target = slices[name]
        for place, begin, end in spans:
            target[place] = values[begin:end]
