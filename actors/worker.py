"""A data-parallel worker: stages shards, runs micro-batches, steps the optimizer.

`Worker` is plain and knows no model. A subclass gives `build` (model and optimizer) and
`micro_loss` (the weighted sum of the token losses of one micro-batch); the loop over micro-batches,
weights from the denominators, gradient accumulation, data-parallel reduction and staging are here.

Axes: B rows of a micro-batch, L its width.

Always true:
- the gradient of an optimizer step is that of the whole mini-batch, whatever dp_size and micro-batches;
- every rank runs the same number of micro-batches, so collectives match;
- `stage` runs beside `train_step` (another concurrency group); everything else runs in turn.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raysvc.actors.staging import Key, Staging
from raysvc.collate.loss import Reduction, token_weights
from raysvc.collate.shard import Shard

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MiniResult:
    """What one rank reports of one optimizer step.

    Attributes:
        loss: this rank's share; the sum over ranks is the loss of the mini-batch.
        grad_norm: before clipping, of the reduced gradient (equal on all ranks).
        wait_s: waited for the shard after the step was asked for.
        idle_s: nothing was computed since the optimizer step before; holds `wait_s`.
        compute_s: forward, backward and optimizer.
        copy_s: copying the shard to the device, beside other work.
        nbytes: bytes of the shard.
    """

    loss: float
    grad_norm: float
    wait_s: float
    idle_s: float
    compute_s: float
    copy_s: float
    nbytes: int


class Worker:
    """One data-parallel rank.

    Args:
        rank: 0 ... dp_size - 1.
        dp_size: number of ranks.
        device: torch device string.
        reduction: which mean of the token losses is the loss.
        take_timeout_s: how long a step may wait for its shard.
    """

    def __init__(
        self,
        rank: int,
        dp_size: int,
        device: str,
        reduction: Reduction = "token_mean",
        take_timeout_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.dp_size = dp_size
        self.device = device
        self._reduction: Reduction = reduction
        self._take_timeout_s = take_timeout_s
        self._staging = Staging(rank, device)
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer
        self.max_grad_norm: float | None = None
        self._ended = 0.0  # when the last optimizer step ended, 0.0 before the first

    def build(self) -> None:
        """Make `self.model` and `self.optimizer`; called once, after the process group is up."""
        raise TypeError(f"{type(self).__name__} must define build()")

    def micro_loss(self, tensors: dict[str, torch.Tensor], layout: str) -> torch.Tensor:
        """The sum over a micro-batch of `tensors["loss_weights"]` times the loss of each target: a scalar."""
        raise TypeError(f"{type(self).__name__} must define micro_loss()")

    def address(self) -> str:
        """An address on this worker's node where the ranks can meet (rank 0 is asked)."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def setup(self, init_method: str) -> None:
        """Join the process group and build the model."""
        import torch
        import torch.distributed as dist

        if self.device == "cpu":
            torch.set_num_threads(1)
        if self.dp_size > 1:
            backend = "nccl" if self.device.startswith("cuda") else "gloo"
            dist.init_process_group(backend, init_method, rank=self.rank, world_size=self.dp_size)
        self.build()

    def stage(self, key: Key, shard: Shard) -> int:
        """Take in one shard (Ray has already brought it to this node); returns its bytes."""
        weights = token_weights(shard.arrays, shard.denominators, self._reduction, dp_size=self.dp_size)
        return self._staging.put(key, replace(shard, arrays={**shard.arrays, "loss_weights": weights}))

    def clear(self) -> None:
        """Forget staged shards."""
        self._staging.clear()

    def train_step(self, keys: list[Key], learning_rate: float) -> list[MiniResult]:
        """One optimizer step per key, in order."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return [self._train_mini(key) for key in keys]

    def _train_mini(self, key: Key) -> MiniResult:
        staged, wait_s = self._staging.take(key, self._take_timeout_s)
        begin = time.perf_counter()
        idle_s = begin - self._ended if self._ended else wait_s
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(staged.shard)
        grad_norm = self._clip()
        self.optimizer.step()
        self._ended = time.perf_counter()
        compute_s = self._ended - begin
        return MiniResult(loss, grad_norm, wait_s, idle_s, compute_s, staged.copy_s, staged.shard.nbytes)

    def _accumulate(self, shard: Shard) -> float:
        """Backward over all micro-batches; DDP reduces in the last one. Returns this rank's share of the loss."""
        total = 0.0
        last = len(shard.micro_batches) - 1
        for index in range(last + 1):
            with nullcontext() if index == last else self._no_sync():
                loss = self.micro_loss(shard.micro(index), shard.layout)
                loss.backward()
            total += float(loss.detach())
        return total / self.dp_size  # the weights hold dp_size, because DDP averages

    def _no_sync(self) -> AbstractContextManager[None]:
        context: Any = getattr(self.model, "no_sync", nullcontext)
        return context()  # type: ignore[no-any-return]

    def _clip(self) -> float:
        import torch

        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def pid(self) -> int:
        """Process id, so that a test can kill exactly this worker."""
        import os

        return os.getpid()
