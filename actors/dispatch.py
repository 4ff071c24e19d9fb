"""The layer between a training loop and its workers.

Always true:
- the driver passes refs on and opens none of them;
- results are in rank order;
- a rank that dies or raises becomes one WorkerFailed that names it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from raysvc.actors.launch import REPORT_EVERY_S, start_workers
from raysvc.actors.torch_worker import ModelSpec
from raysvc.actors.worker import MiniResult
from raysvc.errors import RaysvcError, WorkerFailed

if TYPE_CHECKING:
    from raysvc.client import Step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Running:
    """A step that was started and not yet waited for."""

    refs: list[Any]


class WorkerGroup:
    """The data-parallel ranks of one model."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)

    @classmethod
    def start(cls, spec: ModelSpec, dp_size: int, device: str, num_cpus: float) -> WorkerGroup:
        """Ask for the actors; returns at once."""
        return cls(start_workers(spec, dp_size, pick_device(device, dp_size), num_cpus))

    def setup(self) -> None:
        """Wait for the actors, let the ranks meet, build the models."""
        (address,) = self._gather("address", [self.workers[0].address.remote()])
        self._gather("setup", [worker.setup.remote(address) for worker in self.workers])

    def stage(self, step: Step) -> None:
        """Hand a step's pending shards to the ranks; never blocks."""
        for index, mini in enumerate(step.mini_batches):
            for worker, ref in zip(self.workers, mini.shards, strict=True):
                worker.stage.options(concurrency_group="stage").remote((step.index, index), ref)

    def start_step(self, step: Step, learning_rate: float) -> Running:
        """Ask every rank for one optimizer step per mini-batch; returns at once.

        Ranks run what they are asked for in order, so the next step may be started before this one is
        waited for: then no driver's round trip lies between two steps.
        """
        keys = [(step.index, index) for index in range(len(step.mini_batches))]
        return Running([worker.train_step.remote(keys, learning_rate) for worker in self.workers])

    def finish_step(self, running: Running) -> list[list[MiniResult]]:
        """Wait for a started step; result[rank][mini]."""
        return self._gather("train_step", running.refs)

    def save_checkpoint(self, folder: str) -> None:
        """Every rank writes its part into an existing folder that all nodes see."""
        self._gather("save_checkpoint", [worker.save_checkpoint.remote(folder) for worker in self.workers])

    def load_checkpoint(self, folder: str) -> None:
        """Every rank reads; dp_size may differ from the one that saved."""
        self._gather("load_checkpoint", [worker.load_checkpoint.remote(folder) for worker in self.workers])

    def stop(self) -> None:
        """End the actors."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers.clear()

    def _gather(self, call: str, refs: list[Any]) -> list[Any]:
        """All results in rank order; says every few seconds which ranks are missing, raises the first failure."""
        begin = time.monotonic()
        while True:
            try:
                return list(ray.get(refs, timeout=REPORT_EVERY_S))
            except ray.exceptions.GetTimeoutError:
                done, pending = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
                self._raise_failure(call, refs, done)
                missing = [rank for rank, ref in enumerate(refs) if ref in pending]
                log.info("waiting call=%s ranks=%s for=%.0fs", call, missing, time.monotonic() - begin)
            except ray.exceptions.RayError:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
                self._raise_failure(call, refs, done)
                raise

    def _raise_failure(self, call: str, refs: list[Any], done: list[Any]) -> None:
        for ref in done:
            rank = refs.index(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RaysvcError):
                    raise error.cause from None
                cause = f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[0]
                raise WorkerFailed(rank, call, cause) from error
            except ray.exceptions.RayError as error:
                raise WorkerFailed(rank, call, f"{type(error).__name__}, its process is gone") from error


def pick_device(device: str, dp_size: int) -> str:
    """`auto` is CUDA where the cluster has a GPU for every rank."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= dp_size else "cpu"
