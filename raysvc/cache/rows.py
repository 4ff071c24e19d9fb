"""The rows of one entry or of several, read as one.

Axes: K entries, N rows.

Always true:
- the rows of the entries lie one after the other, in the order of the entries; those of one that grows leave gaps;
- a row has the columns that all entries have, with the values of its own entry; a column that one of them lacks is not there,
  except those of media: rows of an entry without them have none;
- nothing is copied that was not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.cache.key import cache_key
from raysvc.cache.local.large_array import concatenated
from raysvc.cache.names import MAY_LACK
from raysvc.errors import EntryError
from raysvc.row_batch import Array, RowBatch, WideRows
from raysvc.row_ids import source_base, split, written

if TYPE_CHECKING:
    import pyarrow as pa

    from raysvc.cache.entry import Entry

Ids = npt.NDArray[np.int64]


class Rows:
    """Holds what a run reads: the rows of K entries, by their addresses.

    Args:
        entries: of one tokenizer; entry k is source k.

    Attributes:
        entries: as given.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)

    @property
    def uri(self) -> str:
        """Those of the entries."""
        return ", ".join(entry.uri for entry in self.entries)

    @property
    def key(self) -> str:
        """That of the only entry, or a hash of all keys."""
        keys = [entry.key for entry in self.entries]
        return keys[0] if len(keys) == 1 else cache_key({"joined": keys})

    @property
    def num_rows(self) -> int:
        """Rows of all entries."""
        return sum(entry.num_rows for entry in self.entries)

    def first_row(self) -> int:
        """The number of a row that is there."""
        return self.entries[0].first_row()

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries."""
        return sum(entry.num_tokens for entry in self.entries)

    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every row, int32 [N]."""
        return concatenated([entry.lengths() for entry in self.entries])

    def places(self, row_ids: npt.NDArray[np.integer[Any]]) -> tuple[Ids, Ids]:
        """Returns for each row the number of its entry, and its id there; int64 [N] both.

        Raises:
            IndexError: a row that is not there.
        """
        ids = np.asarray(row_ids, np.int64)
        numbers = split(ids).source
        gone = (numbers < 0) | (numbers >= len(self.entries))
        if gone.any():
            raise IndexError(f"there is no row {written(ids[int(np.argmax(gone))])}")
        return numbers, ids - source_base(numbers)

    def id_at(self, place: int) -> int:
        """Returns the id of the row at a place in their order; -1 is the last one.

        Raises:
            IndexError: there is no such place.
        """
        if not -self.num_rows <= place < self.num_rows:
            raise IndexError(f"there is no row {place} of {self.num_rows:,} rows")
        left = place % self.num_rows
        for source, entry in enumerate(self.entries):
            if left < entry.num_rows:
                return source_base(source) + int(entry.row_ids(left, left + 1)[0])
            left -= entry.num_rows
        raise AssertionError("the entries have num_rows rows")

    def row_ids(self) -> Ids:
        """int64 [N], ids of all rows, entry after entry."""
        return np.concatenate([source_base(k) + one.row_ids() for k, one in enumerate(self.entries)])

    def read(self, row_ids: npt.NDArray[np.integer[Any]]) -> RowBatch:
        """Rows in the given order; see `Entry.read`."""
        ids = np.asarray(row_ids, np.int64)
        if len(self.entries) == 1:  # nothing to bring together
            return self.entries[0].read(ids)
        numbers, local = self.places(ids)
        used = np.unique(numbers).tolist() or [0]
        where = {number: np.flatnonzero(numbers == number) for number in used}
        batches = {number: self.entries[number].read(local[where[number]]) for number in used}
        lengths = np.empty(len(ids), np.int64)
        for number, batch in batches.items():
            lengths[where[number]] = batch.lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = {name: np.empty(offsets[-1], kind) for name, kind in self._kinds.tokens.items()}
        rows = {
            name: np.empty((len(ids), *self._kinds.shapes[name]), kind)
            for name, kind in self._kinds.rows.items()
        }
        pieces: dict[str, list[Array]] = {name: [np.empty(0)] * len(ids) for name in self._kinds.wide}
        for number, batch in batches.items():
            _put(batch, where[number], offsets, tokens, rows)
            for name, parts in pieces.items():
                for place, values in zip(where[number].tolist(), batch.wide[name].pieces, strict=True):
                    parts[place] = values
        wide = {name: WideRows(*self._kinds.wide[name], parts) for name, parts in pieces.items()}
        return RowBatch(ids, offsets, tokens, rows, wide)

    def prefetch(self, row_ids: npt.NDArray[np.integer[Any]]) -> None:
        """Announce rows; see `Entry.prefetch`."""
        numbers, local = self.places(row_ids)
        for number in np.unique(numbers).tolist():
            self.entries[number].prefetch(local[numbers == number])

    def row(self, row_id: int) -> dict[str, Any]:
        """One row as plain Python values."""
        numbers, local = self.places(np.array([row_id]))
        return self.entries[int(numbers[0])].row(int(local[0]))

    def table(self) -> pa.Table:
        """All rows as one table, memory-mapped, with the columns that all entries have."""
        import pyarrow as pa

        tables = [entry.table() for entry in self.entries]
        common = [name for name in tables[0].column_names if all(name in one.column_names for one in tables)]
        return pa.concat_tables([table.select(common) for table in tables])

    @cached_property
    def _kinds(self) -> _Kinds:
        samples = [
            entry.read(entry.first_row() + np.arange(min(1, entry.num_rows))) for entry in self.entries
        ]
        return _Kinds(self.uri, samples)


