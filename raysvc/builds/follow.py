"""The build of a source that is followed: it looks for what is new, lists it, and makes its slices.

1. Make the slices of the listings from the next step on that have no part yet.
2. Look for what is new; where there is nothing, wait.
3. Go on with 1.

Always true:
- a listing is written before one of its slices is made;
- what is small is made in the thread that looks, so that a new row is there within seconds; what is large, by workers;
- two that follow one source write one series of listings, and each uses what the other has made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from raysvc.builds.build_beside import BuildBeside, Stopped
from raysvc.builds.build_plan import BuildPlan
from raysvc.builds.build_progress import BuildMeter
from raysvc.builds.build_report import check_share, known_before, make_report
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.find_or_build import Looked, Making, begin
from raysvc.cache import names
from raysvc.cache.growing.followed_entry import FollowedEntry, FollowedSpec
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import RowCounts
from raysvc.errors import ConfigError, SourceError
from raysvc.job.config import JobConfig
from raysvc.pipelines.sources.followed import FollowedSource
from raysvc.progress import Progress

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.slices import Slice

log = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
LOOK_SHARE = 10  # a look takes at most one part in so many of the time
LEAST_ROWS = 1000  # before the share of quarantined rows is judged


def catch_up(found: Looked, address: str | None, progress: Progress) -> FollowedEntry:
    """Make every slice of what is there now, and end.

    Raises:
        QuarantineExceeded: as for any build.
        SourceError: a file changed, or is gone before its slices were made.
    """
    source = _source(found.plan)
    began_s = time.perf_counter()
    refuse_what_has_no_end(found)
    source.look()
    writer, hold = begin(found)
    with hold:
        _mark(writer, found)
        making = Making(found.job, found.plan, writer, progress)
        from raysvc.pipelines.tokenize import split_done

        done, left = split_done(writer, source.slices)
        meter = BuildMeter(progress, source.slices, done.values(), found.job, source.num_bytes)
        for receipt in making.receipts(left, address, meter) if left else ():
            if receipt.slice_index not in done:
                done[receipt.slice_index] = receipt
                meter.add(receipt)
        meter.finish()
        receipts = [done[index] for index in sorted(done)]
        report = make_report(found.job, found.plan, writer, receipts, time.perf_counter() - began_s)
    return FollowedEntry(writer.store, writer.folder, spec_of(found), report)


def spec_of(found: Looked) -> FollowedSpec:
    """What a server needs to know of the entry."""
    report = known_before(found.job, found.plan)
    grows = ("source_bytes", "source_rows")
    return FollowedSpec(
        key=found.plan.key,
        recipe=found.plan.recipe,
        report={name: value for name, value in report.items() if name not in grows},
        listings=_source(found.plan).listings.name,
        uid=_source(found.plan).listings.uid,
    )


def refuse_what_has_no_end(found: Looked) -> None:
    """Refuse what is known only when a source has ended.

    Raises:
        ConfigError: media, or columns that a model computes.
    """
    from raysvc.scoring.job_columns import wanted_of

    if found.plan.processor is not None:
        what = "has rows with media, and a source that is followed is read as text alone"
        raise ConfigError("source.follow", what, "train them without follow, with plan.shuffle: window")
    if any(wanted for _, wanted in wanted_of(found.job).values()):
        what = "is for rows as they are, and this job wants columns that a model computes"
        raise ConfigError("source.follow", what, "train without follow, after raysvc enrich")


class FollowBeside(BuildBeside):
    """Follows a source in a thread of this process, beside the run that trains it."""

    def __init__(self, found: Looked) -> None:
        refuse_what_has_no_end(found)
        self._found = found
        self._source = _source(found.plan)
        self._counts = RowCounts()
        super().__init__(found.job, [found])
        _mark(self._builds[0].writer, found)

    @cached_property
    def _own(self) -> FollowedEntry:
        writer = self._builds[0].writer
        return FollowedEntry(writer.store, writer.folder, spec_of(self._found))

    def make_first(self, job: JobConfig, step: int) -> None:
        """As for any build, where the rows of the step are listed."""
        if self._order(job, step):
            super().make_first(job, step)

    def _entry(self, job: JobConfig) -> CacheEntry:
        return CacheEntry((self._own,), hit=False, reason="its source is followed")

    def _make(self, makings: Sequence[Making], order: Sequence[tuple[int, int]]) -> None:
        [making] = makings
        left: Sequence[int] = [index for _, index in order]
        while True:
            self._make_slices(making, left)
            known = self._source.listings.num_slices
            pause_s = self._look()
            left = range(known, self._source.listings.num_slices)
            if not left and self._stopping.wait(pause_s):
                raise Stopped

    def _look(self) -> float:
        """Look once; how long to wait for the next look. An error counts when the next look has it too."""
        began_s = time.monotonic()
        try:
            self._source.look()
        except SourceError as error:
            log.warning("looking again soon: %s", error)
            if self._stopping.wait(1.0):
                raise Stopped from None
            self._source.look()
        return max(LOOK_EVERY_S, LOOK_SHARE * (time.monotonic() - began_s))

    def _make_slices(self, making: Making, wanted: Sequence[int]) -> None:
        self._own.look()
        missing = self._own.receipts.missing(wanted)
        if not missing:
            return
        left = [self._source.slice(index) for index in missing]
        plan = replace(making.plan, source=_Some(self._source, left))
        now = replace(making, plan=plan, work=f"#{missing[0]}-{len(missing)}")
        meter = BuildMeter(self._tick, left, (), self._found.job, plan.source.num_bytes)
        for receipt in self._receipts(now, left, meter):
            meter.add(receipt)
            self._count(receipt)
        meter.finish()

    def _receipts(self, making: Making, left: Sequence[Slice], meter: BuildMeter) -> Iterator[Receipt]:
        from raysvc.pipelines.local_build import local_receipts

        if not making.small:
            return making.receipts(left, None, meter)
        return local_receipts(making.task(), left, making.plan.tokenizer)

    def _count(self, receipt: Receipt) -> None:
        """Refuse a source of which too much is quarantined, by what this process has made."""
        self._counts += RowCounts.from_json(receipt.meta["row_counts"])
        if self._counts.rows_in >= LEAST_ROWS:
            found = {"row_counts": self._counts.to_json(), "examples": receipt.meta["examples"]}
            check_share(self._found.job, found)


class _Some:
    """Some slices of a source, as a source."""

    def __init__(self, source: FollowedSource, slices: Sequence[Slice]) -> None:
        self.identity = source.identity
        self.slices = tuple(slices)
        self.num_bytes = sum(one.num_bytes for one in slices)
        self.first_row, self.check_unchanged = source.first_row, source.check_unchanged


def _source(plan: BuildPlan) -> FollowedSource:
    assert isinstance(plan.source, FollowedSource)
    return plan.source


def _mark(writer: EntryWriter, found: Looked) -> None:
    """Say that the entry never has a manifest, and keep the tokenizer for whoever decodes its rows."""
    writer.store.create(f"{writer.folder}/{names.TOKENIZER}", found.plan.tokenizer.content())
    writer.store.create(f"{writer.folder}/{names.FOLLOWED}", b"{}")
