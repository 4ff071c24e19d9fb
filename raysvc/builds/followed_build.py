"""The entry of a source that is followed: as any build, and there may always be more to build.

Always true:
- a listing is written before one of its slices is made;
- two that follow one source write one series of listings, and each uses what the other has made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from raysvc.builds.build import Build
from raysvc.builds.build_progress import BuildMeter
from raysvc.builds.build_report import check_share, known_before, make_report
from raysvc.builds.lookup import Lookup
from raysvc.cache import names
from raysvc.cache.growing.coming import FollowedSpec
from raysvc.cache.growing.followed_entry import FollowedEntry
from raysvc.chat.row_counts import RowCounts, errors_of
from raysvc.errors import SourceError
from raysvc.pipelines.sources.followed import FollowedSource
from raysvc.progress import Progress, silent

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt

log = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
LOOK_SHARE = 10  # a look takes at most one part in so many of the time
LEAST_ROWS = 1000  # before the share of quarantined rows is judged


class FollowedBuild(Build):
    """Builds what is listed of a source by now, and looks for more.

    Args:
        until_now: the build ends with what is there now.

    Raises:
        StoreError: it cannot be built there.
    """

    def __init__(
        self, found: Lookup, progress: Progress = silent, number: int = 0, *, until_now: bool = False
    ) -> None:
        assert isinstance(found.plan.source, FollowedSource)
        self._source, self.has_end = found.plan.source, until_now
        super().__init__(found, progress, number)
        self._counts = RowCounts()
        self._seen = 0  # slices that were looked at by `start`
        self._spec = self._known()
        self._entry = FollowedEntry(self.writer.store, self.writer.folder, self._spec)

    @property
    def cut(self) -> str:
        """Says which slices are left: each round has a builder of its own."""
        return f"{self.left[0].index}-{len(self.left)}" if self.left else ""

    def growing(self) -> FollowedEntry:
        """The entry, to be read while its source is followed."""
        return self._entry

    def start(self, needed: Collection[int] | None = None) -> None:
        """Look at which slices are made: of what is there now, or, without an end, of what was not looked at before.

        Args:
            needed: indexes of the slices that are wanted; None: all.
        """
        if self.has_end:
            self._source.look()
            super().start(needed)
            return
        self._done = {}  # of this round alone: a source without an end has no end of receipts
        self._entry.look()
        seen, self._seen = self._seen, self._source.listings.num_slices
        wanted = range(seen, self._seen) if needed is None else sorted(needed)
        self.left = [self._source.slice(index) for index in self._entry.receipts.missing(wanted)]
        self.meter = BuildMeter(self.progress, self.left, (), self.found.job, self._source.num_bytes)

    @property
    def is_complete(self) -> bool:
        """Returns whether all is made; a source without an end is never complete."""
        return self.has_end and super().is_complete

    def add(self, receipt: Receipt) -> None:
        """Take a slice that was made.

        Raises:
            QuarantineExceeded: too much is, of what this process has seen.
        """
        super().add(receipt)
        self._counts += RowCounts(**receipt.meta["row_counts"])
        if self._counts.rows_in >= LEAST_ROWS:
            found = {"row_counts": self._counts.to_json(), "examples": receipt.meta["examples"]}
            with errors_of(self.name):
                check_share(self.found.job, found)

    def finish(self) -> FollowedEntry:
        """The entry of what is there now, with its report.

        Raises:
            QuarantineExceeded: too many rows were quarantined.
        """
        receipts = [self._done[piece.index] for piece in self._slices]
        seconds = time.perf_counter() - self._began_s
        report = make_report(self.found.job, self.found.plan, self.writer, receipts, seconds)
        self.meter.finish()
        return FollowedEntry(self.writer.store, self.writer.folder, self._spec, report)

    def wait_for_more(self, wait: Callable[[float], bool]) -> bool:
        """Look until the source has new slices; False: `wait` said that the build is stopped.

        Raises:
            SourceError: a file changed, or is gone, and the next look finds it so too.
        """
        while True:
            began_s = time.monotonic()
            with errors_of(self.name):
                try:
                    self._source.look()
                except SourceError as error:
                    log.warning("looking again soon: %s", error)
                    if wait(1.0):
                        return False
                    self._source.look()
            if self._source.listings.num_slices > self._seen:
                return True
            if wait(max(LOOK_EVERY_S, LOOK_SHARE * (time.monotonic() - began_s))):
                return False

    def _known(self) -> FollowedSpec:
        """Returns what is known of the entry; from now on it is marked as one that never has a manifest, and keeps its tokenizer."""
        plan, writer = self.found.plan, self.writer
        writer.store.create(f"{writer.folder}/{names.TOKENIZER}", plan.tokenizer.content())
        media = b"{}" if plan.processor is None else b'{"media": true}'  # gc removes none while it is built
        writer.store.create(f"{writer.folder}/{names.FOLLOWED}", media)
        report = known_before(self.found.job, plan)
        return FollowedSpec(
            key=plan.key,
            recipe=plan.recipe,
            report={
                name: value for name, value in report.items() if name not in ("source_bytes", "source_rows")
            },
            listings=self._source.listings.name,
            uid=self._source.listings.uid,
        )
