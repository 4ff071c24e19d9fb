"""A build that goes on while its rows are trained or served: of one entry, or of several of a mixture.

Always true:
- the plan of entries that grow is the plan of the finished ones, so its steps are too;
- slices are made in the order in which the steps need them, from the next step on, and then the rest; of several sources by one
  builder, a first slice of each before all others, since it tells the columns;
- an entry is finished when its last slice is made, whatever others need;
- where weights share tokens, a sample of each source is made before there is a plan;
- a source that is followed has a thread of its own, which looks for new rows when those that are listed are made;
- an error of the build reaches the server, whoever waits there, and the caller of `check` or `wait`;
- what was made before a stop or a kill is there for the next build.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raysvc.builds.build import Build
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.find_or_build import as_one, begin, build, join, nothing, run
from raysvc.builds.job_plan import plan_of
from raysvc.builds.lookup import Lookup, look
from raysvc.builds.mixed_job import jobs_of
from raysvc.builds.places import beside
from raysvc.cache.store.open import default_root
from raysvc.errors import RaysvcError
from raysvc.evals.held_rows import held_out
from raysvc.job.config import JobConfig
from raysvc.plan.entry_plan import sampled_slices
from raysvc.plan.sliced.window_order import is_windowed
from raysvc.progress import Progress, Tick

if TYPE_CHECKING:
    from raysvc.builds.find_or_build import Before
    from raysvc.builds.places import Place
    from raysvc.job.config import PoolConfig

log = logging.getLogger(__name__)
STOP_S = 5.0  # the longest that a run waits at its end for the threads of its build
RATES = ("rows/s", "tokens/s", "MB/s")


def find_or_begin(
    job: JobConfig,
    columns_wait: str,
    address: str | None,
    progress: Progress,
    made: Callable[[JobConfig, Sequence[Lookup]], BuildBeside] | None = None,
    before: Before = nothing,
) -> tuple[CacheEntry, BuildBeside | None]:
    """The entries of a job; where one of them is to grow while it is read, also its build, which nobody has started.

    Args:
        columns_wait: why columns that a model computes are computed of finished rows; "" where they are not.
        made: makes the build; None: `BuildBeside`.
        before: is called before an entry is built, as in `raysvc.builds.find_or_build`.

    Raises:
        UserMistake: as `raysvc.builds.find_or_build.find_or_build`.
    """
    join(job, address)
    windowed = windowed_sources(job)
    at_the_end = known_at_the_end(job) or columns_wait
    looked = [look(each, default_root(each.cache.root), name) for name, each in jobs_of(job).items()]
    grow = [
        one.entry is None and (one.job.source.follow or (has_window and not at_the_end))
        for one, has_window in zip(looked, windowed, strict=True)
    ]
    for one, grows in zip(looked, grow, strict=True):
        before(one, grows)
    found = []
    for one, grows in zip(looked, grow, strict=True):
        if one.entry is None and not grows:
            if any(windowed):
                what = f"source {one.name!r}" if one.name else "the source"
                why = at_the_end or "it has no window"
                log.warning("the first step waits until all of %s is tokenized: %s", what, why)
            one = replace(one, entry=build(one, address, progress))
        found.append(one)
    entries = [one.entry for one in found if one.entry is not None]
    if len(entries) == len(found):
        return as_one(job, looked, entries), None
    growing = (made or BuildBeside)(job, found)
    if job.mixture is not None and job.mixture.by == "tokens":
        growing.make_sample(progress)
    return growing.entry, growing


def windowed_sources(job: JobConfig) -> list[bool]:
    """Tells of each source of a job whether it is shuffled in a window."""
    if job.mixture is None:
        return [is_windowed(job.plan.shuffle)]
    return [is_windowed(each.shuffle or job.plan.shuffle) for each in job.mixture.sources.values()]


def known_at_the_end(job: JobConfig) -> str:
    """Says why no entry of a job may grow while steps are taken from it, whatever its shuffle: a plan needs what is known only at the end; ""
    where it does not."""
    if (held := held_out(job)) is not None:
        return f"{held.where} needs the prompts of all rows"
    return ""


class BuildBeside:
    """Builds in threads of this process, which has joined a cluster when they start.

    Args:
        job: whose sources they are.
        looked: the sources; those without an entry are built.

    Attributes:
        entry: what grows; of a mixture the entries that are there too.
    """

    def __init__(self, job: JobConfig, looked: Sequence[Lookup]) -> None:
        self._builds: list[Build] = []
        try:
            for number, found in enumerate(looked):
                if found.entry is None:
                    self._builds.append(begin(found, number=number))
            grow = iter([one.growing() for one in self._builds])
            entries = [next(grow) if found.entry is None else found.entry for found in looked]
            self.entry = as_one(job, looked, entries)
        except BaseException:
            self._release()
            raise
        ending = [one for one in self._builds if one.has_end]
        endless = [[one] for one in self._builds if not one.has_end]
        self._lanes = [lane for lane in (ending, *endless) if lane]  # each is built in a thread
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._threads: list[threading.Thread] = []

    def make_sample(self, progress: Progress) -> None:
        """Make the slices whose tokens the shares of a mixture follow from, in this process: there is no plan before.

        Raises:
            RaysvcError: what a slice raises.
        """
        sampled = [(one, index) for one in self._builds for index in sampled_slices(one.growing())]
        try:
            for done, (one, index) in enumerate(sampled):
                progress(Tick("sample", done, len(sampled), "slices"))
                one.make_here(index)
        except BaseException:
            self._release()
            raise
        progress(Tick("sample", len(sampled), len(sampled), "slices", final=True))

    def make_first(self, job: JobConfig, step: int) -> None:
        """Begin with the first slice of each source that the steps from `step` on need, in a thread of this process: a cluster may only
        start yet.

        What is wrong with a slice is said by the build, which meets it again.
        """

        def make() -> None:
            with contextlib.suppress(RaysvcError):
                order = self._order(job, step)
                for number in range(len(self._builds)):
                    for index in [piece for one, piece in order if one == number][:1]:
                        self._builds[number].make_here(index)

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
            on_error: is told what ended the build; from a thread.
        """
        summed = SummedProgress(progress, [one.num_rows for one in self._builds])
        for place, one in enumerate(self._builds):
            one.progress = self._until_stopped(summed.of(place))
        order = self._order(job, step)
        for lane in self._lanes:
            numbers = {self._builds.index(one): place for place, one in enumerate(lane)}
            mine = [(numbers[number], index) for number, index in order if number in numbers]
            thread = threading.Thread(
                target=self._run, args=(lane, mine, workers, on_error), name="raysvc-build", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise what ended the build."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the finished entries, not for a source that is followed; raises what ended the build."""
        for thread, lane in zip(self._threads, self._lanes, strict=False):
            if lane[0].has_end:
                thread.join()
        self.check()

    def stop(self) -> None:
        """Build no further slice; what is finished stays for the next build.

        Returns when the threads are out of Ray, or after STOP_S: a process that leaves Ray under them would end at once, with
        an exit code of Ray's.
        """
        self._stopping.set()
        if not self._threads:
            self._release()
        until_s = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _release(self) -> None:
        for one in self._builds:
            one.hold.release()

    def _needed(self, job: JobConfig, step: int) -> list[tuple[int, int]]:
        """(source, slice) of all slices, as the steps from `step` on need them."""
        plan = plan_of(job, self.entry)
        assert plan.rows.are_sliced, "an order over all rows waits for them"
        step = min(step, plan.schedule.num_steps - 1)
        return plan.order.needed(plan.schedule.epoch_of(step), plan.schedule.position_of(step))

    def _order(self, job: JobConfig, step: int) -> list[tuple[int, int]]:
        """(place in `_builds`, slice) of all slices, as they are needed; the first ones are of different builds."""
        needed = self._needed(job, step)
        places = {one.number: place for place, one in enumerate(self._builds)}
        order = [(places[number], index) for number, index in needed if number in places]
        firsts = list({place: (place, index) for place, index in reversed(order)}.values())[::-1]
        return list(dict.fromkeys([*firsts, *order]))

    def _run(
        self,
        lane: Sequence[Build],
        order: Sequence[tuple[int, int]],
        workers: PoolConfig | None,
        on_error: Callable[[str], None],
    ) -> None:
        try:
            with contextlib.ExitStack() as held:
                for one in lane:
                    held.enter_context(one.hold)
                self._make(lane, order, beside(workers, small_here=not lane[0].has_end))
        except BuildStopped:
            return
        except Exception as error:  # noqa: BLE001 - told to the server, and raised by `check`
            if self._stopping.is_set():
                return
            self._error = error
            log.error("build failed entry=%s error=%s", lane[0].writer.uri, error)
            on_error(str(error))

    def _make(self, lane: Sequence[Build], order: Sequence[tuple[int, int]] | None, place: Place) -> None:
        while True:
            run(lane, place, order, self._go_on)
            if not lane[0].wait_for_more(self._stopping.wait):
                return
            order = None

    def _until_stopped(self, progress: Progress) -> Progress:
        def tick(tick: Tick) -> None:
            self._go_on()
            progress(tick)

        return tick

    def _go_on(self) -> None:
        if self._stopping.is_set():
            raise BuildStopped


class SummedProgress:
    """The ticks of some builds that go on at the same time, as those of one."""

    def __init__(self, progress: Progress, num_rows: Sequence[int]) -> None:
        self._progress = progress
        self._last = [Tick("tokenize", 0, rows, "rows") for rows in num_rows]

    def of(self, place: int) -> Progress:
        """Returns what one of the builds tells."""
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


class BuildStopped(Exception):
    """The build was stopped between two slices."""
