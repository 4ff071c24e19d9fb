"""A build that goes on while its rows are trained or served: of one entry, or of several of a mixture.

Always true:
- the plan of entries that grow is the plan of the finished ones, so its steps are too;
- slices are made in the order in which the steps need them, from the next step on, and then the rest; of several sources by one
  builder, a first slice of each before all others, since it tells the columns;
- an entry is finished when its last slice is made, whatever others need;
- an error of the build reaches the server, whoever waits there, and the caller of `check` or `wait`;
- what was made before a stop or a kill is there for the next build.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raysvc.builds.build_report import known_before
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.find_or_build import Going, Looked, Making, PoolBeside, begin, receipts_beside
from raysvc.builds.job_plan import plan_of
from raysvc.cache import names as file_names
from raysvc.cache.entry import Entry
from raysvc.cache.growing.growing_entry import GrowingEntry, GrowingSpec
from raysvc.cache.use_marker import Hold
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import errors_of
from raysvc.errors import RaysvcError
from raysvc.job.config import JobConfig
from raysvc.plan.order import CustomOrder, Order
from raysvc.plan.sliced.window_order import is_windowed
from raysvc.progress import Progress, Tick, silent

if TYPE_CHECKING:
    from raysvc.job.config import PoolConfig

log = logging.getLogger(__name__)
STOP_S = 5.0  # the longest that a run waits at its end for the thread of its build
RATES = ("rows/s", "tokens/s", "MB/s")


def windowed_sources(job: JobConfig) -> list[bool]:
    """Of each source of a job, whether it is shuffled in a window."""
    if job.mixture is None:
        return [is_windowed(job.plan.shuffle)]
    return [is_windowed(each.shuffle or job.plan.shuffle) for each in job.mixture.sources.values()]


def known_at_the_end(job: JobConfig, computed: Sequence[str]) -> str:
    """Why no entry of a job may grow while steps are taken from it, whatever its shuffle: a plan or rows need what is known only at the
    end; "" where nothing does.

    Args:
        computed: columns that a model computes.
    """
    if job.mixture is not None and job.mixture.by == "tokens":
        return "mixture.by: tokens needs the tokens of all rows (by: rows does not wait)"
    return f"a model computes {', '.join(computed)} of all rows" if computed else ""


def entry_of(job: JobConfig, entries: Sequence[Entry], hit: bool, reasons: Sequence[str]) -> CacheEntry:
    """The entries of a job's sources as a user holds them.

    Args:
        hit: whether all were there.
        reasons: why each is used or built.
    """
    if job.mixture is None:
        return CacheEntry(tuple(entries), hit, reasons[0])
    names = tuple(job.mixture.sources)
    told = "; ".join(f"{name}: {reason}" for name, reason in zip(names, reasons, strict=True))
    return CacheEntry(tuple(entries), hit, told, names)


@dataclass(frozen=True)
class _Build:
    """One entry that is built.

    Attributes:
        number: of its source in the mixture; 0 without.
        hold: on its folder.
    """

    number: int
    found: Looked
    writer: EntryWriter
    hold: Hold

    def making(self, progress: Progress, pool: PoolBeside | None = None) -> Making:
        found = self.found
        return Making(found.job, found.plan, self.writer, progress, pool, name=found.name)

    def entry(self) -> GrowingEntry:
        found = self.found
        spec = GrowingSpec(
            key=found.plan.key,
            recipe={name: value for name, value in found.plan.recipe.items() if name != "source"},
            report=known_before(found.job, found.plan),
            contents=tuple(piece.identity()["bytes"] for piece in found.plan.source.slices),
        )
        return GrowingEntry(self.writer.store, self.writer.folder, spec)


class BuildBeside:
    """A build, in a thread of this process, which has joined a cluster when it starts.

    Args:
        job: whose sources they are.
        looked: the sources; those without an entry are built.

    Attributes:
        entry: what grows; of a mixture the entries that are there too.
    """

    def __init__(self, job: JobConfig, looked: Sequence[Looked]) -> None:
        self._looked = looked
        self._builds: list[_Build] = []
        try:
            for number, found in enumerate(looked):
                if found.entry is None:
                    writer, hold = begin(found)
                    self._builds.append(_Build(number, found, writer, hold))
                    tokenizer = f"{writer.folder}/{file_names.TOKENIZER}"  # for evals, before the end
                    writer.store.create(tokenizer, found.plan.tokenizer.content())
            self.entry = self._entry(job)
        except BaseException:
            self._release()
            raise
        self._progress: Progress = silent
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def _entry(self, job: JobConfig) -> CacheEntry:
        grow = iter([build.entry() for build in self._builds])
        entries = [next(grow) if found.entry is None else found.entry for found in self._looked]
        return entry_of(job, entries, False, [found.reason for found in self._looked])

    def make_first(self, job: JobConfig, step: int) -> None:
        """Begin with the first slice of each source that the steps from `step` on need, in a thread of this process: a cluster may only
        start yet.

        What is wrong with a slice is said by the build, which meets it again.
        """
        makings = [build.making(silent) for build in self._builds]

        def make() -> None:
            with contextlib.suppress(RaysvcError):
                for number, index in self._order(job, step)[: len(makings)]:
                    makings[number].make_here(index)

        threading.Thread(target=make, name="raysvc-first-slice", daemon=True).start()

    def start(
        self,
        job: JobConfig,
        step: int,
        workers: PoolConfig | None,
        progress: Progress,
        on_error: Callable[[str], None],
    ) -> None:
        """Begin, with the slices that the steps from `step` on need.

        Args:
            job: whose plan it is.
            step: to train next.
            workers: of the build; None: one core.
            progress: of the build.
            on_error: is told what ended the build; from the thread.
        """
        self._progress = progress
        together = _Together(
            self._tick,
            [sum(piece.num_rows for piece in build.found.plan.source.slices) for build in self._builds],
        )
        pool = PoolBeside(workers)
        makings = [build.making(together.of(place), pool) for place, build in enumerate(self._builds)]
        order = self._order(job, step)
        self._thread = threading.Thread(
            target=self._run, args=(makings, order, on_error), name="raysvc-build", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the build."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the finished entries; raises what ended the build."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def stop(self) -> None:
        """Build no further slice; what is finished stays for the next build.

        Returns when the thread is out of Ray, or after STOP_S: a process that leaves Ray under it would end at once, with
        an exit code of Ray's.
        """
        self._stopping.set()
        if self._thread is None:
            self._release()
        else:
            self._thread.join(STOP_S)

    def _release(self) -> None:
        for build in self._builds:
            build.hold.release()

    def _order(self, job: JobConfig, step: int) -> list[tuple[int, int]]:
        """(place in `_builds`, slice) of all slices, as they are needed; the first ones are of different builds."""
        plan = plan_of(job, self.entry)
        assert not isinstance(plan.order, Order | CustomOrder), "an order over all rows waits for them"
        step = min(step, plan.schedule.num_steps - 1)
        needed = plan.order.needed(plan.schedule.epoch_of(step), plan.schedule.position_of(step))
        places = {build.number: place for place, build in enumerate(self._builds)}
        order = [(places[number], index) for number, index in needed if number in places]
        firsts = list({place: (place, index) for place, index in reversed(order)}.values())[::-1]
        return list(dict.fromkeys([*firsts, *order]))

    def _run(
        self, makings: Sequence[Making], order: Sequence[tuple[int, int]], on_error: Callable[[str], None]
    ) -> None:
        try:
            with contextlib.ExitStack() as held:
                for build in self._builds:
                    held.enter_context(build.hold)
                self._make(makings, order)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - told to the server, and raised by `check`
            if self._stopping.is_set():
                return
            self._error = error
            log.error("build failed entry=%s error=%s", self.entry.uri, error)
            on_error(str(error))

    def _make(self, makings: Sequence[Making], order: Sequence[tuple[int, int]]) -> None:
        going = [Going(making) for making in makings]
        missing = {(place, piece.index): piece for place, one in enumerate(going) for piece in one.left}
        left = [(one[0], missing[one]) for one in order if one in missing]
        unfinished = set(range(len(going)))
        for place in sorted(unfinished):
            unfinished -= _finished(going, makings, place)
        for place, receipt in receipts_beside(makings, left, self._go_on) if left else ():
            with errors_of(makings[place].name):
                going[place].add(receipt)
            if place in unfinished:
                unfinished -= _finished(going, makings, place)

    def _tick(self, tick: Tick) -> None:
        self._go_on()
        self._progress(tick)

    def _go_on(self) -> None:
        if self._stopping.is_set():
            raise Stopped


def _finished(going: Sequence[Going], makings: Sequence[Making], place: int) -> set[int]:
    """The place, once its entry is finished."""
    if not going[place].is_complete:
        return set()
    with errors_of(makings[place].name):
        going[place].finish()
    return {place}


class _Together:
    """The ticks of some builds that go on at the same time, as those of one."""

    def __init__(self, progress: Progress, num_rows: Sequence[int]) -> None:
        self._progress = progress
        self._last = [Tick("tokenize", 0, rows, "rows") for rows in num_rows]

    def of(self, place: int) -> Progress:
        """What one of the builds tells."""
        if len(self._last) == 1:
            return self._progress

        def progress(tick: Tick) -> None:
            self._last[place] = tick
            self._progress(self._sum(tick))

        return progress

    def _sum(self, tick: Tick) -> Tick:
        ended = sum(one.final for one in self._last)
        facts = {name: sum(one.facts.get(name, 0) for one in self._last) for name in RATES}
        facts = {name: round(rate, 1) for name, rate in facts.items() if rate}
        return replace(
            tick,
            done=sum(one.done for one in self._last),
            total=sum(one.total or 0 for one in self._last),
            facts={**facts, "sources": f"{ended}/{len(self._last)}"},
            final=ended == len(self._last),
        )


class Stopped(Exception):
    """The build was stopped between two slices."""
