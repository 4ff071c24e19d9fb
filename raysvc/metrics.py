"""Every metric that the service exports, in one table, and the one call that records.

Seconds and bytes are the units; the only tags are `server` and its `team`, `role` and `source`. Ray's agent on each node
exports them to Prometheus under the name `ray_raysvc_<name>` (counters with `_total`).

Always true:
- recording never imports ray and never fails; what is counted before the process is connected is kept (bounded)
  and recorded with the first call after;
- what is recorded of a server carries the team of that server, for two teams may use the same name;
- a name or tag that the table does not have is an error of the programmer, at once;
- Ray forgets a gauge that is not set again within seconds, so gauges are set in a loop, and those of a process that
  ended disappear; its counters stay where they were.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from raysvc.team import TEAM

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "raysvc_"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without prefix; ends in its unit.
        kind: what Prometheus calls it.
        help: one clause.
        tags: which every record has.
        all_tags: as exported; the team of a server is added when it is recorded.
    """

    name: str
    kind: Kind
    help: str
    tags: tuple[str, ...] = ("server",)

    @property
    def all_tags(self) -> tuple[str, ...]:
        return ("team", *self.tags) if "server" in self.tags else self.tags

    @property
    def exported(self) -> str:
        """The name in Prometheus; a histogram adds _bucket, _sum and _count to it."""
        return f"ray_{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


_ROLE = ("server", "role")
_SOURCE = ("source",)
TABLE = (
    Metric("steps", "counter", "Steps that were committed."),
    Metric("step_seconds", "histogram", "Time from one commit to the next, per step."),
    Metric("stall_seconds", "counter", "Time in which a trainer waited for data.", _ROLE),
    Metric("stall_read_seconds", "counter", "Stall time while the server read rows."),
    Metric("stall_collate_seconds", "counter", "Stall time while the server wrote arrays."),
    Metric("stall_copy_seconds", "counter", "Stall time while a worker copied its shard."),
    Metric("stall_groups_seconds", "counter", "Stall time with too few groups of rollouts."),
    Metric("stall_build_seconds", "counter", "Stall time while rows were tokenized."),
    Metric(
        "stall_other_seconds",
        "counter",
        "Stall time for other causes, such as a busy server or the network.",
    ),
    Metric("fetch_seconds", "histogram", "A trainer's wait for a step it needs; 0 where it was there."),
    Metric("read_seconds", "histogram", "Reading the rows of a step from the cache."),
    Metric("collate_seconds", "histogram", "Writing the arrays of a step."),
    Metric(
        "stage_seconds", "histogram", "A worker's wait for a shard after it was asked for the step.", _ROLE
    ),
    Metric("h2d_seconds", "histogram", "Time to copy a shard to the worker's device.", _ROLE),
    Metric("shard_bytes", "counter", "Bytes of shards that workers took.", _ROLE),
    Metric("look_ahead_steps", "gauge", "Outstanding fetches."),
    Metric("look_ahead_bytes", "gauge", "Bytes of the outstanding fetches that count against the limit."),
    Metric("padding_share", "gauge", "Share of the newest step's cells without a token of a real row."),
    Metric("packing_share", "gauge", "Share of the newest step's cells with a token of a real row."),
    Metric("imbalance_ratio", "gauge", "Tokens of the fullest rank over the mean, newest step; 1 is even."),
    Metric(
        "cut_rows",
        "counter",
        "Trained rows that the plan cut to plan.micro_batch_tokens (oversize: truncate).",
    ),
    Metric("trained_tokens", "counter", "Tokens that the loss counted."),
    Metric("committed_steps", "gauge", "Next step to train, as the server knows it."),
    Metric("planned_steps", "gauge", "Steps of the whole plan."),
    Metric("leases_held", "gauge", "Live trainers of a server."),
    Metric("lease_silent_seconds", "gauge", "Longest silence of a trainer that did not detach."),
    Metric("groups_put", "counter", "Groups of rollouts that were new to a server."),
    Metric("groups_ready", "gauge", "Groups that are ready to be trained."),
    Metric("producers_seen", "gauge", "Producers of rollouts that recently gave a sign of life."),
    Metric("producer_wait_seconds", "counter", "Time in which producers waited for capacity."),
    Metric("leases_granted", "counter", "Leases granted."),
    Metric("leases_refused", "counter", "Attaches that were refused because another lease was alive."),
    Metric("fenced_calls", "counter", "Calls from a holder that was replaced."),
    Metric("cache_hits", "counter", "Jobs that found their entry in the cache.", _SOURCE),
    Metric("cache_misses", "counter", "Jobs that had to build.", _SOURCE),
    Metric("build_rows", "counter", "Rows of the source that were tokenized.", _SOURCE),
    Metric("build_tokens", "counter", "Tokens that were written.", _SOURCE),
    Metric("build_seconds", "counter", "Wall time of builds.", _SOURCE),
    Metric("quarantined_rows", "counter", "Rows quarantined because they could not be verified.", _SOURCE),
    Metric("dropped_rows", "counter", "Rows dropped as the job asks.", _SOURCE),
    Metric("truncated_rows", "counter", "Rows over max_length that were truncated.", _SOURCE),
    Metric("truncated_tokens", "counter", "Tokens truncated from rows over max_length.", _SOURCE),
)
BY_NAME = {metric.name: metric for metric in TABLE}
SPILLED = 'ray_spill_manager_objects_bytes{State="Spilled"}'  # Ray's own; there is nothing to add to it

