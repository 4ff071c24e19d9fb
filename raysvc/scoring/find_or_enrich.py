"""Columns for an entry: find the entry that has them, or compute them.

Always true:
- a finished entry is used as it is; a started one goes on from its receipts;
- the base is held until the entry that shares it is finished, and its bytes are not written again;
- of all who ask at once in a cluster, or on a host, one computes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.builds.build import Resumable, held_generation
from raysvc.builds.build_progress import source_tag
from raysvc.builds.find_or_build import run
from raysvc.cache.find import find_entry, open_finished
from raysvc.cache.generations import build_generation, next_generation
from raysvc.cache.growing.added_entry import of_rows
from raysvc.cache.use_marker import Hold, share, this_process
from raysvc.cache.writer import EntryWriter
from raysvc.errors import ConfigError
from raysvc.media.medium import PATCHES
from raysvc.metrics import record
from raysvc.pipelines.row_slices import RowSlice, row_slices
from raysvc.progress import Progress, Tick, silent
from raysvc.scoring.before_rows import join_pool
from raysvc.scoring.enrich_plan import (
    EnrichPlan,
    check_columns,
    check_longest,
    plan_columns,
    refuse_media,
    rows_with_media,
    vocab_size_of,
)
from raysvc.scoring.explain_columns import why_not_there

if TYPE_CHECKING:
    from raysvc.builds.places import Check
    from raysvc.cache.entry import Entry
    from raysvc.cache.manifest import Receipt
    from raysvc.job.config import JobConfig, PoolConfig
    from raysvc.pipelines.enrich import ColumnComputer, EnrichTask
    from raysvc.scoring.wanted import WantedColumns

    Left = Sequence[tuple[int, RowSlice]]

HIT = "same rows, models and options"


def find_or_enrich(
    job: JobConfig, base: Entry, wanted: WantedColumns, address: str | None, progress: Progress
) -> tuple[Entry, bool, str]:
    """The entry with the columns, whether it was there, and why it was used or computed.

    Raises:
        ConfigError: a model cannot score the rows.
        EntryError: gc deletes the base.
    """
    plan = planned(job, base, wanted, progress)
    entry = None if job.cache.force else find_entry(base.store, plan.key)
    if entry is not None:
        record("cache_hits", 1, source=source_tag(job))
        progress(Tick("enrich", entry.num_rows, entry.num_rows, "rows", {"already": "computed"}, final=True))
        return entry, True, HIT
    record("cache_misses", 1, source=source_tag(job))
    reason = "cache.force is true" if job.cache.force else why_not_there(base, plan)[0]
    with Hold(base.store, base.folder, this_process()):
        check_columns(plan, base)
        base.store.probe()
        chosen = next_generation if job.cache.force else build_generation
        generation, hold = held_generation(base.store, plan.key, chosen)
        with hold:
            writer = EntryWriter(base.store, plan.key, generation)
            share(base.store, base.folder, writer.folder)  # before hours of work, and again at the end
            return EnrichBuild(job, base, plan, writer, progress).entry(address), False, reason


def planned(job: JobConfig, base: Entry, wanted: WantedColumns, progress: Progress = silent) -> EnrichPlan:
    """The columns as they would be computed for an entry; weights that nobody has looked at before are read.

    Raises:
        ConfigError: a model is not there, or rows have media.
    """
    refuse_media(wanted, base)
    names = ", ".join(sorted(set(wanted.models.values())))
    progress(Tick("enrich", 0, None, "rows", waiting=f"looking at {names}"))
    return plan_columns(job, wanted, base.recipe, vocab_size_of(base), base.store)


class EnrichBuild(Resumable):
    """One process's share of the work: from what is finished to the manifest.

    Args:
        base: the rows, finished or to come.
        writer: of the entry with the columns.
    """

    name = ""

    def __init__(
        self, job: JobConfig, base: Entry, plan: EnrichPlan, writer: EntryWriter, progress: Progress = silent
    ) -> None:
        super().__init__()
        self.job, self.base, self.plan, self.writer, self.progress = job, base, plan, writer, progress
        self._of_rows: Mapping[int, Mapping[str, Any]] | None = None  # they are those of the rows
        self._compute: ColumnComputer | None = None  # of this process
        self._begin = time.perf_counter()

    def entry(self, address: str | None) -> Entry:
        """Compute what nobody has computed, and finish the entry."""
        from raysvc.pipelines.local_build import only_builder_here

        self.start()
        if not self._is_small():
            return run([self], partial(self._in_cluster, address))[0]
        with only_builder_here(self.writer.uri, self._say_another) if self.left else nullcontext():
            return run([self], self._in_this_process)[0]

    def start(self, needed: Collection[int] | None = None) -> None:
        """Look at what is computed; who has computed columns while rows came has cut them as the rows are."""
        from raysvc.pipelines.enrich import split_computed

        self._slices = slices_of_rows = self._slices_of_rows()
        self._of_rows = dict(enumerate(of_rows(self.base)))
        self._done, self.left = split_computed(self.writer, slices_of_rows, self._of_rows)
        if not self._done:
            self._slices = row_slices(self.base.lengths(), self.plan.wanted.bytes_per_token)
            self._of_rows = None
            self._done, self.left = split_computed(self.writer, self._slices)
        self._meter = _Meter(self.progress, self._slices, self._done.values())

    def _slices_of_rows(self) -> list[RowSlice]:
        counts = np.diff(self.base.slice_starts).tolist()
        return [RowSlice(index, 0, rows) for index, rows in enumerate(counts)]

    def _count(self, receipt: Receipt) -> None:
        self._meter.add(receipt)

    def finish(self) -> Entry:
        """Write the manifest, and open the finished entry.

        Raises:
            ConfigError: a model is another one now.
        """
        entry = self.commit([self._done[piece.index] for piece in self._slices], self._begin)
        self._meter.finish()
        return entry

    def commit(self, receipts: Sequence[Receipt], began_s: float) -> Entry:
        """Write the manifest over a finished base, and open the finished entry.

        Args:
            receipts: of all slices.
            began_s: by `time.perf_counter`.

        Raises:
            ConfigError: a model is another one now.
        """
        self._check_unchanged()
        report = self._report(receipts, time.perf_counter() - began_s)
        self.writer.commit(receipts, dict(self.plan.recipe), report, base=self.base.folder)
        return open_finished(self.writer.uri, self.job.cache.storage_options)

    def computed(
        self,
        pieces: Sequence[RowSlice],
        slices: Sequence[Mapping[str, Any]],
        workers: PoolConfig | None,
        check: Check,
    ) -> Iterator[Receipt]:
        """Compute slices of rows that are there, of a base that grows, and yield their receipts.

        Args:
            slices: what receipts say of each slice.
            workers: of a cluster that this process has joined, for what is much; None: there are none.
            check: is called between slices; what it raises ends that.

        Raises:
            ConfigError: a row is longer than a model reads, or has no model.
        """
        from raysvc.pipelines.enrich import compute_slice, receipts_of
        from raysvc.pipelines.local_build import CLUSTER_S
        from raysvc.pipelines.slice_graph import WorkerPool

        for piece in pieces:
            if PATCHES in self.base.columns and self.base.slice_values(PATCHES, piece.index).any():
                raise rows_with_media(self.plan.wanted, f"rows of slice {piece.index}")
        lengths = [self.base.slice_lengths(piece.index) for piece in pieces]
        check_longest(self.plan, max(int(one.max(initial=0)) for one in lengths))
        task = replace(self._task("cpu"), slices={one.index: slices[one.index] for one in pieces})
        if workers is not None and self.plan.alone_s(sum(int(one.sum()) for one in lengths)) >= CLUSTER_S:
            for _, receipt in receipts_of(task, pieces, WorkerPool.of(workers)):
                check()
                yield receipt
            return
        self._compute = self._compute or task.load()
        for piece in pieces:
            check()
            yield compute_slice(task, self._compute, piece)

    def _is_small(self) -> bool:
        """Returns whether this process computes what is left before a worker of a cluster would have begun."""
        from raysvc.pipelines.local_build import CLUSTER_S

        share = sum(piece.num_rows for piece in self.left) / max(self.base.num_rows, 1)
        alone_s = self.plan.alone_s(self.base.num_tokens * share)
        return self.job.trainer.device != "cuda" and self.job.workers.min == 1 and alone_s < CLUSTER_S

    def _say_another(self) -> None:
        self.progress(Tick("enrich", 0, None, "rows", waiting="another process computes this entry"))

    def _in_this_process(self, _: Any, left: Left, check: Check) -> Iterator[tuple[int, Receipt]]:
        from raysvc.pipelines.enrich import compute_slice

        self._meter.waiting("loading the model")
        task = self._task("cpu")
        compute = task.load()
        for number, piece in left:
            check()
            yield number, compute_slice(task, compute, piece)

    def _in_cluster(
        self, address: str | None, _: Any, left: Left, check: Check
    ) -> Iterator[tuple[int, Receipt]]:
        from raysvc.pipelines.enrich import receipts_of
        from raysvc.pipelines.shared_build import SharedTask, shared_receipts

        pool = join_pool(self.job, self.writer.store.url, self.plan, address, self._meter.waiting)
        task = self._task(pool.device)
        pieces = [piece for _, piece in left]
        work = SharedTask(task.writer.uri, len(left), partial(receipts_of, task, pieces, pool.workers))
        return shared_receipts(work, pool.watch.check)

    def _task(self, device: str) -> EnrichTask:
        from raysvc.actors.worker.score import RowScorer, ScoreSpec
        from raysvc.pipelines.enrich import EnrichTask

        wanted, models = self.plan.wanted, self.plan.models
        spec = ScoreSpec(
            kind=wanted.kind,
            models={value: models[name].name for value, name in wanted.models.items()},
            by=wanted.by,
            revisions={one.name: one.revision for one in models.values() if one.revision},
            top_k=wanted.top_k,
            dtype=wanted.dtype,
            vocab_size=vocab_size_of(self.base),
            micro_batch_tokens=self.job.enrich.micro_batch_tokens,
            seed=self.job.trainer.seed,
            device=device,
        )
        return EnrichTask(self.base, self.writer, partial(RowScorer, spec), self._of_rows)

    def _check_unchanged(self) -> None:
        """Refuse weights that were written over while they were read.

        Raises:
            ConfigError: a model is another one now.
        """
        if planned(self.job, self.base, self.plan.wanted).key != self.plan.key:
            what = "its model changed while the columns were computed"
            raise ConfigError(
                f"enrich.{self.plan.wanted.kind}", what, "run again when its files are finished"
            )

    def _report(self, receipts: Sequence[Receipt], seconds: float) -> dict[str, Any]:
        """That of the base, with what was added to it."""
        totals: dict[str, float] = {}
        for receipt in receipts:
            for name, value in receipt.meta["facts"].items():
                totals[name] = totals.get(name, 0) + value
        targets = int(totals.pop("targets", 0))
        means = {f"mean_{name}": round(value / max(targets, 1), 4) for name, value in totals.items()}
        mine = {
            "columns": list(self.plan.wanted.columns),
            "models": dict(self.plan.wanted.models),
            "targets": targets,
            **means,
            "seconds": round(seconds, 3),
        }
        return {**self.base.report, "added": [*self.base.report.get("added", ()), mine]}


class _Meter:
    """Turns receipts into ticks."""

    def __init__(self, progress: Progress, slices: Sequence[RowSlice], done: Sequence[Receipt] | Any) -> None:
        self._progress = progress
        self._rows = {piece.index: piece.num_rows for piece in slices}
        self._resumed = self._done = sum(self._rows[one.slice_index] for one in done)
        self._tokens, self._began = 0, 0.0

    def waiting(self, what: str) -> None:
        """Nothing is done until `what` is there."""
        self._tick(waiting=what)

    def add(self, receipt: Receipt) -> None:
        """A slice was finished."""
        self._began = self._began or float(receipt.meta["worker"]["began_s"])
        self._done += self._rows[receipt.slice_index]
        self._tokens += receipt.part.num_tokens
        self._tick()

    def finish(self) -> None:
        """The entry was finished."""
        self._tick(final=True)

    def _tick(self, *, final: bool = False, waiting: str = "") -> None:
        facts: dict[str, Any] = {}
        if self._began:
            seconds = max(time.time() - self._began, 1e-3)
            facts["tokens/s"] = round(self._tokens / seconds)
            if not final and self._done > self._resumed:
                rate = (self._done - self._resumed) / seconds
                facts["ETA"] = f"{(sum(self._rows.values()) - self._done) / rate:.0f} s"
        if self._resumed:
            facts["resumed rows"] = self._resumed
        self._progress(Tick("enrich", self._done, sum(self._rows.values()), "rows", facts, final, waiting))
