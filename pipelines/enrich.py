"""Columns that models compute for the rows of an entry: slices of rows -> columns -> parts and receipts.

Rows and columns stay in the worker that reads, computes and writes them. A slice that is done again gives the same part.
What computes is given by the caller, so this room knows no model.

Always true:
- a slice whose receipt is in the store is not computed again;
- a part holds the new columns alone, one value per token of the rows of its slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from raysvc.cache.entry import Entry
from raysvc.cache.manifest import Receipt
from raysvc.cache.writer import EntryWriter
from raysvc.chat.carry import arrow_values
from raysvc.pipelines.row_slices import RowSlice
from raysvc.pipelines.slice_graph import WorkerPool, answers, receipts_from, slice_graph
from raysvc.pipelines.tokenize import worker_of
from raysvc.row_batch import AddedColumns, RowBatch
from raysvc.row_ids import slice_base


class ColumnComputer(Protocol):
    """Computes columns of rows; may hold a model."""

    def __call__(self, rows: RowBatch) -> AddedColumns:
        """The columns of all tokens of the rows."""
        ...


@dataclass(frozen=True)
class EnrichTask:
    """Holds what every worker knows.

    Attributes:
        base: entry whose rows get columns.
        writer: of the entry with the columns.
        load: makes what computes; called once a worker, when its first slice comes.
        slices: what is said of each slice of a base that grows, whose slices are those of the columns; None: the base is finished.
    """

    base: Entry
    writer: EntryWriter
    load: Callable[[], ColumnComputer]
    slices: Mapping[int, Mapping[str, Any]] | None = None


class EnrichWorker:
    """Computes slices in a Ray Data actor; the model is loaded once."""

    def __init__(self, task: EnrichTask) -> None:
        self._task = task

    @cached_property
    def _compute(self) -> ColumnComputer:
        return self._task.load()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return answers(
            batch["slice"], lambda piece: compute_slice(self._task, self._compute, RowSlice(*piece))
        )


def receipts_of(
    task: EnrichTask, slices: Sequence[RowSlice], pool: WorkerPool
) -> Iterator[tuple[int, Receipt]]:
    """Yields the receipts of all slices, each with 0, the number of the only entry; what somebody else has computed
    meanwhile is taken.
    """
    done, left = split_computed(task.writer, slices, task.slices)
    yield from ((0, receipt) for receipt in done.values())
    if left:
        graph = slice_graph(EnrichWorker, task, [piece.to_json() for piece in left], pool)
        yield from ((0, receipt) for _, receipt in receipts_from(graph))


def compute_slice(task: EnrichTask, compute: ColumnComputer, piece: RowSlice) -> Receipt:
    """Read, compute and write one slice: what a build does in a worker, or in the process that asks."""
    began_s = time.time()
    if task.slices is None:
        rows = task.base.read(task.base.row_ids(piece.first_row, piece.first_row + piece.num_rows))
    else:
        rows = task.base.read(slice_base(piece.index) + np.arange(piece.num_rows))
    computed = compute(rows)
    offsets = pa.array(rows.offsets.astype(np.int32))
    table = pa.table(
        {
            name: pa.ListArray.from_arrays(offsets, arrow_values(values))
            for name, values in computed.columns.items()
        }
    )
    meta: dict[str, Any] = {"facts": dict(computed.facts), "worker": worker_of(began_s)}
    if task.slices is None:
        meta["rows"] = piece.to_json()
    else:
        meta["slice"] = dict(task.slices[piece.index])
    return task.writer.write_part(piece.index, table, meta, required={})


def split_computed(
    writer: EntryWriter, slices: Sequence[RowSlice], of_rows: Mapping[int, Mapping[str, Any]] | None = None
) -> tuple[dict[int, Receipt], list[RowSlice]]:
    """Receipts of an earlier builder, and the slices that are left to do.

    Args:
        of_rows: as `EnrichTask.slices`.
    """
    key = "rows" if of_rows is None else "slice"
    wanted: dict[int, Any] = {
        piece.index: of_rows[piece.index] if of_rows is not None else piece.to_json() for piece in slices
    }

    def fits(receipt: Receipt) -> bool:
        facts = receipt.meta.get("facts")
        numbers = isinstance(facts, dict) and all(type(one) in (int, float) for one in facts.values())
        return numbers and receipt.meta.get(key) == wanted.get(receipt.slice_index, 0)

    done = writer.receipts(fits)
    return done, [piece for piece in slices if piece.index not in done]
