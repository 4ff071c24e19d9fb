"""The named actor that plans and collates the steps of one trainer.

Always true:
- `fetch(step)` is pure in (plan, step, dp_size): the same call gives the same bytes, before and after a
  restart of this process, so Ray may retry it and rebuild lost shards with it;
- shards are returned by value: the caller owns them, and they outlive this process;
- nothing is kept per step; what must outlive the process (leases, frontier) is in the journal;
- `control` calls never wait for a collation (a concurrency group of their own; the lock below is held
  for microseconds).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from raysvc.actors.journal import Journal
from raysvc.actors.ledger import Ledger
from raysvc.cache.reader import Entry, open_entry
from raysvc.collate.collate import collate_mini_batch
from raysvc.collate.info import MiniBatchInfo, info_of
from raysvc.collate.shard import Shard
from raysvc.config import PlanConfig
from raysvc.errors import RaysvcError, StateMismatch, StepFailed, StepOutOfOrder
from raysvc.plan.plan import MiniBatchPlan, Plan

log = logging.getLogger(__name__)
COMMIT_FLUSH_S = 1.0


class ServeSpec(BaseModel):
    """Everything a server needs to start, and to start again after its process died."""

    model_config = ConfigDict(frozen=True)
    name: str
    entry_uri: str
    plan: PlanConfig
    pad_token_id: int
    journal: str | None = Field(description="fsspec URL of the ledger's folder; None: kept in memory only")
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    lease_ttl_s: float = 30.0
    collate_threads: int = 2
    num_cpus: float = 0.5

    def difference(self, other: ServeSpec) -> str | None:
        """The first field in which two specs differ, as "field (this -> other)"; None when equal."""
        hidden = {"storage_options"}  # may hold credentials
        theirs = other._flat()
        for name, value in self._flat().items():
            if value != theirs[name]:
                return name if name in hidden else f"{name} ({value!r} -> {theirs[name]!r})"
        return None

    def _flat(self) -> dict[str, Any]:
        return {**self.model_dump(exclude={"plan"}), **self.plan.model_dump()}


@dataclasses.dataclass(frozen=True)
class Lease:
    """The right to advance a server.

    Attributes:
        fence: number that every call of the holder carries.
        ttl_s: the lease ends when nothing is heard of the holder for this long.
        frontier: next step to train.
        plan_hash: identity of the order of rows.
        schedule: JSON of `raysvc.plan.schedule.Schedule`.
    """

    name: str
    fence: int
    ttl_s: float
    frontier: int
    plan_hash: str
    entry_key: str
    schedule: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What the driver learns of a step: no tensors.

    Attributes:
        index: step, 0-based.
        epoch: 0-based.
        mini_batches: one info per mini-batch.
        read_s: reading rows from the cache.
        collate_s: writing arrays.
    """

    index: int
    epoch: int
    mini_batches: tuple[MiniBatchInfo, ...]
    read_s: float
    collate_s: float


