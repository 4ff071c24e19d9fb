"""Tokenizing a Ray Dataset: its blocks stream through actors of ours, which write parts and receipts.

Always true:
- a slice that an earlier build has finished is not tokenized again, where its rows are still the same;
- rows that are not those by which the entry is named are an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raysvc.cache.manifest import Receipt
from raysvc.chat.row_counter import FirstRows
from raysvc.chat.row_counts import errors_of
from raysvc.errors import SourceError
from raysvc.job.config import PoolConfig
from raysvc.pipelines.ray_data.ray_rows import WHERE, answered, read_slice, streamed
from raysvc.pipelines.ray_data.ray_source import RaySource
from raysvc.pipelines.sources.slices import Slice
from raysvc.pipelines.tokenize import BuildTask, SliceWorker, write_slice

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
ACTOR_SHARE = 0.5  # of a processor that an actor reserves: the tasks of the Dataset need some too


class RowsWorker(SliceWorker):
    """Tokenizes slices whose rows come to it, in a Ray Data actor.

    Args:
        task: what every worker knows.
        slice_rows: of a slice.
        made: index -> digest of slices that are finished.
        named: digest of every slice, by which the entry is named; (): it is named by a version.
    """

    def __init__(
        self, task: BuildTask, slice_rows: int, made: Mapping[int, str], named: tuple[str, ...]
    ) -> None:
        super().__init__([task])
        self._task, self._slice_rows, self._made, self._named = task, slice_rows, made, named

    def __call__(self, table: pa.Table) -> pa.Table:
        return answered(lambda: self._answer(table))

    def _answer(self, table: pa.Table) -> tuple[Slice, str]:
        began_s = time.time()
        with errors_of(self._task.name):
            piece, rows = read_slice(table, self._slice_rows)
            digest = piece.identity()["bytes"]
            if self._named and (piece.index >= len(self._named) or self._named[piece.index] != digest):
                what = f"slice {piece.index} has other rows than when the Dataset was looked at"
                remedy = "give it an order and seeds, materialize() it, or state source.version"
                raise SourceError(WHERE, what, remedy)
            if self._made.get(piece.index) == digest:
                return piece, ""
            tokenizer = self.tokenizer(0)
            if tokenizer.desk is not None:
                tokenizer.desk.folder_of = lambda source_row: ""
            result = tokenizer.run(iter(rows), FirstRows(self._task.max_quarantine, before=piece.first_row))
            return piece, write_slice(self._task, tokenizer, piece, result, began_s).to_json().decode()


def receipts_of_rows(
    task: BuildTask, source: RaySource, made: Mapping[int, Receipt], pool: PoolConfig
) -> Iterator[tuple[Slice, Receipt]]:
    """Run the Dataset through actors; slices and their receipts in order.

    Args:
        made: receipts of an earlier build.
        pool: workers.

    Raises:
        RaysvcError: what a slice raised on purpose, or the Dataset fails.
    """
    import ray

    digests = {index: str(one.meta["slice"]["bytes"]) for index, one in made.items()}
    named = tuple(piece.identity()["bytes"] for piece in source.slices)
    processors = ray.cluster_resources().get("CPU", 1.0)
    most = pool.max or max(1, int(processors / pool.num_cpus))
    options: dict[str, Any] = {"resources": dict(pool.resources)} if pool.resources else {}
    if pool.memory_gb is not None:
        options["memory"] = pool.memory_gb * 1e9
    if pool.label_selector:
        options["label_selector"] = dict(pool.label_selector)
    found = streamed(
        source.rows, source.slice_rows, RowsWorker,
        fn_constructor_args=(task, source.slice_rows, digests, named),
        compute=ray.data.ActorPoolStrategy(min_size=min(pool.min, most), max_size=most),
        num_cpus=ACTOR_SHARE * pool.num_cpus, **options,
    )  # fmt: skip
    changed = 0
    for piece, text in found:
        if text and piece.index in made:
            changed += 1
        yield piece, Receipt.from_json(text.encode(), "receipt") if text else made[piece.index]
    if changed:
        what = "slices that were finished have other rows now, and were tokenized again: the Dataset is not deterministic"
        log.warning("%d %s", changed, what)
