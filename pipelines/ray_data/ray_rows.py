"""The rows of a Ray Dataset, cut into slices while they stream.

1. Ray Data keeps the order of blocks (`preserve_order`) and cuts them into blocks of `slice_rows` rows; the last one may have less.
2. An id that counts tasks says which of these a block is. So slice i has rows i * slice_rows and on, whatever blocks were before.
3. Whoever reads the answers compares: they come as slices 0, 1, 2, ... without a gap, all full but the last.

Axes: N rows of a slice.

Always true:
- how rows are cut depends on the rows and their order alone, never on blocks, tasks or workers;
- a digest is of rows in JSON types, so a null in a struct and a field that is absent are the same;
- no row comes to the process that asks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from raysvc.chat.source.json_rows import SourceRow
from raysvc.errors import RaysvcError, SourceError
from raysvc.pipelines.reading.arrow_rows import first_of_table, rows_of_table
from raysvc.pipelines.sources.slices import Piece, Slice
from raysvc.row_ids import MOST_SLICES

if TYPE_CHECKING:
    import ray.data

WHERE = "source.ray"
SLICE_BYTES = 1 << 23  # about so many of JSON
LEAST_ROWS, MOST_ROWS = 1 << 4, 1 << 11  # of a slice
_ID = "__raysvc_id"
_TASK_BITS = 33  # of `monotonically_increasing_id`: the row in its task
_CAUSE = re.compile(r"^[\w.]+: \S.*", re.MULTILINE)


def first_row(data: ray.data.Dataset) -> dict[str, Any]:
    """The first row; runs as much of the Dataset as that needs.

    Raises:
        SourceError: there is none, or the Dataset fails.
    """
    with _executed(data.limit(1)) as one:
        for table in one.iter_batches(batch_size=1, batch_format="pyarrow"):
            return next(first_of_table(table))
    raise SourceError(WHERE, "its Dataset has no row", "give one with at least one row")


def rows_of_slice(row: dict[str, Any]) -> int:
    """Returns how many rows a slice has, by the size of the first row: a power of two."""
    fit = max(1, SLICE_BYTES // len(_text(row)))
    return max(LEAST_ROWS, min(MOST_ROWS, 1 << (fit.bit_length() - 1)))


def numbered(data: ray.data.Dataset, slice_rows: int) -> ray.data.Dataset:
    """The rows in blocks of a slice each, with what says which slice that is; lazy."""
    from ray.data.expressions import monotonically_increasing_id

    cut = data.repartition(target_num_rows_per_block=slice_rows, strict=True)
    return cut.with_column(_ID, monotonically_increasing_id())


def kept(data: ray.data.Dataset) -> ray.data.Dataset:
    """The rows in the object stores of the cluster, which spill to disk: the Dataset runs once, and not when they are read again.

    Raises:
        SourceError: the Dataset fails.
    """
    with _executed(data) as whole:
        return whole.materialize()


def slices_of(rows: ray.data.Dataset, slice_rows: int) -> tuple[Slice, ...]:
    """All slices of numbered rows, with the digests of their rows.

    Raises:
        SourceError: the Dataset fails, or holds what no row can have.
    """

    def look(table: pa.Table) -> pa.Table:
        return answered(lambda: (read_slice(table, slice_rows)[0], ""))

    return tuple(piece for piece, _ in streamed(rows, slice_rows, look))


def streamed(
    rows: ray.data.Dataset, slice_rows: int, work: Any, **options: Any
) -> Iterator[tuple[Slice, str]]:
    """Run `work` on every slice; slices, each with what was answered, in their order.

    Args:
        rows: numbered.
        work: as `map_batches` takes it; gets a table, returns `answered`.
        options: of `map_batches`.

    Raises:
        SourceError: the Dataset fails, or its rows are not in order.
        RaysvcError: what `work` raised on purpose, as it was raised there.
    """
    graph = rows.map_batches(work, batch_size=None, batch_format="pyarrow", **options)
    index, is_full = 0, True
    with _executed(graph) as ordered:
        for row in ordered.iter_rows():
            if row["error"]:
                raise _error_of(row["error"])
            piece = Slice.from_json(json.loads(row["slice"]))
            if piece.index != index or not is_full:
                what = f"Ray Data gave slice {piece.index} where {index} comes"
                raise SourceError(WHERE, what, "write the Dataset to files, and name these in source.path")
            yield piece, row["answer"]
            index, is_full = index + 1, piece.num_rows == slice_rows


def read_slice(table: pa.Table, slice_rows: int) -> tuple[Slice, list[SourceRow]]:
    """Returns which slice a block is, and its rows.

    Raises:
        SourceError: it holds Python objects, or there are more slices than an entry has.
    """
    index = table.column(_ID)[0].as_py() >> _TASK_BITS
    if index >= MOST_SLICES:
        what = f"its Dataset has more than {index * slice_rows} rows; maybe it has no end"
        raise SourceError(WHERE, what, "end it with limit(n), or split it into several sources")
    table = table.drop_columns([_ID])
    rows = list(rows_of_table(table, index * slice_rows))
    digest, num_bytes = hashlib.sha256(), 0
    for row in rows:
        text = _text(row.data or {})
        digest.update(len(text).to_bytes(8, "little") + text)
        num_bytes += len(text)
    piece = Piece("", "ray", index * slice_rows, 0, len(rows), num_bytes, fingerprint=digest.hexdigest())
    return Slice(index, index * slice_rows, len(rows), (replace(piece, end=piece.start + len(rows)),)), rows


def answered(work: Callable[[], tuple[Slice, str]]) -> pa.Table:
    """Returns what a worker returns for a slice."""
    try:
        piece, answer = work()
        row = {"slice": json.dumps(piece.to_json()), "answer": answer, "error": ""}
    except RaysvcError as error:  # Ray Data would wrap it until its type is lost
        row = {"slice": "", "answer": "", "error": json.dumps([type(error).__name__, *error.args])}
    return pa.table({name: [value] for name, value in row.items()})


def _error_of(text: str) -> RaysvcError:
    from raysvc import errors

    name, *args = json.loads(text)
    error: RaysvcError = getattr(errors, name)(*args)
    return error


@contextmanager
def _executed(data: ray.data.Dataset) -> Iterator[ray.data.Dataset]:
    """The Dataset, which keeps the order of its blocks meanwhile; its context is shared with what it was made of.

    Raises:
        SourceError: it fails.
    """
    from ray.exceptions import RayError

    options = data.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield data
    except RayError as error:
        cause = _CAUSE.search(str(error))  # of several that caused each other the first is told first
        what = f"its Dataset failed: {cause[0] if cause else type(error).__name__}"
        raise SourceError(WHERE, what[:500], "run its take_all() by itself, and correct it") from error
    finally:
        options.preserve_order = before


def _text(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, default=_shown, option=orjson.OPT_SORT_KEYS)
    except (TypeError, orjson.JSONEncodeError):  # integers beyond 64 bits, text that is no UTF-8
        return json.dumps(row, default=_shown, sort_keys=True).encode()


def _shown(value: Any) -> str:
    return f"bytes {hashlib.sha256(value).hexdigest()}" if isinstance(value, bytes) else repr(value)