class _Kinds:
    """Columns that all entries have, with a type that holds the values of each.

    Raises:
        EntryError: a column has several shapes, or is of several numbers a token with several types.
    """

    def __init__(self, uri: str, samples: Sequence[RowBatch]) -> None:
        self.tokens = _common(uri, [one.tokens for one in samples])
        self.rows = _common(uri, [_with_no_media(one, samples) for one in samples])
        self.shapes = {
            name: next(one.rows[name].shape[1:] for one in samples if name in one.rows) for name in self.rows
        }
        self.wide: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for name, values in samples[0].wide.items():
            if all(name in one.wide for one in samples):
                self.wide[name] = values.dtype, values.shape
                _same(uri, name, [one.cell(name) for one in samples])


def _with_no_media(sample: RowBatch, samples: Sequence[RowBatch]) -> dict[str, Array]:
    """The per-row columns of an entry, with those of media where another entry has them."""
    some = {name: one.rows[name] for one in samples for name in MAY_LACK if name in one.rows}
    return {**{name: values[:0] for name, values in some.items()}, **sample.rows}


def _common(uri: str, entries: Sequence[Mapping[str, Array]]) -> dict[str, np.dtype[Any]]:
    names = [name for name in entries[0] if all(name in one for one in entries)]
    for name in names:
        _same(uri, name, [one[name].shape[1:] for one in entries])
    return {name: _type_of_all([one[name].dtype for one in entries]) for name in names}


def _type_of_all(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    return dtypes[0] if len(set(dtypes)) == 1 else np.result_type(*dtypes)


def _same(uri: str, name: str, found: Sequence[object]) -> None:
    if any(one != found[0] for one in found):
        told = " and ".join(sorted({str(one) for one in found}))
        raise EntryError(uri, f"column {name} is {told} in different entries", "give all sources one shape")


def _put(
    batch: RowBatch, where: Ids, offsets: Ids, tokens: Mapping[str, Array], rows: Mapping[str, Array]
) -> None:
    """Copy the rows of one entry to their places."""
    shift = np.repeat(offsets[where] - batch.offsets[:-1], batch.lengths)
    cells = np.arange(len(shift)) + shift
    for name, column in tokens.items():
        column[cells] = batch.tokens[name]
    for name, column in rows.items():
        column[where] = batch.rows[name] if name in batch.rows else MAY_LACK[name]
