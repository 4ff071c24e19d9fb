"""Columns that are computed while the slices of their rows are built, for a run that takes its steps meanwhile.

1. Say what is to come: an entry with the columns over the entry that grows, each kind of columns over the one before.
2. Take the slices whose rows are there, in the order in which the steps need them, and compute what nobody has: in this process
   where that is little, else by workers. Where none is there, wait for the next one.
3. When all have their columns and the rows are finished, finish the entry.

Always true:
- a slice of rows is a slice of columns, so what was computed before a stop or a kill is found again;
- the finished entry is the one that `raysvc.scoring.find_or_enrich` makes: the same key, rows and values;
- an error of rows or columns reaches the server, whoever waits there, and the caller of `check` or `wait`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from raysvc.builds.build import held_generation
from raysvc.builds.build_beside import STOP_S, BuildBeside, BuildStopped
from raysvc.builds.find_or_build import as_one
from raysvc.cache import names
from raysvc.cache.find import open_finished
from raysvc.cache.generations import build_generation
from raysvc.cache.growing.added_entry import AddedEntry
from raysvc.cache.growing.coming import AddedSpec
from raysvc.cache.use_marker import share
from raysvc.cache.writer import EntryWriter
from raysvc.pipelines.row_slices import RowSlice
from raysvc.scoring.enrich_plan import (
    EnrichPlan,
    check_longest,
    check_models,
    kept_tokenizer,
    plan_columns,
    vocab_size_of,
)
from raysvc.scoring.find_or_enrich import EnrichBuild, find_or_enrich
from raysvc.scoring.job_columns import wanted_of
from raysvc.scoring.wanted import check_rows

if TYPE_CHECKING:
    from raysvc.builds.lookup import Lookup
    from raysvc.cache.entry import Entry
    from raysvc.cache.manifest import Receipt
    from raysvc.job.config import JobConfig, PoolConfig
    from raysvc.progress import Progress
    from raysvc.scoring.wanted import WantedColumns

log = logging.getLogger(__name__)
POLL_S = 0.2


def columns_wait(job: JobConfig) -> str:
    """Says why the columns that a model computes are not computed while rows are built; "" where they are, or none is wanted."""
    wanted = wanted_of(job)
    names = ", ".join(
        dict.fromkeys(name for _, some in wanted.values() for one in some for name in one.columns)
    )
    if not names:
        return ""
    if job.trainer.device != "cpu":
        return f"a model computes {names} of all rows where the job trains (trainer.device: cpu computes them beside it)"
    if any(each.source.ray is not None for each, _ in wanted.values()):
        return f"a model computes {names} of all rows of a Ray Dataset"
    return ""


class ColumnsBeside(BuildBeside):
    """A build of rows that goes on beside a run, and that of their columns.

    Args:
        address, progress: of the columns of rows that are there, which are computed first.

    Raises:
        ConfigError: a model cannot score the rows.
    """

    def __init__(
        self, job: JobConfig, looked: Sequence[Lookup], *, address: str | None, progress: Progress
    ) -> None:
        self._layers: list[tuple[int, _Layer]] = []  # with the number of their source
        self._columns: list[threading.Thread] = []
        self._on_error: Callable[[str], None] = log.error
        super().__init__(job, looked)
        try:
            entries: list[Entry] = []
            for (its, wanted), found, base in zip(
                wanted_of(job).values(), looked, self.entry.entries, strict=True
            ):
                if found.entry is None:
                    entries.append(self._to_come(len(entries), its, wanted, base, found.plan.recipe))
                    continue
                for each in wanted:
                    base = find_or_enrich(its, base, each, address, progress)[0]
                entries.append(base)
        except BaseException:
            self.stop()
            raise
        self.entry = as_one(job, looked, entries)
        check_rows(job, self.entry)

    def start(
        self,
        job: JobConfig,
        step: int,
        workers: PoolConfig | None,
        progress: Progress,
        on_error: Callable[[str], None],
    ) -> None:
        """Begin to build rows, and to compute their columns; see `BuildBeside.start`."""
        self._on_error = on_error
        super().start(job, step, workers, progress, self._fail)
        needed = self._needed(job, step)
        for number, layer in self._layers:
            order = list(dict.fromkeys(index for source, index in needed if source == number))
            thread = threading.Thread(
                target=self._compute, args=(layer, order, workers), name="raysvc-columns", daemon=True
            )
            self._columns.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait for the finished entries with their columns; raises what ended the build."""
        for (_, layer), thread in zip(self._layers, self._columns, strict=False):
            if layer.base.listings is None:
                thread.join()  # it ends after the rows, also when these fail
        super().wait()

    def stop(self) -> None:
        """Build and compute no further slice; see `BuildBeside.stop`."""
        self._stopping.set()
        for _, layer in self._layers:
            layer.entry.fail("it was stopped")  # ends the waits of the threads
            if not self._columns:
                layer.hold.release()
        super().stop()
        until_s = time.monotonic() + STOP_S
        for thread in self._columns:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _to_come(
        self,
        number: int,
        job: JobConfig,
        wanted: Sequence[WantedColumns],
        base: Entry,
        recipe: Mapping[str, Any],
    ) -> Entry:
        """The entry of a source with its columns.

        Args:
            number: of the source.
            recipe: of its rows, as a whole.
        """
        for each in wanted:
            plan = plan_columns(job, each, recipe, vocab_size_of(base), base.store)
            check_models(plan, vocab_size_of(base), kept_tokenizer(base))
            check_longest(plan, int(recipe.get("max_length") or 0))
            layer = _Layer(job, base, plan)
            self._layers.append((number, layer))
            base, recipe = layer.entry, plan.recipe
        return base

    def _compute(self, layer: _Layer, order: Sequence[int], workers: PoolConfig | None) -> None:
        try:
            with layer.hold:
                layer.run(order, workers, self._go_on_with_rows)
        except Exception as error:  # noqa: BLE001 - told to the server, and raised by `check`
            if self._stopping.is_set() or self._error is not None:
                return
            self._error = error
            log.error("columns failed entry=%s error=%s", layer.entry.uri, error)
            self._fail(str(error))

    def _go_on_with_rows(self) -> None:
        self._go_on()
        if self._error is not None:
            raise BuildStopped

    def _fail(self, why: str) -> None:
        for entry in self.entry.entries:
            entry.fail(why)
        self._on_error(why)


