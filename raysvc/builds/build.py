"""One entry that is built: what is finished of it, what is left, and its end.

Always true:
- a started entry goes on from its receipts;
- an entry is finished only when its row counts balance and not too many rows were quarantined;
- gc leaves its folder alone until `hold` is released.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from raysvc.builds.build_progress import BuildMeter
from raysvc.builds.build_report import known_before, make_report
from raysvc.builds.lookup import Lookup
from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.find import open_finished
from raysvc.cache.growing.coming import GrowingSpec
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.names import folder_of
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import Hold, builder
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import errors_of, warnings_of
from raysvc.errors import EntryError, StoreError
from raysvc.media.media_gc import wait_for_removal
from raysvc.media.media_index import write_digests
from raysvc.progress import Progress, silent

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.slices import Slice
    from raysvc.pipelines.tokenize import BuildTask

log = logging.getLogger(__name__)


class Resumable(ABC):
    """An entry that is made from slices, some of which may be there, as `raysvc.builds.find_or_build.run` makes it.

    Attributes:
        left: slices that nobody has made, each with its `index`, in the order of the entry; by `start`.
    """

    left: Sequence[Any] = ()

    def __init__(self) -> None:
        self._done: dict[int, Receipt] = {}
        self._slices: Sequence[Any] = ()  # of the entry, by `start`

    @property
    def is_complete(self) -> bool:
        """Returns whether every slice is made."""
        return len(self._done) == len(self._slices)

    @abstractmethod
    def start(self, needed: Collection[int] | None = None) -> None:
        """Look at what is made.

        Args:
            needed: indexes of the slices that are wanted; None: all.
        """

    def add(self, receipt: Receipt) -> None:
        """Take a slice that was made, maybe once more.

        Raises:
            QuarantineExceeded: the first rows are nearly all quarantined.
        """
        if receipt.slice_index not in self._done:
            self._done[receipt.slice_index] = receipt
            self._count(receipt)

    @abstractmethod
    def _count(self, receipt: Receipt) -> None:
        """Count a slice that is new."""

    @abstractmethod
    def finish(self) -> Entry:
        """Finish the entry."""


class Build(Resumable):
    """The entry of one source, from its first slice to its manifest.

    Args:
        found: the lookup that did not find the entry.
        number: of the source in its mixture; 0 without one.

    Attributes:
        progress: is told of each slice; may be set until `start`.

    Raises:
        StoreError: it cannot be built there.
    """

    has_end = True  # its source has one
    streams = False  # rows come to whoever tokenizes them

    def __init__(self, found: Lookup, progress: Progress = silent, number: int = 0) -> None:
        super().__init__()
        self.found, self.progress, self.number, self.name = found, progress, number, found.name
        self.writer, self.hold = _begin(found)

    @property
    def root(self) -> str:
        """The cache root."""
        return self.writer.store.url

    @property
    def cut(self) -> str:
        """Says how many rows each slice has: builders that cut a source otherwise make no slices for this build."""
        return ",".join(str(piece.num_rows) for piece in self.found.plan.source.slices)

    @property
    def num_rows(self) -> int:
        """Rows of the source."""
        return sum(piece.num_rows for piece in self.found.plan.source.slices)

    def fits_one_process(self, left: Sequence[Slice]) -> bool:
        """Returns whether one process makes these slices before a cluster would."""
        from raysvc.pipelines.local_build import fits_one_process

        return fits_one_process(sum(piece.num_bytes for piece in left), len(left), self.found.job.workers)

    def task(self, niceness: int = 0) -> BuildTask:
        """Returns what its workers are told."""
        from raysvc.pipelines.tokenize import BuildTask

        job = self.found.job
        return BuildTask(
            self.found.plan.spec,
            self.writer,
            job.source.storage_options,
            job.max_quarantine,
            niceness=niceness,
            name=self.name,
        )

    def make_here(self, index: int) -> None:
        """Make a slice in this process, unless it is made.

        Raises:
            RaysvcError: what a slice raises.
        """
        from raysvc.pipelines.tokenize import SliceMaker, split_done

        plan = self.found.plan
        for piece in split_done(self.writer, [plan.source.slices[index]])[1]:
            SliceMaker([self.task()], [(plan.tokenizer, plan.processor)]).build(0, piece)

    def growing(self) -> Entry:
        """The entry, to be read while it is built; its tokenizer is there from now on."""
        plan = self.found.plan
        self.writer.store.create(f"{self.writer.folder}/{names.TOKENIZER}", plan.tokenizer.content())
        spec = GrowingSpec(
            key=plan.key,
            recipe={name: value for name, value in plan.recipe.items() if name != "source"},
            report=known_before(self.found.job, plan),
            contents=tuple(piece.identity()["bytes"] for piece in plan.source.slices),
        )
        return GrowingEntry(self.writer.store, self.writer.folder, spec)

    def start(self, needed: Collection[int] | None = None) -> None:
        """Look at what an earlier builder has made, and start the clock.

        Args:
            needed: indexes of the slices that are wanted; None: all.
        """
        from raysvc.pipelines.tokenize import split_done

        self._began_s = time.perf_counter()
        self._slices = self.found.plan.source.slices
        self._done, left = split_done(self.writer, self._slices)
        self.left = [piece for piece in left if needed is None or piece.index in needed]
        num_bytes = self.found.plan.source.num_bytes
        self.meter = BuildMeter(self.progress, self._slices, self._done.values(), self.found.job, num_bytes)

    def _count(self, receipt: Receipt) -> None:
        with errors_of(self.name):
            self.meter.add(receipt)

    def finish(self) -> Entry:
        """Write the manifest, and open the finished entry.

        Raises:
            QuarantineExceeded: too many rows were quarantined.
            SourceError: no row is left, or a file changed.
        """
        job, plan, writer = self.found.job, self.found.plan, self.writer
        with errors_of(self.name):
            receipts = [self._done[piece.index] for piece in self._slices]
            report = make_report(job, plan, writer, receipts, time.perf_counter() - self._began_s)
            if plan.processor is not None:
                digests = (digest for one in receipts for digest in one.meta.get("media", ()))
                report["media"] = write_digests(writer.store, writer.folder, digests)
            plan.source.check_unchanged()
            writer.commit(receipts, plan.recipe, report, plan.tokenizer.content())
            self.meter.finish()
        for warning in warnings_of(report["row_counts"]):
            log.warning("%s", warning)
        return open_finished(writer.uri, job.cache.storage_options)

    def wait_for_more(self, wait: Callable[[float], bool]) -> bool:
        """Returns whether the source has, or may have, new slices: that of a finished list of files never has.

        Args:
            wait: waits for so many seconds; True: the build is stopped.
        """
        return False


def _begin(found: Lookup) -> tuple[EntryWriter, Hold]:
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
    """Returns where to build, held so that gc leaves it alone; another place if gc was faster.

    Raises:
        EntryError: gc was faster every time.
    """
    for _ in range(3):
        generation = generation_of(store, key)
        with contextlib.suppress(EntryError):
            return generation, Hold(store, folder_of(key, generation), builder())
    raise EntryError(f"{store.url}/{key}", "gc deletes it again and again", "find out which process runs gc")
