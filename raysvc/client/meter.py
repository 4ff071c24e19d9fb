"""Measures what a trainer does with its data, where it attached: steps, tokens, and the time it waited.

Axes: R ranks.
Always true:
- every attached trainer is measured, whatever loop it has;
- a wait counts while it lasts, not only when it has ended;
- where workers compute while the driver waits for the next step (`steps(on_fetch=...)`), its wait counts only when
  every step that was handed out is committed, and not at all when `told_by_workers` is set;
- the loop that is measured gives no metric to Ray: `report` and the end of the client do;
- a step that was there when the caller asked is no wait;
- `report` is plain JSON: a newer or an older server may leave out what it does not know.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.metrics import LaterRecords
from raysvc.trackers.stalls import StepTimes

if TYPE_CHECKING:
    from raysvc.collate.info import MiniBatchInfo

ROLE = "trainer"
RECENT_S = 30.0  # `stall` and the rates of a report are of so long
NO_METRICS: Mapping[str, float] = {}
MAX_UNCOMMITTED = 4096  # steps whose shape is kept until they are committed


class DeliveredStep(NamedTuple):
    """Holds what a client knows of a step that it hands out.

    Attributes:
        infos: of the mini-batches.
        read_s, collate_s: the server's time.
        copy_s: this process copied the arrays.
        groups_s: the server waited for producers of rollouts.
        build_s: the server waited for rows to be tokenized.
        rollouts: `RolloutFacts.metrics`.
    """

    step: int
    infos: Sequence[MiniBatchInfo]
    read_s: float
    collate_s: float
    copy_s: float = 0.0
    groups_s: float = 0.0
    build_s: float = 0.0
    rollouts: Mapping[str, float] = NO_METRICS


class _Shape(NamedTuple):
    """Says of a step: `worst` is the tokens of the fullest rank over the mean."""

    tokens: int
    input_tokens: int
    cut_rows: int
    padding: float
    worst: float
    rollouts: Mapping[str, float]


class CommittedSteps(NamedTuple):
    """Holds what was committed with one call.

    Attributes:
        tokens: that the loss counted.
        input_tokens: of the rows.
        padding: share of the cells of its newest step.
        step_s: since the commit before, by step.
        stall_s: of that call's steps together.
        rollouts: `RolloutFacts.metrics` of its newest step.
    """

    tokens: int
    input_tokens: int
    padding: float
    step_s: float
    stall_s: float
    rollouts: Mapping[str, float] = NO_METRICS


class _Look(NamedTuple):
    time_s: float
    stall_s: float
    steps: int
    tokens: int


class Meter:
    """See the module.

    Args:
        server: its name.
        exports: whether to record metrics; one rank speaks for all.
        clock: seconds that only go forward.
    """

    def __init__(
        self, server: str, *, exports: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._exports, self.clock = server, exports, clock
        self.metrics = LaterRecords()
        self.told_by_workers = False  # `stalled` says all stalls; set it before the first step
        self._lock = threading.Lock()  # guards all below: the heartbeat thread reports
        self._began_s = self._last_commit_s = clock()
        self._since_s: float | None = None  # the caller waits since then, and it counts
        self._stall_s = self._stall_told_s = 0.0  # told: up to the last commit
        self._causes: dict[str, float] = {}
        self._steps = self._tokens = 0
        self._shapes: dict[int, _Shape] = {}  # of steps that are not committed
        self._looks = collections.deque([_Look(self._began_s, 0.0, 0, 0)])

    def wait_begins(self, *, overlaps: bool = False) -> None:
        """The caller waits for a step.

        Args:
            overlaps: workers compute meanwhile.
        """
        with self._lock:
            self._since_s = None if overlaps or self.told_by_workers else self.clock()

    def wait_ends(self, waited_s: float, given: DeliveredStep | None) -> None:
        """The caller has its step, or None: it could not be made."""
        with self._lock:
            counted = self._since_s is not None
            self._charge()
            self._since_s = None
            if given is not None:
                self._keep(waited_s, given)
                if counted:
                    times = (given.read_s, given.collate_s, given.copy_s)
                    waits = (given.groups_s, given.build_s)
                    self._blame(StepTimes(given.step, waited_s, *times, "file", *waits))

    def given(self, given: DeliveredStep) -> None:
        """The caller has a step that was there when it asked."""
        with self._lock:
            self._keep(0.0, given)

    def stalled(self, times: StepTimes) -> None:
        """Workers stood still for a step, as they measured it."""
        with self._lock:
            self._add_stall(times.waited_s)
            self._blame(times)

    def committed(self, step: int, count: int, at_s: float) -> CommittedSteps:
        """All steps up to `step` are trained, `count` of them newly, at a value of the clock."""
        with self._lock:
            step_s, self._last_commit_s = (at_s - self._last_commit_s) / count, at_s
            shapes = [self._shapes.pop(index) for index in sorted(self._shapes) if index <= step]
            tokens = sum(shape.tokens for shape in shapes)
            self._steps += count
            self._tokens += tokens
            stall_s, self._stall_told_s = self._stall_s - self._stall_told_s, self._stall_s
            if self._exports:
                self.metrics.record("steps", count, server=self._server)
                self.metrics.record("step_seconds", step_s, server=self._server)
                self.metrics.record("trained_tokens", tokens, server=self._server)
                self.metrics.record("cut_rows", sum(shape.cut_rows for shape in shapes), server=self._server)
                self._show(shapes)
        padding, rollouts = (shapes[-1].padding, shapes[-1].rollouts) if shapes else (0.0, NO_METRICS)
        input_tokens = sum(shape.input_tokens for shape in shapes)
        return CommittedSteps(tokens, input_tokens, padding, step_s, stall_s, rollouts)

    def moved(self) -> None:
        """The trainer went to another step: what it was given is not trained."""
        with self._lock:
            self._shapes.clear()

    def report(self) -> dict[str, Any]:
        """Sums since the attach, and shares and rates of the last `RECENT_S`. Writes what was recorded."""
        self.metrics.write()
        with self._lock:
            self._charge()
            now = _Look(self.clock(), self._stall_s, self._steps, self._tokens)
            self._looks.append(now)
            while now.time_s - self._looks[1].time_s >= RECENT_S:
                self._looks.popleft()
            first, causes = self._looks[0], dict(self._causes)
        passed_s = max(now.time_s - first.time_s, 1e-9)
        return {
            "steps": now.steps,
            "tokens": now.tokens,
            "stall_s": now.stall_s,
            "causes": causes,
            "stall": min((now.stall_s - first.stall_s) / passed_s, 1.0),
            "steps_per_s": (now.steps - first.steps) / passed_s,
            "tokens_per_s": (now.tokens - first.tokens) / passed_s,
            "elapsed_s": now.time_s - self._began_s,
        }

    def _charge(self) -> None:
        """Count the wait so far. Called under `_lock`."""
        if self._since_s is not None:
            now_s = self.clock()
            self._add_stall(now_s - self._since_s)
            self._since_s = now_s

    def _add_stall(self, seconds: float) -> None:
        self._stall_s += seconds
        if self._exports:
            self.metrics.record("stall_seconds", seconds, server=self._server, role=ROLE)

    def _blame(self, times: StepTimes) -> None:
        """Called under `_lock`."""
        charged = times.charged()
        for part, seconds in charged.items():
            self._causes[part] = self._causes.get(part, 0.0) + seconds
        if self._exports:
            self.metrics.record("stall_read_seconds", charged.get("read", 0.0), server=self._server)
            self.metrics.record("stall_collate_seconds", charged.get("collate", 0.0), server=self._server)
            self.metrics.record("stall_copy_seconds", charged.get("copy", 0.0), server=self._server)
            self.metrics.record("stall_groups_seconds", charged.get("groups", 0.0), server=self._server)
            self.metrics.record("stall_build_seconds", charged.get("build", 0.0), server=self._server)
            self.metrics.record("stall_other_seconds", charged.get("other", 0.0), server=self._server)

    def _keep(self, waited_s: float, given: DeliveredStep) -> None:
        """Called under `_lock`."""
        while len(self._shapes) >= MAX_UNCOMMITTED:
            self._shapes.pop(min(self._shapes))
        self._shapes[given.step] = _shape(given)
        if self._exports:
            self.metrics.record("fetch_seconds", waited_s, server=self._server)

    def _show(self, shapes: Sequence[_Shape]) -> None:
        if shapes:
            newest = shapes[-1]
            self.metrics.record("padding_share", newest.padding, server=self._server)
            self.metrics.record("packing_share", 1.0 - newest.padding, server=self._server)
            self.metrics.record("imbalance_ratio", newest.worst, server=self._server)


def _shape(given: DeliveredStep) -> _Shape:
    infos = given.infos
    cells = max(sum(info.num_cells for info in infos), 1)
    padding = sum(info.pad_share * info.num_cells for info in infos) / cells
    ratios = [max(info.rank_tokens) * len(info.rank_tokens) / sum(info.rank_tokens) for info in infos]
    tokens = sum(info.denominators.tokens for info in infos)
    input_tokens = sum(round((1.0 - info.pad_share) * info.num_cells) for info in infos)
    cut_rows = sum(info.num_truncated for info in infos)
    return _Shape(tokens, input_tokens, cut_rows, padding, max(ratios, default=1.0), given.rollouts)
