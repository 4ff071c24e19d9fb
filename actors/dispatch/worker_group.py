"""The workers of one model: staging, calls to all of them, answers by rank.

Always true:
- replicas of a dp rank (tensor, context, pipeline parallel) get the same ref;
- a call may wait for other refs (`after`) without the driver waiting;
- answers are in worker order, `collect` gives one per dp rank in dp order;
- a rank that dies or raises becomes one WorkerFailed that names it: of several failures of a call the cause, a dead process
  before what the others say of it;
- after that no call waits for ranks that still wait for the failed one: it fails within seconds, with the same name.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raysvc.actors.dispatch.worker_places import nodes_of, start_groups, wait_for_places
from raysvc.actors.launch import REPORT_EVERY_S
from raysvc.actors.mesh import Mesh
from raysvc.actors.placement import rank_need
from raysvc.actors.staging.staging import Key, StagingOptions
from raysvc.actors.worker.results import MiniResult
from raysvc.actors.worker.torch_worker import ModelSpec
from raysvc.collate.row_values import RowValues
from raysvc.errors import RaysvcError, WorkerFailed
from raysvc.nodes.room import Resources

if TYPE_CHECKING:
    from raysvc.client.batch_client import Step

log = logging.getLogger(__name__)
SETTLE_S = 3.0  # how long the other ranks of a failed call may take to answer, or to be seen dead
Setup = tuple[list[Any], list[Any]]  # refs of the address, refs of the ranks


@dataclass(frozen=True)
class RunningStep:
    """A step that was started and not yet waited for."""

    refs: list[Any]


class WorkerGroup:
    """The ranks of one model.

    Args:
        workers: actor handles, in the order of the mesh.
        mesh: None: every worker is a dp rank.
        staging: where it measures, shards are opened when they are taken, so that fetching is measured too.
    """

    def __init__(
        self, workers: Sequence[Any], mesh: Mesh | None = None, staging: StagingOptions | None = None
    ) -> None:
        self.workers = list(workers)
        self.mesh = mesh or Mesh(dp=len(self.workers))
        self._staging = staging or StagingOptions()
        self._reserved: PlacementGroup | None = None  # where `start` placed the workers
        self._failed: tuple[WorkerFailed, list[Any]] | None = None  # and the refs of its call
        self._dp_ranks = [self.mesh.rank(index).dp for index in range(len(self.workers))]

    @classmethod
    def start(
        cls,
        spec: ModelSpec,
        dp_size: int,
        device: str,
        num_cpus: float,
        num_gpus: float | None = None,
        *,
        may_grow: bool = False,
        beside: Sequence[Resources] = (),
    ) -> WorkerGroup:
        """Ask for the actors, in places that are reserved together; returns at once.

        Args:
            num_gpus: of each; None: a whole one on CUDA, else none.
            may_grow: what the cluster lacks now is waited for.
            beside: what the job's server and collators take of the cluster besides.

        Raises:
            ConfigError: the cluster cannot hold them all, or two ranks would share a device that they compute on.
        """
        device, need = rank_need(dp_size, device, num_cpus, num_gpus)
        placed = start_groups(
            {"trainer": spec}, {"trainer": need}, (), device, may_grow=may_grow, beside=beside
        )
        group = cls(placed.workers["trainer"], staging=spec.staging)
        group._reserved = placed.reserved
        return group

    def node_id(self) -> str:
        """The node of rank 0, also before it has started."""
        return self.node_ids()[0]

    def node_ids(self) -> list[str]:
        """The node of each rank, also before it has started."""
        assert self._reserved is not None, "`start` reserved the places"
        return nodes_of(self._reserved)

    def setup(self) -> None:
        """Wait for the actors, let the ranks meet, build the models."""
        self.wait_for_setup(self.start_setup())

    def start_setup(self, after: Sequence[Any] = ()) -> Setup:
        """Ask rank 0 where to meet, and every rank to meet there and build; returns at once."""
        address = self.call("address", workers=self.workers[:1], after=after)
        return address, self.call("setup", *address)

    def wait_for_setup(self, refs: Setup) -> None:
        """Wait for what `start_setup` asked for."""
        if self._reserved is not None:
            wait_for_places(self._reserved)
        self.gather("address", refs[0])
        self.gather("setup", refs[1])

    def stage(self, step: Step) -> None:
        """Hand a step's pending shards to the ranks; never blocks."""
        for index, mini in enumerate(step.optimizer_steps()):
            self.stage_mini((step.index, index), mini.shards)

    def stage_mini(
        self, key: Key, shards: Sequence[Any], columns: RowValues | None = None, loss_weight: float = 1.0
    ) -> None:
        """Hand the pending shards of a mini-batch (one ref per dp rank) to the workers; never blocks."""
        extra: tuple[Any, ...] = ()
        if columns is not None or loss_weight != 1.0:
            extra = (None if columns is None else ray.put(columns), loss_weight)
        for worker, dp in zip(self.workers, self._dp_ranks, strict=True):
            shard = [shards[dp]] if self._staging.timed(key) else shards[dp]
            worker.stage.options(concurrency_group="stage").remote(key, shard, *extra)

    def start_step(self, step: Step, learning_rate: float | None = None) -> RunningStep:
        """Ask every rank for one optimizer step per mini-batch and update epoch; returns at once.

        Ranks run what they are asked for in order, so the next step may be started before this one is
        waited for: then no driver's round trip lies between two steps.
        """
        keys = [(step.index, index) for index, _ in enumerate(step.optimizer_steps())]
        return RunningStep(self.call("train_step", keys, learning_rate))

    def finish_step(self, running: RunningStep) -> list[list[MiniResult]]:
        """Wait for a started step; result[dp rank][optimizer step]."""
        return self.collect("train_step", running.refs)

    def save_checkpoint(self, folder: str) -> None:
        """Every rank writes its part into an existing folder that all nodes see."""
        self.gather("save_checkpoint", self.call("save_checkpoint", folder))

    def load_checkpoint(self, folder: str) -> None:
        """Every rank reads; dp_size may differ from the one that saved."""
        self.gather("load_checkpoint", self.call("load_checkpoint", folder))

    def save_hf_model(self, folder: str) -> None:
        """Rank 0 writes the whole model as `transformers` reads it; all ranks take part."""
        self.gather("save_hf_model", self.call("save_hf_model", folder))

    def stop(self) -> None:
        """End the actors."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers.clear()
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None

    def call(
        self, name: str, *arguments: Any, after: Sequence[Any] = (), workers: Sequence[Any] | None = None
    ) -> list[Any]:
        """Ask every worker (or some); refs in their order. The call starts when all of `after` are there.

        An argument may be a ref: it arrives as what it refers to, and the call fails when it failed.

        Raises:
            WorkerFailed: a rank failed in an earlier call, and is dead or waited for.
        """
        self._refuse_after_failure(name)
        chosen = self.workers if workers is None else workers
        if after:
            return [worker.call_after.remote(name, len(after), *after, *arguments) for worker in chosen]
        return [getattr(worker, name).remote(*arguments) for worker in chosen]

    def collect(self, call: str, refs: list[Any]) -> list[Any]:
        """Wait for all workers; the answers that count, in dp order."""
        answers = self.gather(call, refs)
        return [answers[index] for index in self.mesh.collected()]

    def gather(self, call: str, refs: list[Any]) -> list[Any]:
        """All answers in worker order; says every few seconds which are missing, raises the failure of the call.

        Raises:
            WorkerFailed: a rank died or raised, in this call or in one before it.
            RaysvcError: what a rank raised on purpose.
        """
        begin = time.monotonic()
        while True:
            try:
                return list(ray.get(refs, timeout=REPORT_EVERY_S))
            except ray.exceptions.GetTimeoutError:
                done, pending = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
                self._raise_failure(call, refs, done)
                self._refuse_after_failure(call)
                if not pending:
                    return list(ray.get(refs))  # without a limit: see raysvc.nodes.objects
                missing = [rank for rank, ref in enumerate(refs) if ref in pending]
                log.info("waiting call=%s ranks=%s for=%.0fs", call, missing, time.monotonic() - begin)
            except ray.exceptions.RayError:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
                self._raise_failure(call, refs, done)
                raise

    def _raise_failure(self, call: str, refs: list[Any], done: list[Any]) -> None:
        """Raise what went wrong in a call of which some answers are there, if anything did."""
        errors = _errors(refs, done)
        if not errors:
            return
        if not any(_is_dead(error) or _meant(error) for error in errors.values()):
            # lost connections are what the others see of a rank that died: give its death the time to be known
            settled, _ = ray.wait(refs, num_returns=len(refs), timeout=SETTLE_S, fetch_local=False)
            errors = _errors(refs, settled)
        rank = next((rank for rank, error in errors.items() if _is_dead(error)), min(errors))
        error = errors[rank]
        meant = _meant(error)
        failed = WorkerFailed(rank, call, str(meant) if meant else _cause(error))
        self._failed = self._failed or (failed, refs)
        raise meant or failed from error

    def _refuse_after_failure(self, call: str) -> None:
        """Refuse a call after one that failed, unless all its ranks are alive and through with it."""
        if self._failed is None:
            return
        failed, refs = self._failed
        done, waiting = ray.wait(refs, num_returns=len(refs), timeout=SETTLE_S, fetch_local=False)
        if waiting or any(_is_dead(error) for error in _errors(refs, done).values()):
            ranks = [refs.index(ref) for ref in waiting]
            still = f"; ranks {ranks} still wait for it" if ranks else ""
            cause = f"{failed.cause} (in {failed.call}, before this call{still})"
            raise WorkerFailed(failed.rank, call, cause)
        self._failed = None


def _errors(refs: list[Any], done: list[Any]) -> dict[int, ray.exceptions.RayError]:
    """rank -> what its answer raises."""
    found = {}
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            found[refs.index(ref)] = error
    return dict(sorted(found.items()))


def _is_dead(error: BaseException) -> bool:
    return not isinstance(error, ray.exceptions.RayTaskError)


def _meant(error: BaseException) -> RaysvcError | None:
    """Returns what a worker raised on purpose."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RaysvcError) else None


def _cause(error: ray.exceptions.RayError) -> str:
    """One line: what was raised, or which process died where, and of what."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[0]
    text = str(error)
    facts = {name: re.search(rf"\b{name}: (\S+)", text) for name in ("pid", "ip", "exit type")}
    pid, node, kind = (found[1] if found else "?" for found in facts.values())
    memory = ", out of memory" if isinstance(error, ray.exceptions.OutOfMemoryError) else ""
    return f"its process {pid} on node {node} died ({type(error).__name__}, {kind}{memory})"
