"""A build that goes on while its rows are trained or served.

Always true:
- the plan of the entry that grows is the plan of the finished one, so its steps are too;
- slices are made in the order in which the steps need them, from the next step on, and then the rest;
- an error of the build reaches the server, whoever waits there, and the caller of `check` or `wait`;
- what was made before a stop or a kill is there for the next build.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from raysvc.build.build_report import known_before
from raysvc.build.cache_entry import CacheEntry
from raysvc.build.find_or_build import Looked, Making, PoolBeside, begin
from raysvc.build.job_plan import plan_of
from raysvc.cache import names
from raysvc.cache.growing.growing_entry import GrowingEntry, GrowingSpec
from raysvc.errors import RaysvcError
from raysvc.job.config import JobConfig
from raysvc.plan.sliced.window_order import WindowOrder, is_windowed
from raysvc.progress import Progress, Tick, silent

if TYPE_CHECKING:
    from raysvc.job.config import PoolConfig

log = logging.getLogger(__name__)


def may_grow(job: JobConfig) -> bool:
    """Whether the steps of a job may be taken from an entry that grows: those of one source with a window."""
    return is_windowed(job.plan.shuffle) and job.mixture is None and job.cache.enabled


def has_all_it_needs(found: Looked) -> bool:
    """Whether the plan alone says how wide a step is: the widest text of rows is known at the end."""
    carried = found.plan.recipe.get("carry", {}).values()
    return not any(column["dtype"] == "string" for column in carried)


class BuildBeside:
    """A build of one entry, in a thread of this process, which has joined a cluster when it starts.

    Args:
        found: an entry that has to be built.

    Attributes:
        entry: the entry that grows.
    """

    def __init__(self, found: Looked) -> None:
        self._job, self._plan = found.job, found.plan
        self._writer, self._hold = begin(found)
        store, folder = self._writer.store, self._writer.folder
        store.create(
            f"{folder}/{names.TOKENIZER}", found.plan.tokenizer.content()
        )  # for evals, before the end
        self.entry = self._entry_of(found)
        self._progress: Progress = silent
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def _entry_of(self, found: Looked) -> CacheEntry:
        spec = GrowingSpec(
            key=found.plan.key,
            recipe={name: value for name, value in found.plan.recipe.items() if name != "source"},
            report=known_before(found.job, found.plan),
            contents=tuple(piece.identity()["bytes"] for piece in found.plan.source.slices),
        )
        entry = GrowingEntry(self._writer.store, self._writer.folder, spec)
        return CacheEntry(entry, hit=False, reason=found.reason)

    def make_first(self, job: JobConfig, step: int) -> None:
        """Begin with the first slice that the steps from `step` on need, in a thread of this process: a cluster may only start yet.

        What is wrong with the slice is said by the build, which meets it again.
        """
        making = Making(self._job, self._plan, self._writer, silent)

        def make() -> None:
            with contextlib.suppress(RaysvcError):
                making.make_here(self._order(job, step)[0])

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
        making = Making(
            self._job, self._plan, self._writer, self._tick, self._order(job, step), PoolBeside(workers)
        )
        self._thread = threading.Thread(
            target=self._run, args=(making, on_error), name="raysvc-build", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the build."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the finished entry; raises what ended the build."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def stop(self) -> None:
        """Build no further slice; what is finished stays for the next build. Does not wait."""
        self._stopping.set()
        if self._thread is None:
            self._hold.release()

    def _order(self, job: JobConfig, step: int) -> list[int]:
        plan = plan_of(job, self.entry)
        assert isinstance(plan.order, WindowOrder)
        step = min(step, plan.schedule.num_steps - 1)
        order: list[int] = plan.order.slices_from(
            plan.schedule.epoch_of(step), plan.schedule.position_of(step)
        ).tolist()
        return order

    def _run(self, making: Making, on_error: Callable[[str], None]) -> None:
        try:
            with self._hold:
                self._make(making)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - told to the server, and raised by `check`
            if self._stopping.is_set():
                return
            self._error = error
            log.error("build failed entry=%s error=%s", self._writer.uri, error)
            on_error(str(error))

    def _make(self, making: Making) -> None:
        making.entry(None)

    def _tick(self, tick: Tick) -> None:
        if self._stopping.is_set():
            raise Stopped
        self._progress(tick)


class Stopped(Exception):
    """The build was stopped between two slices."""
