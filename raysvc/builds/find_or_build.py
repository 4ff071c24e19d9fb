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

from raysvc.builds.build_plan import BuildPlan, plan_build
from raysvc.builds.build_progress import BuildMeter, source_tag
from raysvc.builds.build_report import check_share, make_report
from raysvc.builds.entry_report import Report
from raysvc.builds.explain import HIT, why_missed
from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry, open_entry
from raysvc.cache.generations import build_generation, next_generation
from raysvc.cache.key import PRIVATE, SHARED, cache_key
from raysvc.cache.names import folder_of
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import Hold, builder
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import errors_of, warnings_of
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
    from raysvc.pipelines.tokenize import BuildTask, Left

log = logging.getLogger(__name__)
NICENESS_BESIDE = 10  # of workers beside a run: a tenth of a core that both want


def find_or_build(
    job: JobConfig, root: str, address: str | None, progress: Progress, name: str = ""
) -> tuple[Entry, bool, str]:
    """The entry of a job of one source, whether it was there, and why it was used or built.

    Args:
        name: of the source in its mixture; errors tell it.
    """
    with errors_of(name):
        found = look(job, root, name)
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
        name: of the source in its mixture.
    """

    job: JobConfig
    store: Store
    plan: BuildPlan
    entry: Entry | None
    reason: str
    generation_of: Callable[[Store, str], int] = build_generation
    name: str = ""


def look(job: JobConfig, root: str, name: str = "") -> Looked:
    """Look at the source, name the entry, and find it.

    Args:
        job: of one source.
        name: of the source in its mixture.
    """
    store = open_store(root, job.cache.storage_options, job.cache.unsafe_store)
    job = job.model_copy(update={"tokenizer": anchored(job.tokenizer)})
    plan = plan_build(job, store)
    if not job.cache.enabled:
        recipe = {**plan.recipe, PRIVATE: uuid.uuid4().hex, SHARED: plan.key}
        plan = replace(plan, recipe=recipe, key=cache_key(recipe))
        return Looked(job, store, plan, None, "cache.enabled is false", name=name)
    entry = None if job.cache.force else find_entry(store, plan.key)
    if entry is not None:
        check_share(job, Report(entry.report, entry.uri))  # a stricter job than the one that built it
        record("cache_hits", 1, source=source_tag(job))
        return Looked(job, store, plan, entry, HIT, name=name)
    record("cache_misses", 1, source=source_tag(job))
    if job.cache.force:
        return Looked(job, store, plan, None, "cache.force is true", next_generation, name)
    return Looked(job, store, plan, None, why_missed(store, plan)[0], name=name)


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
            return generation, Hold(store, folder_of(key, generation), builder())
    raise EntryError(f"{store.url}/{key}", "gc deletes it again and again", "find out which process runs gc")


@dataclass(frozen=True)
class PoolBeside:
    """Workers of a build that goes on beside a run; None: the builder does it alone, in a process of its own."""

    workers: PoolConfig | None


@dataclass
class Making:
    """One process's share of a build: from what is finished to the manifest.

    Attributes:
        pool: of a build while others hold processors of the cluster, which the caller has joined. None: nobody else needs
            them now.
        work: tells the builds of one entry apart, where it has several.
        name: of the source in its mixture.
    """

    job: JobConfig
    plan: BuildPlan
    writer: EntryWriter
    progress: Progress
    pool: PoolBeside | None = None
    work: str = ""
    name: str = ""

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
        going = Going(self)
        for receipt in self.receipts(going.left, address, going.meter) if going.left else ():
            going.add(receipt)
        return going.finish()

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
            name=self.name,
        )

    def receipts(self, left: Sequence[Slice], address: str | None, meter: BuildMeter) -> Iterator[Receipt]:
        """Make slices that nobody has made; in any order, maybe some twice."""
        task = self.task()
        if self.pool is not None:
            return (receipt for _, receipt in receipts_beside([self], [(0, piece) for piece in left]))
        if self.small:
            from raysvc.pipelines.local_build import local_receipts

            meter.waiting("loading the tokenizer")
            return local_receipts(task, left, self.plan.tokenizer, self.plan.processor)
        from raysvc.cluster import connect
        from raysvc.nodes.job_nodes import ready_to_tokenize
        from raysvc.pipelines.shared_build import Work, shared_receipts
        from raysvc.pipelines.slice_graph import WorkerPool
        from raysvc.pipelines.tokenize import receipts_of

        meter.waiting("starting Ray")
        connect(address)
        meter.waiting("starting workers")
        mine = [(0, piece) for piece in left]
        watch = ready_to_tokenize([self.job_and_root], mine, WorkerPool.of(self.job.workers), meter.waiting)
        work = partial(receipts_of, [task], mine, self.job.workers)
        shared = shared_receipts(Work(task.writer.uri, len(left), work, self.cut), watch.check)
        return (receipt for _, receipt in shared)

    @property
    def job_and_root(self) -> tuple[JobConfig, str]:
        """What nodes are chosen by, and where the entry is made."""
        return self.job, self.writer.store.url

    @property
    def cut(self) -> str:
        """Of the source: how many rows each slice has."""
        return ",".join(str(piece.num_rows) for piece in self.plan.source.slices)


class Going:
    """A build between what was finished before and its manifest.

    Attributes:
        left: slices that nobody has made.
        meter: of the build.
    """

    def __init__(self, making: Making) -> None:
        from raysvc.pipelines.tokenize import split_done

        self._making, self._source = making, making.plan.source
        self._begin = time.perf_counter()
        self._done, self.left = split_done(making.writer, self._source.slices)
        self.meter = BuildMeter(
            making.progress, self._source.slices, self._done.values(), making.job, self._source.num_bytes
        )

    @property
    def is_complete(self) -> bool:
        """Whether every slice is made."""
        return len(self._done) == len(self._source.slices)

    def add(self, receipt: Receipt) -> None:
        """A slice was made, maybe once more.

        Raises:
            QuarantineExceeded: the first rows are nearly all quarantined.
        """
        if receipt.slice_index not in self._done:
            self._done[receipt.slice_index] = receipt
            self.meter.add(receipt)

    def finish(self) -> Entry:
        """Finish the entry.

        Raises:
            QuarantineExceeded: too many rows were.
            SourceError: no row is left, or a file changed.
        """
        job, plan, writer = self._making.job, self._making.plan, self._making.writer
        receipts = [self._done[piece.index] for piece in self._source.slices]
        report = make_report(job, plan, writer, receipts, time.perf_counter() - self._begin)
        if plan.processor is not None:
            digests = (digest for one in receipts for digest in one.meta.get("media", ()))
            report["media"] = write_digests(writer.store, writer.folder, digests)
        self._source.check_unchanged()
        writer.commit(receipts, plan.recipe, report, plan.tokenizer.content())
        self.meter.finish()
        for warning in warnings_of(report["row_counts"]):
            log.warning("%s", warning)
        return open_entry(writer.uri, job.cache.storage_options)


def receipts_beside(
    makings: Sequence[Making], left: Left, check: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, Receipt]]:
    """Make slices of some entries while others hold processors, by one builder and its workers.

    Args:
        makings: with one pool.
        left: number of the making, and a slice that nobody has made; those first that are needed first.
        check: is called while the builder is waited for; what it raises ends that.
    """
    from raysvc.nodes.job_nodes import ready_to_tokenize
    from raysvc.pipelines.local_build import fits_one_process
    from raysvc.pipelines.shared_build import Work, shared_receipts
    from raysvc.pipelines.slice_graph import WorkerPool
    from raysvc.pipelines.tokenize import receipts_here, receipts_of

    pool = makings[0].pool
    assert pool is not None
    num_bytes = sum(piece.num_bytes for _, piece in left)
    small = fits_one_process(num_bytes, len(left), makings[0].job.workers, os.cpu_count() or 1)
    tasks = [making.task() for making in makings]
    workers = None if small else pool.workers
    work = (
        partial(receipts_here, tasks, left) if workers is None else partial(receipts_of, tasks, left, workers)
    )
    asked = None if workers is None else WorkerPool.of(workers)
    watch = ready_to_tokenize([making.job_and_root for making in makings], left, asked, log.info)
    uris = ", ".join(making.writer.uri + making.work for making in makings)

    def go_on() -> None:
        check()
        watch.check()

    return shared_receipts(Work(uris, len(left), work, "; ".join(making.cut for making in makings)), go_on)
