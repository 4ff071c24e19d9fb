"""Does what every holder of a lease does, a driver or a rank: iterate, commit, restore, leave.

Always true:
- steps come in order, from the frontier to the last one, each once;
- look-ahead is bounded in steps and in bytes, and changes no byte of what comes;
- `state_dict` is the committed frontier, never the look-ahead;
- what a loop notes, a step that was there or a commit, is counted in its order, before anybody is told of it;
- after `detach` no thread, ref or lease of this client is left.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from raysvc.client.arguments import flag, integer, mapping, optional_integer, optional_text, text
from raysvc.client.commits import AT_MOST
from raysvc.client.connection import Connection
from raysvc.client.data_state import frontier_of, state_of
from raysvc.client.look_ahead import F, FormedSizes, Limit, LookAhead, PlannedSizes, Sizes
from raysvc.client.meter import CommittedSteps, DeliveredStep, Meter
from raysvc.client.step_report import StepReport, checked_metrics
from raysvc.client.steps import ClientStats
from raysvc.errors import ConfigError, PromptsEnded, ServerError, StepOutOfOrder
from raysvc.feedback.driver_feedback import DriverFeedback, Numbers
from raysvc.plan.schedule import Schedule

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from raysvc.actors.server.spec import Lease, Role, StepOutline
    from raysvc.client.rank_reader import ReadAhead
    from raysvc.trackers.reporter import Reporter
    from raysvc.trackers.tracker import Tracker

log = logging.getLogger(__name__)
WARN_AFTER_STEPS = 64  # without a commit
S = TypeVar("S")  # a step as this client gives it


class LeaseClient(ABC, Generic[F, S]):
    """See the module; `BatchClient` and `RankClient` say how a step is asked for and taken.

    Args:
        connection: the lease.
        roles: ranks and columns of each.
        limit: of the look-ahead.
    """

    def __init__(self, connection: Connection, roles: tuple[Role, ...], limit: Limit) -> None:
        self.lease: Lease = connection.lease
        self.schedule = Schedule.from_json(self.lease.schedule)
        self._connection, self._roles, self._limit = connection, roles, limit
        # by the loop, which appends: what it was given without a wait; (step, time) of a commit: all up to `step` are trained
        self._noted: collections.deque[DeliveredStep | tuple[int, float]] = collections.deque()
        self._counting = threading.RLock()  # guards what counts them
        self._frontier = self.lease.frontier  # of what was counted
        self._decided = list(self.lease.decided)
        self._feedback = DriverFeedback(connection, self._frontier, self._decided)
        self._taken = self._frontier  # steps below were handed out, or are committed
        # from steps of an earlier loop, until this one says where it begins; one rank speaks for all
        self._goes_on = self._frontier > 0 and not connection.rank
        self._window: LookAhead[F] | ReadAhead[Any] | None = (
            None  # of the newest iteration; an older one is refused
        )
        self._uncommitted = 0  # steps handed out since the last commit
        self._steps = 0
        self._wait_s = 0.0
        self._last_wait_s = 0.0
        self._overlaps = False  # workers compute while the caller waits for the next step
        self.meter = Meter(self.lease.name, exports=not connection.rank)
        self._clock = self.meter.clock
        self._report_of_steps: StepReport | None = None
        connection.report, connection.settle = self._report, self._settle

    def __len__(self) -> int:
        """Steps that are left."""
        return self.schedule.num_steps - self.next_step

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks (of the first role)."""
        return self._roles[0].dp_size

    @property
    def next_step(self) -> int:
        """The next step to train; all before it are committed."""
        self._settle()
        return self._frontier

    def commit(self, step: int, *, skipped: bool = False, metrics: Mapping[str, float] | None = None) -> None:
        """Say that all steps up to `step` are trained, or that `step` was skipped. Returns immediately; a refusal is raised by
        one of the next calls.

        Args:
            metrics: of the step, for the trackers of `report_to`: `loss`, `grad_norm`, `learning_rate`, others.

        Raises:
            ConfigError: `step` is no integer, or a metric is not a number.
            StepOutOfOrder: this client was not given that step yet.
        """
        # few calls and objects: after the compute of a step, all of them have left the core's caches
        plain = type(step) is int and skipped is False and metrics is None and self._report_of_steps is None
        connection = self._connection
        if plain and 0 <= step < self._taken and not connection.ended:
            noted = self._noted
            noted.append((step, self._clock()))
            if not connection.commits.lookers or len(noted) >= AT_MOST:
                self._settle()
        else:
            self._commit(step, skipped, metrics)

    def state_dict(self) -> dict[str, Any]:
        """The committed frontier, as small JSON; safe with fetches in flight, equal on all ranks after a step.

        Raises:
            FencedError: this process slept, and somebody took over.
        """
        self._feedback.flush()
        self._connection.confirm()
        return self._state_at(self.next_step)

    def _state_at(self, step: int) -> dict[str, Any]:
        """Returns the state of a trainer that committed the steps below `step`."""
        state = state_of(self.lease, self.schedule, step, self._connection.orders, self._decided)
        return {**state, "dp_size": self.dp_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the trainer's checkpoint overrides what the server remembers. dp_size may differ.

        Every rank loads it.

        Raises:
            StateMismatch: the state belongs to other rows or another order; it says which.
        """
        self._move(frontier_of(state), state["plan"])

    def report_rows(self, step: int, row_ids: Numbers, **columns: Numbers) -> None:
        """Report outcomes of a step's rows: `loss=[...]`, `reward=[...]`, a filter's `verdict=[...]`; a rank those of its own rows.

        They are on disk, together with those of other steps, when the next decision, `row_outcomes`, `state_dict` or `detach`
        returns. The first report of a row counts, so that a step that is trained again decides nothing again.

        Args:
            row_ids: [N].
            columns: name -> [N] numbers, kept as float32.

        Raises:
            ConfigError: no column, or one of another length; a step that was reported and is not sent yet.
            ServerError: several readers, or rollouts, are served.
        """
        self._refuse_rollouts("report_rows")
        known = integer("report_rows(step)", step, 0, max(self._feedback.asked, self._taken, 1))
        self._feedback.report(known, row_ids, columns)

    def rewind(self, step: int) -> None:
        """Make `step` the next one to train, earlier or later than the frontier; every rank has to call it."""
        self._move(integer("rewind(step)", step, 0), None)

    def outline(self, step: int) -> StepOutline:
        """Row ids, lengths and counts of any step, from the plan alone; no row is read.

        Raises:
            StepOutOfOrder: there is no such step.
        """
        self._in_range(step)
        outline: StepOutline = self._connection.get(self._connection.control("outline", step, self.dp_size))
        return outline

    def report_to(
        self,
        *trackers: str | Tracker,
        folder: str | Path,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Reporter:
        """Tell trackers of every step that is committed from now on; `detach` closes them. Ranks above 0 report nothing.

        Args:
            trackers: "wandb", "tensorboard", "mlflow", "trackio", or an object with the methods of `Tracker`.
            folder: of the run; a loop that resumes there resumes the same run in its trackers.
            name: of the run; None: the folder's.
            config: what trackers show of the run.

        Returns:
            A reporter for evals and checkpoints: `on_eval(step, metrics)`, `on_checkpoint(step, folder)`.

        Raises:
            ConfigError: a tracker is unknown, not installed, or cannot be opened; an argument of a wrong type.
        """
        from raysvc.trackers.known_trackers import check_installed
        from raysvc.trackers.reporter import NO_TRACKERS, open_reporter
        from raysvc.trackers.tracker import tracked_run

        for number, tracker in enumerate(trackers):
            if not isinstance(tracker, str) and not callable(getattr(tracker, "on_step", None)):
                what = f"{tracker!r} is no name, and has no methods of a tracker"
                raise ConfigError(f"report_to(trackers)[{number}]", what, "give a name or a Tracker")
        where = text("report_to(folder)", str(folder) if isinstance(folder, Path) else folder)
        optional_text("report_to(name)", name)
        mapping("report_to(config)", config or {})
        self._connection.check()
        if self._connection.rank:
            return NO_TRACKERS
        check_installed([each for each in trackers if isinstance(each, str)], "report_to")
        run = tracked_run(Path(where), name, config, self.next_step)
        reporter = open_reporter(trackers, run, "report_to")
        self._report_of_steps = StepReport(reporter, self.schedule.steps_per_epoch)
        return reporter

    def stats(self) -> ClientStats:
        """Counters since attach."""
        self._settle()
        window = self._window
        outstanding, nbytes = (window.num_outstanding, window.nbytes) if window else (0, 0)
        return ClientStats(self._steps, self._wait_s, self._last_wait_s, outstanding, nbytes)

    def detach(self) -> None:
        """Give the lease (or this rank's seat) back; safe to call twice, and with fetches in flight."""
        try:
            if not self._connection.closed:
                self._feedback.flush()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._end_iteration()
        self._record()
        self.meter.metrics.write()
        self._connection.close()
        if self._report_of_steps is not None:
            finished = self.next_step == self.schedule.num_steps
            self._report_of_steps.reporter.on_end({}, finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
            return
        try:  # the loop's own error is the one to see
            self.detach()
        except Exception:
            log.warning("detach failed name=%s", self.lease.name, exc_info=True)

    @abstractmethod
    def _arrive(self, fetch: F) -> S:
        """Wait for a step that was asked for."""

    @abstractmethod
    def _given(self, step: S) -> DeliveredStep:
        """Returns what is known of a step that arrived."""

    def _run(self, ask: Callable[[int], F], stop: int | None) -> Iterator[S]:
        """Check first, then iterate from the frontier of the first `next`."""
        self._connection.check()
        known = optional_integer("steps(stop)", stop, 0)
        return self._iterate(ask, self.schedule.num_steps if known is None else known)

    def _iterate(self, ask: Callable[[int], F], stop: int) -> Iterator[S]:
        end = min(stop, self.schedule.num_steps)
        self._begin_iteration()
        window = self._window = LookAhead(ask, self._sizes(end), self._limit)
        with closing(window.run(self.next_step, end)) as fetches:
            while True:
                self._refuse_older(window)
                fetch = next(fetches, None)
                if fetch is None:
                    return
                try:
                    step = self._timed(fetch)
                except PromptsEnded:
                    return
                self._taken = max(self._taken, fetch.index + 1)
                if self.lease.forms:  # more groups may have come while we waited
                    window.extend()
                yield step

    def _sizes(self, end: int) -> Sizes:
        return FormedSizes(self._form) if self.lease.forms else PlannedSizes(self._ask_sizes, end)

    def _refuse_older(self, window: LookAhead[F] | ReadAhead[Any]) -> None:
        if self._window is not window:
            expected = f"a new iteration from step {self.next_step}, after the rewind"
            raise StepOutOfOrder(self.lease.name, self.next_step, expected)

    def _begin_iteration(self) -> None:
        if self._goes_on:
            self._goes_on = False
            log.warning(
                "goes on name=%s at_step=%d: %s committed what is before; load its checkpoint with load_state_dict, "
                "or call rewind(0) to begin again",
                self.lease.name, self._frontier, self.lease.committed_by or "an earlier loop",
            )  # fmt: skip
        self._end_iteration()

    def _end_iteration(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def _settle(self) -> None:
        """Count what the loop noted so far."""
        if self._noted:
            with self._counting:
                while self._noted:
                    # it stays until it is counted: who sees none need not wait for the lock
                    note = self._noted[0]
                    if isinstance(note, DeliveredStep):
                        self.meter.given(note)
                        self._count(0.0)
                    else:
                        self._committed(*note)
                    self._noted.popleft()

    def _commit(self, step: int, skipped: bool, metrics: Mapping[str, float] | None) -> None:
        """`commit`, where something is to be refused or told."""
        step = integer("commit(step)", step, 0)
        flag("commit(skipped)", skipped)
        known = {} if metrics is None else checked_metrics(metrics)
        self._connection.check()
        with self._counting:
            self._settle()
            if step >= self._taken and step > self._frontier:
                newest = max(self._frontier, self._taken - 1)
                expected = f"step {newest} at most, the newest that was handed out or is next"
                raise StepOutOfOrder(self.lease.name, step, expected)
            told = self._committed(step, self._clock(), skipped)
            if told is not None and self._report_of_steps is not None:
                self._report_of_steps.committed(step + 1, told, known)

    def _committed(self, step: int, at_s: float, skipped: bool = False) -> CommittedSteps | None:
        """Count a commit and have it sent; None: it says nothing new. Called under `_counting`."""
        if step < self._frontier:
            return None
        told = self.meter.committed(step, step + 1 - self._frontier, at_s)
        self._frontier, self._uncommitted = step + 1, 0
        self._connection.commits.note(step, skipped)
        return told

    def _eval_limit(self, name: str, look_ahead_steps: int | None) -> Limit:
        """Look-ahead of an eval; None: as in training."""
        text("eval(name)", name)
        steps = optional_integer("eval(look_ahead_steps)", look_ahead_steps, 0)
        return Limit(self._limit.steps if steps is None else steps, self._limit.nbytes)

    def _timed(self, fetch: F) -> S:
        def arrive() -> tuple[S, DeliveredStep]:
            step = self._arrive(fetch)
            return step, self._given(step)

        step = self._measured(arrive)
        self._record()
        return step

    def _measured(self, wait: Callable[[], tuple[S, DeliveredStep]]) -> S:
        """A step that the caller waits for, with its wait."""
        begin, given = time.perf_counter(), None
        self._settle()
        self.meter.wait_begins(overlaps=self._overlaps and self._uncommitted > 0)
        try:
            step, given = wait()
        finally:
            waited_s = time.perf_counter() - begin
            self.meter.wait_ends(waited_s, given)
        self._count(waited_s)
        return step

    def _count(self, waited_s: float) -> None:
        """Count a step that was handed out."""
        self._last_wait_s = waited_s
        self._wait_s += waited_s
        self._steps += 1
        self._uncommitted += 1
        if self._uncommitted == WARN_AFTER_STEPS:
            log.warning(
                "no commit name=%s steps=%d: call commit(step.index) after each step, or a restart begins at step %d",
                self.lease.name, self._uncommitted, self._frontier,
            )  # fmt: skip

    def _report(self) -> dict[str, Any]:
        """For the server, with each heartbeat."""
        stats = self.stats()
        ahead = {"look_ahead": stats.outstanding, "look_ahead_bytes": stats.outstanding_bytes}
        return {**self.meter.report(), **ahead}

    def _record(self) -> None:
        """Records what is outstanding; one rank speaks for all."""
        if self._connection.rank:
            return
        server, stats = self.lease.name, self.stats()
        self.meter.metrics.record("look_ahead_steps", stats.outstanding, server=server)
        self.meter.metrics.record("look_ahead_bytes", stats.outstanding_bytes, server=server)

    def _in_range(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise ConfigError("step", f"{step!r} is not an integer", "give a whole number")
        if not 0 <= step < self.schedule.num_steps:
            raise StepOutOfOrder(self.lease.name, step, f"a step from 0 to {self.schedule.num_steps - 1}")

    def _move(self, frontier: int, plan_state: dict[str, Any] | None) -> None:
        self._goes_on = False
        moved = self._connection.move(frontier, plan_state)
        with self._counting:
            self._settle()
            self._frontier = self._taken = moved
        if order := (plan_state or {}).get("order"):
            self._connection.orders = {order["epoch"]: order["digest"]}
        self.meter.moved()
        self._end_iteration()
        self._feedback.moved(moved)

    def _refuse_rollouts(self, call: str) -> None:
        self._connection.check()
        if self.lease.forms:
            where, what = f"server.name {self.lease.name!r}", f"serves rollouts, and {call} is for an entry"
            raise ServerError(where, what, "change what is put")

    def _ask_sizes(self, first: int, stop: int) -> Callable[[], list[int | None]]:
        return self._connection.sizes(first, stop, self._roles)

    def _form(self, step: int) -> int | None:
        """Bytes of a step of rollouts, formed now if there are groups for it."""
        (ref,) = self._connection.fetch("form_size", 1, step, self._roles)
        nbytes: int | None = self._connection.get(ref)
        return nbytes