class BatchServer:
    """See the module. One per trainer; constructed from text, so that a restart needs nothing else.

    Args:
        spec_json: a `ServeSpec`.
        born: differs between two actors of one name, and is the same after a restart of one.
    """

    def __init__(self, spec_json: str, born: str) -> None:
        self.spec = ServeSpec.model_validate_json(spec_json)
        self._born = born
        self._entry: Entry = open_entry(self.spec.entry_uri, self.spec.storage_options)
        self._plan = Plan(self.spec.plan, self._entry.lengths(), entry_keys=[self._entry.key])
        self._lock = threading.Lock()
        self._journal = Journal(self.spec.journal) if self.spec.journal else None
        self._ledger = self._restore()  # guarded by self._lock
        self._saved_s = 0.0  # guarded by self._lock; when the ledger was last written
        log.info(
            "serving name=%s rows=%d steps=%d", self.spec.name, len(self._entry.lengths()), self.num_steps
        )

    @property
    def num_steps(self) -> int:
        """Steps of all epochs."""
        return self._plan.schedule.num_steps

    def spec_json(self) -> str:
        """The spec this server runs with."""
        return self.spec.model_dump_json()

    def describe(self) -> dict[str, Any]:
        """What this server serves; no lease needed."""
        rows = self._entry.num_rows
        return {"name": self.spec.name, "num_rows": rows, "schedule": self._plan.schedule.to_json()}

    def attach(self, holder: str, takeover: bool = False) -> Lease:
        """Give out the next fence.

        Raises:
            LeaseHeld: another trainer holds a living lease and `takeover` is False.
        """
        with self._lock:
            self._ledger = self._ledger.attach(holder, time.time(), self.spec.lease_ttl_s, takeover=takeover)
            self._save()
            ledger = self._ledger
        log.info("attached name=%s holder=%s fence=%d", self.spec.name, holder, ledger.fence)
        return Lease(
            self.spec.name,
            ledger.fence,
            self.spec.lease_ttl_s,
            ledger.frontier,
            self._plan.hash,
            self._entry.key,
            self._plan.schedule.to_json(),
        )

    def heartbeat(self, fence: int) -> int:
        """A sign of life; returns the frontier."""
        with self._lock:
            self._ledger = self._ledger.beat(fence, time.time())
            return self._ledger.frontier

    def commit(self, fence: int, step: int, skipped: bool = False) -> int:
        """Move the frontier past `step`; returns it. Committing twice is a no-op."""
        with self._lock:
            ledger = self._ledger.commit(fence, step, skipped=skipped)
            self._ledger = ledger.beat(fence, time.time())
            if time.monotonic() - self._saved_s > COMMIT_FLUSH_S or ledger.frontier == self.num_steps:
                self._save()
            return ledger.frontier

    def move(self, fence: int, frontier: int, plan_hash: str, entry_key: str) -> int:
        """Go to the frontier of the trainer's checkpoint.

        Raises:
            StateMismatch: the checkpoint was made with other rows or another order.
        """
        self._same("entry", self._entry.key, entry_key)
        self._same("plan", self._plan.hash, plan_hash)
        with self._lock:
            self._ledger = self._ledger.move(fence, frontier, self.num_steps)
            self._save()
            return frontier

    def detach(self, fence: int) -> None:
        """Give the lease back; the frontier stays."""
        with self._lock:
            self._ledger = self._ledger.detach(fence)
            self._save()

    def peek(self, step: int, dp_size: int = 1) -> StepInfo:
        """Row ids, lengths and counts of a step; no tensors are sent."""
        return self._make(step, dp_size)[0]

    def fetch(self, fence: int, step: int, dp_size: int) -> tuple[StepInfo | Shard, ...]:
        """The step's info, then its shards: mini-batch 0 rank 0, mini-batch 0 rank 1, ...

        Raises:
            FencedError: the caller was replaced.
            StepOutOfOrder: there is no such step.
            StepFailed: the step could not be made; carries the cause.
        """
        with self._lock:
            self._ledger.check(fence)
        info, shards = self._make(step, dp_size)
        return (info, *shards)

    def stats(self) -> dict[str, Any]:
        """Plain facts about this server."""
        with self._lock:
            ledger = self._ledger
        facts = {
            "name": self.spec.name,
            "pid": os.getpid(),
            "entry_key": self._entry.key,
            "num_steps": self.num_steps,
        }
        return {**facts, "holder": ledger.holder, "fence": ledger.fence, "frontier": ledger.frontier}

    def _make(self, step: int, dp_size: int) -> tuple[StepInfo, list[Shard]]:
        if not 0 <= step < self.num_steps:
            raise StepOutOfOrder(self.spec.name, step, f"a step from 0 to {self.num_steps - 1}")
        try:
            return self._make_step(step, dp_size)
        except RaysvcError:
            raise
        except Exception as error:
            log.exception("step failed name=%s step=%d", self.spec.name, step)
            raise StepFailed(self.spec.name, step, f"{type(error).__name__}: {error}") from error

    def _make_step(self, step: int, dp_size: int) -> tuple[StepInfo, list[Shard]]:
        plan = self._plan.step(step, dp_size)
        infos: list[MiniBatchInfo] = []
        shards: list[Shard] = []
        read_s = collate_s = 0.0
        for index, mini in enumerate(plan.mini_batches):
            begin = time.perf_counter()
            rows = self._entry.read(mini.row_ids)
            middle = time.perf_counter()
            made = self._collate(rows, mini, step, index)
            collate_s += time.perf_counter() - middle
            read_s += middle - begin
            shards.extend(made)
            infos.append(info_of(mini, made))
        return StepInfo(step, plan.epoch, tuple(infos), read_s, collate_s), shards

    def _collate(self, rows: Any, mini: MiniBatchPlan, step: int, index: int) -> tuple[Shard, ...]:
        config = self.spec.plan
        return collate_mini_batch(
            rows,
            mini,
            step=step,
            mini_index=index,
            layout=config.layout,
            pad_token_id=self.spec.pad_token_id,
            columns=config.columns,
            pad_to_multiple=config.pad_to_multiple,
            align=config.align,
        )

    def _restore(self) -> Ledger:
        record = self._journal.load() if self._journal else None
        if record is None or record.get("plan_hash") != self._plan.hash:
            fence = int(record["ledger"]["fence"]) if record else 0
            return Ledger(self.spec.name, fence=fence)  # other rows: start over, but never reuse a fence
        ledger = Ledger.from_json(record["ledger"])
        # a holder of an earlier actor of this name cannot reach this one: only a restart keeps the lease
        return ledger if record.get("born") == self._born else dataclasses.replace(ledger, holder=None)

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        if self._journal:
            record = {"born": self._born, "plan_hash": self._plan.hash, "ledger": self._ledger.to_json()}
            self._journal.save(record)

    def _same(self, what: str, here: str, there: str) -> None:
        if here != there:
            finding = f"the checkpoint was made with {there[:12]}, this server has {here[:12]}"
            raise StateMismatch(
                f"state.{what}",
                finding,
                "train with the same source, tokenizer and plan, or start a new run_dir",
            )