OBSERVED = 10_000  # values of histograms that wait to be written
KEPT = 100  # counts of a process that is not connected yet

_server_team: str | None = None  # of a server's process; every other process has its team in the environment
_made: dict[str, Any] = {}  # guarded by _lock: two objects of one name would overwrite each other
_early: list[tuple[Metric, float, dict[str, str]]] = []  # guarded by _lock
_lock = threading.Lock()


def speak_for_server_of(team: str) -> None:
    """This process serves that team: Ray may have started it on a node whose environment names another one, or none."""
    global _server_team
    _server_team = team


def record(name: str, value: float, **tags: str) -> None:
    """Add to a counter, set a gauge, or observe a histogram.

    Args:
        name: of the table.
        value: seconds, bytes or a count.
        tags: exactly those of the table's row.
    """
    metric = BY_NAME[name]
    assert set(tags) == set(metric.tags), f"{name} has the tags {metric.tags}, not {tuple(tags)}"
    _count(metric, value, tags)


def _count(metric: Metric, value: float, tags: dict[str, str]) -> None:
    if "server" in tags:
        tags = {**tags, "team": os.environ.get(TEAM, "") if _server_team is None else _server_team}
    if not _connected():
        with _lock:
            if metric.kind == "counter" and len(_early) < KEPT:
                _early.append((metric, value, tags))
        return
    with _lock:
        early = _early[:]
        _early.clear()
    for one in (*early, (metric, value, tags)):
        _write(*one)


class LaterRecords:
    """Records of a loop that must not wait: summed here, and given to Ray by `write`, from another thread.

    A record given to Ray right after a computation, when its code is in no cache, costs 30 microseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # guarded by _lock: (name, tags) -> sum of a counter, newest of a gauge
        self._newest: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._observed = deque[tuple[str, float, dict[str, str]]](maxlen=OBSERVED)  # guarded by _lock

    def record(self, name: str, value: float, **tags: str) -> None:
        """Does what the module's function does; the value is counted when `write` is called."""
        kind, key = BY_NAME[name].kind, (name, tuple(tags.items()))
        with self._lock:
            if kind == "histogram":
                self._observed.append((name, value, tags))
            else:
                before = self._newest.get(key, 0.0) if kind == "counter" else 0.0
                self._newest[key] = before + value

    def write(self) -> None:
        """Give what was recorded so far to Ray."""
        with self._lock:
            newest, observed = list(self._newest.items()), list(self._observed)
            self._newest.clear()
            self._observed.clear()
        for (name, tags), value in newest:
            _count(BY_NAME[name], value, dict(tags))
        for name, value, of in observed:
            _count(BY_NAME[name], value, of)


def _write(metric: Metric, value: float, tags: dict[str, str]) -> None:
    made = _object(metric)
    if metric.kind == "gauge":
        made.set(value, tags)
    elif metric.kind == "histogram":
        made.observe(value, tags)
    elif value > 0:  # Ray refuses 0
        made.inc(value, tags)


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def _object(metric: Metric) -> Any:
    with _lock:
        if metric.name not in _made:
            _made[metric.name] = _make(metric)
        return _made[metric.name]


def _make(metric: Metric) -> Any:
    from ray.util import metrics

    name, tags = PREFIX + metric.name, metric.all_tags
    if metric.kind == "counter":
        return metrics.Counter(name, metric.help, tag_keys=tags)
    if metric.kind == "gauge":
        return metrics.Gauge(name, metric.help, tag_keys=tags)
    return metrics.Histogram(name, metric.help, boundaries=list(SECONDS), tag_keys=tags)
