"""The layer between an algorithm and pools of workers.

An algorithm knows groups by name and mini-batches; workers know micro-batches; neither knows where the other is.
`WorkerDispatch` stages shards, asks workers, brings memory to where a call needs it, and gives back numbers.

Axes: R dp ranks, N rows of a mini-batch.

Always true:
- the driver passes refs on and opens none of them; what it sends does not depend on the bytes of a batch;
- results are in row order without dummies; where they are per rank, in dp order;
- every call that asks workers for something has a twin `*_async` that returns at once; calls of one group run in the order they were asked for, and so
  do those of colocated groups; others overlap;
- a rank that dies or raises becomes one WorkerFailed that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ray.util.placement_group import PlacementGroup, remove_placement_group

from raysvc.actors.dispatch.future import Pending, waiting
from raysvc.actors.dispatch.residency import Move, Residency
from raysvc.actors.dispatch.worker_group import RunningStep, WorkerGroup
from raysvc.actors.dispatch.worker_places import start_groups, wait_for_places
from raysvc.actors.placement import GroupNeed
from raysvc.actors.worker.losses import Loss
from raysvc.actors.worker.results import Metrics, reduce_metrics
from raysvc.actors.worker.torch_worker import ModelSpec
from raysvc.collate.row_values import RowValues, in_order
from raysvc.errors import ConfigError, RaysvcError

if TYPE_CHECKING:
    from raysvc.client.batch_client import MiniBatch

__all__ = ["Pending", "RunningStep", "WorkerDispatch", "WorkerGroup"]
T = TypeVar("T")


class WorkerDispatch:
    """Named groups of workers.

    Args:
        groups: name -> its workers, started.
        colocated: sets of names that share devices, so that one of each set has memory there at a time.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup], colocated: Iterable[Collection[str]] = ()) -> None:
        self.groups = dict(groups)
        self.memory = Residency(colocated)
        self._reserved: PlacementGroup | None = None  # where `start` placed the workers
        self._calls = 0  # each call stages shards of its own, under keys that no trainer's steps have

    @classmethod
    def start(
        cls,
        specs: Mapping[str, ModelSpec],
        needs: Mapping[str, GroupNeed],
        colocated: Iterable[Collection[str]] = (),
        device: str = "cuda",
        *,
        wait_for_nodes: bool = False,
    ) -> WorkerDispatch:
        """Start the workers of all groups, colocated ones on shared devices; then call `init_model` for each.

        Args:
            specs: of the model of each group.
            needs: of the workers of each group.
            colocated: sets of groups that share devices.
            device: of every worker.
            wait_for_nodes: nodes come on demand: what the cluster cannot hold now is waited for, not refused.

        Raises:
            ConfigError: the cluster cannot hold them; the error says what is missing.
        """
        colocated = [frozenset(names) for names in colocated]
        placed = start_groups(specs, needs, colocated, device, may_grow=wait_for_nodes)
        groups = {
            name: WorkerGroup(workers, staging=specs[name].staging)
            for name, workers in placed.workers.items()
        }
        dispatch = cls(groups, colocated)
        dispatch._reserved = placed.reserved
        return dispatch

    def init_model_async(self, name: str) -> Pending[None]:
        """Let the ranks meet and build the model; colocated groups make room first."""
        group, (after, _) = self.groups[name], self._move(self.memory.before_init(name))
        refs = group.start_setup(after)
        self.memory.built(name)

        def wait() -> None:
            if self._reserved is not None:
                wait_for_places(self._reserved)
            group.wait_for_setup(refs)

        return self._pending([name], wait)

    def forward_async(self, name: str, data: MiniBatch) -> Pending[RowValues]:
        """Outputs of a mini-batch's rows (`logprobs`, `entropy`, `values`), in the order of `data.info.row_ids`."""
        return self._row_values(name, "forward", data)

    def forward_backward_async(
        self,
        name: str,
        data: MiniBatch,
        loss: Loss | None = None,
        loss_weight: float = 1.0,
        columns: RowValues | None = None,
    ) -> Pending[Metrics]:
        """Add the gradient of a mini-batch; its loss and metrics over all ranks (`results.reduce_metrics`).

        Args:
            name: of the group.
            data: one mini-batch; the shards of the role `name`, or its own where it has no such role.
            loss: None: the worker's own.
            loss_weight: factor of the loss, for mini-batches that are added up before a step.
            columns: per-token columns of its rows (advantages, old log-probabilities, ...), in any row order.
        """
        key = self._stage(name, data, columns, loss_weight)
        return self._metrics(name, "forward_backward", key, loss)

    def optim_step_async(self, name: str) -> Pending[Metrics]:
        """Clip, step; `grad_norm`, `lr`, `optimizer_step`."""
        return self._metrics(name, "optim_step")

    def evaluate_async(self, name: str, data: MiniBatch) -> Pending[RowValues]:
        """Starts an evaluation. For each row it gives `nll` in nats, `targets`, and `bytes` where the workers know
        the tokens' bytes.

        Ask for the next mini-batch before waiting for this one, and its copy is hidden.
        """
        return self._row_values(name, "evaluate", data)

    def evaluate_loss_async(self, name: str, data: MiniBatch, loss_weight: float = 1.0) -> Pending[Metrics]:
        """Starts an evaluation by the loss that the workers train with: as `forward_backward`, without a gradient."""
        return self._metrics(name, "evaluate_loss", self._stage(name, data, None, loss_weight))

    def set_lr_async(self, name: str, learning_rate: float) -> Pending[None]:
        """The rate of the next optimizer steps."""
        return self._all(name, "set_lr", learning_rate)

    def save_checkpoint_async(self, name: str, folder: str) -> Pending[None]:
        """Every rank writes its part into an existing folder that all nodes see."""
        return self._all(name, "save_checkpoint", folder)

    def load_checkpoint_async(self, name: str, folder: str) -> Pending[None]:
        """Every rank reads; dp_size may differ from the one that saved."""
        return self._all(name, "load_checkpoint", folder)

    def save_hf_model_async(self, name: str, folder: str) -> Pending[None]:
        """Write the model as `transformers` reads it."""
        return self._all(name, "save_hf_model", folder)

    def sync_weights_async(self, source: str, target: str) -> Pending[None]:
        """Give the weights of one group to another, through the object store; the driver sees none of them."""
        exported = self._call(source, "export_weights")
        refs = self._call(target, "import_weights", exported[0])  # rank 0 has all of them

        def wait() -> None:
            try:
                self.groups[target].gather("import_weights", refs)
            except RaysvcError:
                self.groups[source].gather("export_weights", exported)  # raises, if the fault was here
                raise

        return self._pending([source, target], wait)

    def node_ids_async(self, name: str | None = None) -> Pending[list[str]]:
        """Nodes that workers of a group (None: of all) are on, sorted."""
        groups = list(self.groups.values()) if name is None else [self.groups[name]]
        refs = [group.call("node_id") for group in groups]

        def wait() -> list[str]:
            answers = [group.gather("node_id", own) for group, own in zip(groups, refs, strict=True)]
            return sorted({node for nodes in answers for node in nodes})

        return Pending(wait)

    init_model = waiting(init_model_async)
    forward = waiting(forward_async)
    forward_backward = waiting(forward_backward_async)
    optim_step = waiting(optim_step_async)
    evaluate = waiting(evaluate_async)
    evaluate_loss = waiting(evaluate_loss_async)
    set_lr = waiting(set_lr_async)
    save_checkpoint = waiting(save_checkpoint_async)
    load_checkpoint = waiting(load_checkpoint_async)
    save_hf_model = waiting(save_hf_model_async)
    sync_weights = waiting(sync_weights_async)
    node_ids = waiting(node_ids_async)

    def shutdown(self) -> None:
        """End all workers."""
        for group in self.groups.values():
            group.stop()
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None

    def _stage(
        self, name: str, data: MiniBatch, columns: RowValues | None, loss_weight: float
    ) -> tuple[int, int]:
        """Hand the group its shards: those of the role of its name, or the mini-batch's own."""
        group, shards = self.groups[name], data.by_role.get(name, data.shards)
        if len(shards) != group.mesh.dp:
            cause = f"the mini-batch has {len(shards)} shards, group {name!r} has {group.mesh.dp} dp ranks"
            raise ConfigError("roles", cause, f"attach with roles={{{name!r}: {group.mesh.dp}, ...}}")
        self._calls += 1
        key = (-self._calls, 0)
        group.stage_mini(key, shards, columns, loss_weight)
        return key

    def _call(self, name: str, call: str, *arguments: Any) -> list[Any]:
        """Ask every worker of a group, once memory is where the call needs it; refs in worker order."""
        left, came = self._move(self.memory.moves(name, call))
        return self.groups[name].call(call, *arguments, after=[*left, *came])

    def _move(self, moves: list[Move]) -> tuple[list[Any], list[Any]]:
        """Ask for moves: refs of those to host memory, and of those to the device, which wait for the first.

        The driver waits for none of them; a call that waits for their refs fails with them.
        """
        left = [
            self.groups[move.group].call("place", move.part, False) for move in moves if not move.on_device
        ]
        after = [ref for refs in left for ref in refs]
        came = [
            self.groups[move.group].call("place", move.part, True, after=after)
            for move in moves
            if move.on_device
        ]
        return after, [ref for refs in came for ref in refs]

    def _row_values(self, name: str, call: str, data: MiniBatch) -> Pending[RowValues]:
        group, key = self.groups[name], self._stage(name, data, None, 1.0)
        refs = self._call(name, call, key)

        def wait() -> RowValues:
            assert data.info is not None, "a mini-batch that has not arrived has no row order"
            return in_order(group.collect(call, refs), data.info.row_ids)

        return self._pending([name], wait)

    def _metrics(self, name: str, call: str, *arguments: Any) -> Pending[Metrics]:
        group, refs = self.groups[name], self._call(name, call, *arguments)
        return self._pending([name], lambda: reduce_metrics(group.collect(call, refs)))

    def _all(self, name: str, call: str, *arguments: Any) -> Pending[None]:
        group, refs = self.groups[name], self._call(name, call, *arguments)

        def wait() -> None:
            group.gather(call, refs)

        return self._pending([name], wait)

    def _pending(self, names: Sequence[str], wait: Callable[[], T]) -> Pending[T]:
        """An answer of these groups; when it fails, nothing is assumed of where their memory is."""

        def known() -> T:
            try:
                return wait()
            except BaseException:
                for name in names:
                    self.memory.forget(name)
                raise

        return Pending(known)
