"""One build: look at the source, name the entry, use it or make it.

Always true:
- the key is known before any row is tokenized;
- a finished entry is used as it is; a started one goes on from its receipts;
- an entry is finished only when its row counts balance and not too many rows were quarantined.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from raysvc.build.build_plan import BuildPlan, plan_build
from raysvc.build.build_progress import BuildMeter, source_tag
from raysvc.build.build_report import check_share, make_report
from raysvc.build.entry_report import Report
from raysvc.build.explain import HIT, why_missed
from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry, open_entry
from raysvc.cache.generations import build_generation, next_generation
from raysvc.cache.key import cache_key
from raysvc.cache.names import folder_of
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import Hold, this_process
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import reasoning_note
from raysvc.chat.tokens.tokenizer import anchored
from raysvc.errors import EntryError, StoreError
from raysvc.job.config import JobConfig, PoolConfig
from raysvc.media.media_gc import wait_for_removal
from raysvc.media.media_index import write_digests
from raysvc.metrics import record
from raysvc.progress import Progress, Tick

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.slices import Slice
    from raysvc.pipelines.tokenize import BuildTask

log = logging.getLogger(__name__)
NICENESS_BESIDE = 10  # of workers beside a run: a tenth of a core that both want


def find_or_build(
    job: JobConfig, root: str, address: str | None, progress: Progress
) -> tuple[Entry, bool, str]:
    """The job's entry, whether it was there, and why it was used or built."""
    found = look(job, root)
    if found.entry is not None:
        return found.entry, True, found.reason
    return build(found, address, progress), False, found.reason


@dataclass(frozen=True)
class Looked:
    """What a look at source and cache found.

    Attributes:
        entry: the finished one; None: it has to be built.
        reason: why it is used or has to be built.
        generation_of: where to build.
    """

    job: JobConfig
    store: Store
    plan: BuildPlan
    entry: Entry | None
    reason: str
    generation_of: Callable[[Store, str], int] = build_generation


def look(job: JobConfig, root: str) -> Looked:
    """Look at the source, name the entry, and find it."""
    store = open_store(root, job.cache.storage_options, job.cache.unsafe_store)
    job = job.model_copy(update={"tokenizer": anchored(job.tokenizer)})
    plan = plan_build(job, store)
    if not job.cache.enabled:
        recipe = {**plan.recipe, "private": uuid.uuid4().hex}
        plan = replace(plan, recipe=recipe, key=cache_key(recipe))
        return Looked(job, store, plan, None, "cache.enabled is false")
    entry = None if job.cache.force else find_entry(store, plan.key)
    if entry is not None:
        check_share(job, Report(entry.report, entry.uri))  # a stricter job than the one that built it
        record("cache_hits", 1, source=source_tag(job))
        return Looked(job, store, plan, entry, HIT)
    record("cache_misses", 1, source=source_tag(job))
    if job.cache.force:
        return Looked(job, store, plan, None, "cache.force is true", next_generation)
    return Looked(job, store, plan, None, why_missed(store, plan)[0])


def build(found: Looked, address: str | None, progress: Progress) -> Entry:
    """Make the entry that was not found."""
    writer, hold = begin(found)
    with hold:
        making = Making(found.job, found.plan, writer, progress)
        if making.small:
            from raysvc.pipelines.local_build import only_builder_here

            with only_builder_here(writer.uri, making.say_another_builds):
                return making.entry(address)
        return making.entry(address)


def begin(found: Looked) -> tuple[EntryWriter, Hold]:
    """Where an entry that was not found is built, held.

    Raises:
        StoreError: it cannot be built there.
    """
    store, plan = found.store, found.plan
    store.probe()
    if store.url.startswith("memory://"):
        what = "it lives in one process, and the workers of a build are others"
        raise StoreError(store.url, what, "use a folder or a bucket as cache.root")
    generation, hold = held_generation(store, plan.key, found.generation_of)
    if plan.processor is not None:
        wait_for_removal(store)
    return EntryWriter(store, plan.key, generation), hold


def held_generation(store: Store, key: str, generation_of: Callable[[Store, str], int]) -> tuple[int, Hold]:
    """Where to build, held so that gc leaves it alone; another place where gc was faster.

    Raises:
        EntryError: gc was faster every time.
    """
    for _ in range(3):
        generation = generation_of(store, key)
        with contextlib.suppress(EntryError):
            return generation, Hold(store, folder_of(key, generation), this_process())
    raise EntryError(f"{store.url}/{key}", "gc deletes it again and again", "find out which process runs gc")


