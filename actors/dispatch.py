"""The layer between an algorithm and pools of workers.

An algorithm knows groups by name and mini-batches; workers know micro-batches; neither knows where the other is.
`WorkerDispatch` stages shards, asks workers, brings memory to where a call needs it, and gives back numbers.

Axes: R dp ranks, N rows of a mini-batch.

Always true:
- the driver passes refs on and opens none of them; what it sends does not depend on the bytes of a batch;
- results are in row order without dummies; where they are per rank, in dp order;
- every call has a twin `*_async` that returns at once; calls of one group run in the order they were asked for, and so
  do those of colocated groups; others overlap;
- a rank that dies or raises becomes one WorkerFailed that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from raysvc.actors.losses import Loss
from raysvc.actors.memory import Memory, Move
from raysvc.actors.results import Metrics, reduce_metrics
from raysvc.actors.row_values import RowValues, in_order
from raysvc.actors.worker_group import Running, WorkerGroup, pick_device

if TYPE_CHECKING:
    from raysvc.client import Mini

__all__ = ["Pending", "Running", "WorkerDispatch", "WorkerGroup", "pick_device"]
T = TypeVar("T")


class Pending(Generic[T]):
    """An answer that is on its way.

    Args:
        wait: waits for it; called once.
    """

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._value: T

    def result(self) -> T:
        """Wait for the answer; the same one every time.

        Raises:
            WorkerFailed: a rank died, or raised.
        """
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value


class WorkerDispatch:
    """Named groups of workers.

    Args:
        groups: name -> its workers, started.
        colocated: sets of names that share devices, so that one of each set has memory there at a time.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup], colocated: Iterable[Collection[str]] = ()) -> None:
        self.groups = dict(groups)
        self.memory = Memory(colocated)
        self._calls = 0  # keys of staged shards: each call stages its own

    def init_model(self, name: str) -> None:
        """Let the ranks meet and build the model; colocated groups make room first."""
        after = self._move(self.memory.before_init(name))
        self.groups[name].setup(after)
        self.memory.built(name)

    def forward(self, name: str, data: Mini) -> RowValues:
        """Outputs of a mini-batch's rows (`logprobs`, `entropy`, `values`), in the order of `data.info.row_ids`."""
        return self.forward_async(name, data).result()

    def forward_async(self, name: str, data: Mini) -> Pending[RowValues]:
        """Twin of `forward`."""
        group, key = self.groups[name], self._stage(name, data, None, 1.0)
        refs = self._call(name, "forward", key)

        def wait() -> RowValues:
            assert data.info is not None, "a mini-batch that has not arrived has no row order"
            return in_order(group.collect("forward", refs), data.info.row_ids)

        return self._pending(name, wait)

    def forward_backward(
        self,
        name: str,
        data: Mini,
        loss: Loss | None = None,
        loss_weight: float = 1.0,
        columns: RowValues | None = None,
    ) -> Metrics:
        """Add the gradient of a mini-batch; its loss and metrics over all ranks (`results.reduce_metrics`).

        Args:
            name: of the group.
            data: one mini-batch.
            loss: None: the worker's own.
            loss_weight: factor of the loss, for mini-batches that are added up before a step.
            columns: per-token columns of its rows (advantages, old log-probabilities, ...), in any row order.
        """
        return self.forward_backward_async(name, data, loss, loss_weight, columns).result()

    def forward_backward_async(
        self,
        name: str,
        data: Mini,
        loss: Loss | None = None,
        loss_weight: float = 1.0,
        columns: RowValues | None = None,
    ) -> Pending[Metrics]:
        """Twin of `forward_backward`."""
        key = self._stage(name, data, columns, loss_weight)
        return self._metrics(name, "forward_backward", key, loss)

    def optim_step(self, name: str) -> Metrics:
        """Clip, step; `grad_norm`, `lr`, `optimizer_step`."""
        return self.optim_step_async(name).result()

    def optim_step_async(self, name: str) -> Pending[Metrics]:
        """Twin of `optim_step`."""
        return self._metrics(name, "optim_step")

    def evaluate(self, name: str, data: Mini) -> RowValues:
        """Per row: `nll` in nats, `targets`, and `bytes` where the workers know the tokens' bytes."""
        return self.evaluate_async(name, data).result()

    def evaluate_async(self, name: str, data: Mini) -> Pending[RowValues]:
        """Twin of `evaluate`: ask for the next mini-batch before waiting for this one, and its copy is hidden."""
        group, key = self.groups[name], self._stage(name, data, None, 1.0)
        refs = self._call(name, "evaluate", key)

        def wait() -> RowValues:
            assert data.info is not None, "a mini-batch that has not arrived has no row order"
            return in_order(group.collect("evaluate", refs), data.info.row_ids)

        return self._pending(name, wait)

    def set_lr(self, name: str, learning_rate: float) -> None:
        """The rate of the next optimizer steps."""
        self._all(name, "set_lr", learning_rate).result()

    def save_checkpoint(self, name: str, folder: str) -> None:
        """Every rank writes its part into an existing folder that all nodes see."""
        self.save_checkpoint_async(name, folder).result()

    def save_checkpoint_async(self, name: str, folder: str) -> Pending[None]:
        """Twin of `save_checkpoint`."""
        return self._all(name, "save_checkpoint", folder)

    def load_checkpoint(self, name: str, folder: str) -> None:
        """Every rank reads; dp_size may differ from the one that saved."""
        self._all(name, "load_checkpoint", folder).result()

    def save_hf_model(self, name: str, folder: str) -> None:
        """Write the model as `transformers` reads it."""
        self._all(name, "save_hf_model", folder).result()

    def sync_weights(self, source: str, target: str) -> None:
        """Give the weights of one group to another, through the object store; the driver sees none of them."""
        exported = self._call(source, "export_weights")[0]  # rank 0 has all of them
        self._all(target, "import_weights", exported).result()

    def node_ids(self, name: str | None = None) -> list[str]:
        """Nodes that workers of a group (None: of all) are on, sorted."""
        names = list(self.groups) if name is None else [name]
        refs = {one: [w.node_id.remote() for w in self.groups[one].workers] for one in names}
        return sorted({node for one in names for node in self.groups[one].gather("node_id", refs[one])})

    def lcm_dp_size(self) -> int:
        """The smallest number of rows that every group can split evenly."""
        return math.lcm(*(group.mesh.dp for group in self.groups.values()))

    def shutdown(self) -> None:
        """End all workers."""
        for group in self.groups.values():
            group.stop()

    def _stage(self, name: str, data: Mini, columns: RowValues | None, loss_weight: float) -> tuple[int, int]:
        self._calls += 1
        key = (self._calls, 0)
        self.groups[name].stage_mini(key, data.shards, columns, loss_weight)
        return key

    def _call(self, name: str, call: str, *arguments: Any) -> list[Any]:
        """Ask every worker of a group, once memory is where the call needs it; refs in worker order."""
        group = self.groups[name]
        after = self._move(self.memory.moves(name, call))
        return group.call(call, *arguments, after=after)

    def _move(self, moves: list[Move]) -> list[Any]:
        """Ask for moves; refs that the next call has to wait for. A move of one group waits for the ones before."""
        after: list[Any] = []
        leaving = [move for move in moves if not move.on_device]
        for move in leaving:
            after += self.groups[move.group].call("place", move.part, False)
        for move in moves:
            if move.on_device:
                self.groups[move.group].call("place", move.part, True, after=after)
        return after

    def _metrics(self, name: str, call: str, *arguments: Any) -> Pending[Metrics]:
        group, refs = self.groups[name], self._call(name, call, *arguments)
        return self._pending(name, lambda: reduce_metrics(group.collect(call, refs)))

    def _all(self, name: str, call: str, *arguments: Any) -> Pending[None]:
        group, refs = self.groups[name], self._call(name, call, *arguments)

        def wait() -> None:
            group.gather(call, refs)

        return self._pending(name, wait)

    def _pending(self, name: str, wait: Callable[[], T]) -> Pending[T]:
        def known() -> T:
            try:
                return wait()
            except BaseException:
                self.memory.forget(name)
                raise

        return Pending(known)