class _Layer:
    """The columns of one forward pass over the rows of one entry."""

    def __init__(self, job: JobConfig, base: Entry, plan: EnrichPlan) -> None:
        base.store.probe()
        generation, self.hold = held_generation(base.store, plan.key, build_generation)
        self.writer = EntryWriter(base.store, plan.key, generation)
        share(base.store, base.folder, self.writer.folder)
        self.base = base
        spec = AddedSpec.model_validate(
            {"key": plan.key, "recipe": dict(plan.recipe), "folder": base.folder, "base": base.coming}
        )
        self.entry = AddedEntry(base.store, self.writer.folder, spec, base)
        if base.listings is not None:
            base.store.create(
                f"{self.writer.folder}/{names.FOLLOWED}", b"{}"
            )  # gc takes it for no dead build
        self._work = EnrichBuild(job, base, plan, self.writer)

    def run(self, order: Sequence[int], workers: PoolConfig | None, go_on: Callable[[], None]) -> None:
        """Compute the slices in this order, and finish the entry; of a source that is followed go on with what comes."""
        if self.base.listings is not None:
            self._follow(order, workers, go_on)
        began_s, wanted = time.perf_counter(), self.entry.receipts.wanted
        done = self.writer.receipts(lambda one: one.meta.get("slice") == wanted[one.slice_index])
        for receipt in self._computed([index for index in order if index not in done], workers, go_on):
            done[receipt.slice_index] = receipt
        while not self.base.is_finished():
            go_on()
            time.sleep(POLL_S)
        self._work.base = open_finished(self.base.uri, self._work.job.cache.storage_options)
        self._work.commit([done[index] for index in sorted(done)], began_s)

    def _follow(self, order: Sequence[int], workers: PoolConfig | None, go_on: Callable[[], None]) -> Never:
        """Compute the slices in this order, and then those that come."""
        while True:
            for _ in self._computed(self.entry.receipts.missing(order), workers, go_on):
                pass
            known = max(order, default=-1) + 1
            while len(self.base.source_rows) <= known:
                go_on()
                self.base.knows(self.base.num_known + 1)
                time.sleep(POLL_S)
            self.entry.look()
            order = range(known, self.entry.receipts.num_slices)

    def _computed(
        self, left: Sequence[int], workers: PoolConfig | None, go_on: Callable[[], None]
    ) -> Iterator[Receipt]:
        """Compute slices when their rows are there, in this order."""
        while left:
            go_on()
            there = [index for index in left if self.base.has([index])]
            if not there:
                self.base.wait_for(left[:1])
                continue
            pieces = [self.piece(index) for index in there]
            yield from self._work.computed(pieces, self.entry.receipts.wanted, workers, go_on)
            left = [index for index in left if index not in there]

    def piece(self, index: int) -> RowSlice:
        """A slice of rows that is there, as one of columns."""
        return RowSlice(index, 0, len(self.base.slice_lengths(index)))