@dataclass(frozen=True)
class PoolBeside:
    """Workers of a build that goes on beside a run; None: the builder does it alone, in a process of its own."""

    workers: PoolConfig | None


@dataclass
class Making:
    """One process's share of a build: from what is finished to the manifest.

    Attributes:
        order: of the slices; those of the source where it is empty.
        pool: of a build while others hold processors of the cluster, which the caller has joined. None: nobody else needs
            them now.
        work: tells the builds of one entry apart, where it has several.
    """

    job: JobConfig
    plan: BuildPlan
    writer: EntryWriter
    progress: Progress
    order: Sequence[int] = ()
    pool: PoolBeside | None = None
    work: str = ""

    @cached_property
    def small(self) -> bool:
        """Whether this process builds what is left itself."""
        from raysvc.pipelines.local_build import fits_one_process
        from raysvc.pipelines.tokenize import split_done

        left = split_done(self.writer, self.plan.source.slices)[1]
        num_bytes = sum(piece.num_bytes for piece in left)
        return fits_one_process(num_bytes, len(left), self.job.workers, os.cpu_count() or 1)

    def say_another_builds(self) -> None:
        """A tick."""
        self.progress(Tick("tokenize", 0, None, "rows", waiting="another process builds this entry"))

    def entry(self, address: str | None) -> Entry:
        """Make what nobody has made, and finish the entry."""
        from raysvc.pipelines.tokenize import split_done

        begin = time.perf_counter()
        job, source = self.job, self.plan.source
        wanted = [source.slices[index] for index in self.order] or source.slices
        done, left = split_done(self.writer, wanted)
        meter = BuildMeter(self.progress, source.slices, done.values(), job, source.num_bytes)
        for receipt in self.receipts(left, address, meter) if left else ():
            if receipt.slice_index not in done:
                done[receipt.slice_index] = receipt
                meter.add(receipt)
        receipts = [done[piece.index] for piece in source.slices]
        report = make_report(job, self.plan, self.writer, receipts, time.perf_counter() - begin)
        if self.plan.processor is not None:
            digests = (digest for one in receipts for digest in one.meta.get("media", ()))
            report["media"] = write_digests(self.writer.store, self.writer.folder, digests)
        source.check_unchanged()
        self.writer.commit(receipts, self.plan.recipe, report, self.plan.tokenizer.content())
        meter.finish()
        if note := reasoning_note(report["row_counts"]):
            log.warning("%s", note)
        return open_entry(self.writer.uri, job.cache.storage_options)

    def make_here(self, number: int) -> None:
        """Make a slice in this process, if nobody has.

        Raises:
            RaysvcError: what a slice raises.
        """
        from raysvc.pipelines.local_build import local_receipts
        from raysvc.pipelines.tokenize import split_done

        _, left = split_done(self.writer, [self.plan.source.slices[number]])
        list(local_receipts(self.task(), left, self.plan.tokenizer, self.plan.processor))

    def task(self) -> BuildTask:
        """What its workers are told."""
        from raysvc.pipelines.tokenize import BuildTask

        return BuildTask(
            self.plan.spec,
            self.writer,
            self.job.source.storage_options,
            self.job.max_quarantine,
            niceness=0 if self.pool is None else NICENESS_BESIDE,
        )

    def receipts(self, left: Sequence[Slice], address: str | None, meter: BuildMeter) -> Iterator[Receipt]:
        """Make slices that nobody has made; in any order, maybe some twice."""
        task = self.task()
        if self.pool is not None:
            from raysvc.pipelines.shared_build import Work, shared_receipts
            from raysvc.pipelines.tokenize import receipts_here, receipts_of

            workers = None if self.small else self.pool.workers
            work = (
                partial(receipts_here, task, left)
                if workers is None
                else partial(receipts_of, task, left, workers)
            )
            return shared_receipts(Work(task.writer.uri + self.work, len(left), work, self._cut()))
        if self.small:
            from raysvc.pipelines.local_build import local_receipts

            meter.waiting("loading the tokenizer")
            return local_receipts(task, left, self.plan.tokenizer, self.plan.processor)
        from raysvc.cluster import connect
        from raysvc.pipelines.shared_build import Work, shared_receipts
        from raysvc.pipelines.tokenize import receipts_of

        meter.waiting("starting Ray")
        connect(address)
        meter.waiting("starting workers")
        work = partial(receipts_of, task, left, self.job.workers)
        return shared_receipts(Work(task.writer.uri, len(left), work, self._cut()))

    def _cut(self) -> str:
        """Of the source: how many rows each slice has."""
        return ",".join(str(piece.num_rows) for piece in self.plan.source.slices)
