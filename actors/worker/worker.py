"""A data-parallel worker: stages shards, runs micro-batches, steps the optimizer.

`Worker` is plain and knows no model. A subclass gives `build` (model and optimizer) and `micro_loss`
(the loss of one micro-batch, weighted), and `micro_forward` where its outputs are asked for; the loop over
micro-batches, weights from the denominators, gradient accumulation, data-parallel reduction and staging are here.

Axes: B lines of a shard or micro-batch, L its width.

Always true:
- the gradient of an optimizer step is that of the whole mini-batch, whatever dp_size and micro-batches;
- a step whose mini-batches have no target moves no weight;
- every rank runs the same number of micro-batches, so collectives match;
- `stage` runs beside everything else (another concurrency group), which runs in turn;
- the learning rate is a function of the number of optimizer steps.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.actors.staging.staging import Key, StagedShard, Staging, StagingOptions, StagingStats
from raysvc.actors.worker.forward import as_used, eval_sums, forward_rows, row_losses, without_labels
from raysvc.actors.worker.losses import ROW_COUNT, ROW_LOSS, Loss, LossSum
from raysvc.actors.worker.lr_schedule import LearningRate
from raysvc.actors.worker.process_group import join, own_address
from raysvc.actors.worker.results import Metrics, MiniResult, extreme_of
from raysvc.actors.worker.row_losses import RowLoss
from raysvc.actors.worker.timer import Timer
from raysvc.chat.garbage import no_collection
from raysvc.collate.loss_weights import sequence_weights, token_weights
from raysvc.collate.row_values import RowValues, with_columns
from raysvc.collate.shard import Shard, Wire
from raysvc.errors import ConfigError
from raysvc.job.config import Reduction

if TYPE_CHECKING:
    import torch

__all__ = ["MiniResult", "Worker"]
log = logging.getLogger(__name__)


class Worker:
    """One data-parallel rank.

    Args:
        rank: 0 ... dp_size - 1.
        dp_size: number of ranks.
        device: torch device string.
        reduction: which mean of the token losses is the loss.
        take_timeout_s: how long a step may wait for its shard.
        staging: how shards are staged; `timing` there measures every part of a step.
        loss_constant: tokens that the reduction `constant` divides every row by.

    Raises:
        ConfigError: `loss_constant` is missing for `constant`, or not positive.
    """

    def __init__(
        self,
        rank: int,
        dp_size: int,
        device: str,
        reduction: Reduction = "token_mean",
        take_timeout_s: float = 600.0,
        staging: StagingOptions | None = None,
        loss_constant: float | None = None,
    ) -> None:
        if reduction == "constant" and (loss_constant is None or loss_constant <= 0):
            remedy = "give the tokens of the longest answer allowed"
            raise ConfigError(
                "loss_constant", f"is {loss_constant}, reduction 'constant' divides by it", remedy
            )
        self.rank = rank
        self.dp_size = dp_size
        self.device = device
        self._reduction: Reduction = reduction
        self._loss_constant = loss_constant
        self._take_timeout_s = take_timeout_s
        self._options = staging or StagingOptions()
        self._staging = Staging(rank, device, self._options)
        self._timer = Timer(self._synchronize if self._options.timing else None)
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer | None = None
        self.max_grad_norm: float | None = None
        self.learning_rate: LearningRate | None = None  # None: what the optimizer has, until `set_lr`
        self.optimizer_steps = 0
        self._targets: int | None = None  # in the gradient so far; None: no mini-batch was added to it
        self._token_bytes: npt.NDArray[np.int32] | None = None  # for bits per byte
        self._ended = 0.0  # when compute ended last, 0.0 before the first step

    def build(self) -> None:
        """Make `self.model` and `self.optimizer`; called once, after the process group is up.

        Raises:
            TypeError: a subclass does not define it.
        """
        raise TypeError(f"{type(self).__name__} must define build()")

    def micro_loss(
        self, tensors: dict[str, torch.Tensor], layout: str, loss: Loss | RowLoss | None
    ) -> LossSum:
        """The sum over a micro-batch of `tensors["loss_weights"]` times the loss of each target, and metrics.

        Args:
            tensors: of the micro-batch, on the device.
            layout: of the tensors.
            loss: what the caller asked for; None: the worker's own.

        Raises:
            TypeError: a subclass does not define it.
        """
        raise TypeError(f"{type(self).__name__} must define micro_loss()")

    def micro_forward(self, tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
        """Outputs [B, L] by name, each number at its token.

        Raises:
            TypeError: a subclass does not define it.
        """
        raise TypeError(f"{type(self).__name__} must define micro_forward()")

    def address(self) -> str:
        """An address on this worker's node where the ranks can meet (rank 0 is asked)."""
        return own_address()

    def setup(self, init_method: str) -> None:
        """Join the process group and build the model."""
        first = "torch" not in sys.modules
        with no_collection():  # it imports torch
            join(self.device, init_method, self.rank, self.dp_size)
            if first:
                gc.freeze()  # no model is in this process yet: the collector need not look through what is there
        self.build()

    def stage(
        self,
        key: Key,
        shard: Shard | Wire | list[Any],
        columns: RowValues | None = None,
        loss_weight: float = 1.0,
    ) -> int:
        """Take in one shard (Ray has already brought it to this node); returns its bytes.

        Args:
            key: what the call that trains it will name.
            shard: with `timing` a list of one ref, opened when it is taken.
            columns: per-token columns of the mini-batch's rows, laid out like the shard's own.
            loss_weight: factor of the loss.
        """
        return self._staging.put(key, shard, prepare=lambda s: self._prepared(s, columns, loss_weight))

    def clear(self) -> None:
        """Forget staged shards."""
        self._staging.clear()

    def train_step(self, keys: list[Key], learning_rate: float | None = None) -> list[MiniResult]:
        """One optimizer step per key, in order; `learning_rate` only where there is no schedule."""
        return [self._train_mini(key, learning_rate) for key in keys]

    def forward(self, key: Key) -> RowValues:
        """Outputs of the shard's real rows, in its order; no gradient."""
        staged, _ = self._take(key)
        with self._timer.span("forward"):
            values = forward_rows(self.model, staged.shard, self.micro_forward)
        self._staging.release()
        return without_labels(values)

    def forward_backward(self, key: Key, loss: Loss | RowLoss | None = None) -> Metrics:
        """Add the gradient of a mini-batch; this rank's shares of the loss and its metrics."""
        staged, _ = self._take(key)
        metrics, _ = self._accumulate(staged.shard, loss)
        self._staging.release()
        return metrics

    def evaluate(self, key: Key) -> RowValues:
        """Sums per real row of a shard, as `outputs.eval_sums` says."""
        with self._timer.span("eval"):
            staged, _ = self._staging.take(key, self._take_timeout_s)
            values = forward_rows(self.model, staged.shard, self.micro_forward)
            self._staging.release()
        self._ended = time.perf_counter()
        return eval_sums(values, self._token_bytes)

    def evaluate_loss(self, key: Key) -> Metrics:
        """This rank's shares of the loss that it trains with, and of its metrics; no gradient."""
        with self._timer.span("eval"):
            staged, _ = self._staging.take(key, self._take_timeout_s)
            with as_used(self.model):
                metrics, _ = self._losses(staged.shard, None, backward=False)
            self._staging.release()
        self._ended = time.perf_counter()
        return metrics

    def set_token_bytes(self, token_bytes: npt.NDArray[np.integer[Any]]) -> None:
        """Bytes of text of every token id [V], 0 for one that is no text; from then on evals count bytes."""
        self._token_bytes = np.asarray(token_bytes, np.int32)

    def call_after(self, name: str, num_after: int, *after_and_arguments: Any) -> Any:
        """The call `name`, once the first `num_after` values are there (Ray waits for them); the rest are its own."""
        return getattr(self, name)(*after_and_arguments[num_after:])

    def optim_step(self) -> Metrics:
        """Clip, step, forget the gradient; `grad_norm` before clipping and `lr`, equal on all ranks.

        Mini-batches without any target move nothing (weight decay and momentum would); the step counts all the same.
        """
        optimizer = self._optimizer()
        if self.learning_rate is not None:
            self.set_lr(self.learning_rate.at(self.optimizer_steps))
        empty, self._targets = self._targets == 0, None
        with self._timer.span("clip"):
            grad_norm = 0.0 if empty else self._clip()
        with self._timer.span("optimizer"):
            if not empty:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        lr = float(optimizer.param_groups[0]["lr"])
        return {"grad_norm": grad_norm, "lr": lr, "optimizer_step": float(self.optimizer_steps)}

    def set_schedule(self, learning_rate: LearningRate) -> None:
        """Rates by optimizer step from now on."""
        self.learning_rate = learning_rate

    def set_lr(self, learning_rate: float) -> None:
        """The rate of every parameter group; where there is a schedule, that is what counts."""
        for group in self._optimizer().param_groups:
            group["lr"] = learning_rate

    def timing(self) -> Metrics:
        """Seconds by part since it was asked for last; empty unless measured."""
        return self._timer.take()

    def staging_stats(self) -> StagingStats:
        """Counters of the ring."""
        return self._staging.stats()

    def node_id(self) -> str:
        """The Ray node this worker is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def pid(self) -> int:
        """Process id, so that a test can kill exactly this worker."""
        import os

        return os.getpid()

    def _train_mini(self, key: Key, learning_rate: float | None) -> MiniResult:
        staged, wait_s = self._take(key)
        begin = time.perf_counter()
        idle_s = begin - self._ended if self._ended else wait_s
        if learning_rate is not None:
            self.set_lr(learning_rate)
        metrics, rows = self._accumulate(staged.shard, None)
        self._staging.release()
        stepped = self.optim_step()
        self._ended = time.perf_counter()
        timing = self.timing()
        if timing:
            log.info("timing rank=%d step=%d mini=%d %s", self.rank, *key, _in_ms(timing))
        return MiniResult(
            loss=metrics.pop("loss"),
            grad_norm=stepped["grad_norm"],
            wait_s=wait_s,
            idle_s=idle_s,
            compute_s=self._ended - begin,
            copy_s=staged.copy_s,
            nbytes=staged.nbytes,
            metrics={**metrics, "lr": stepped["lr"]},
            timing=timing,
            rows=rows,
        )

    def _take(self, key: Key) -> tuple[StagedShard, float]:
        self._timer.on = self._options.timed(key)
        staged, wait_s = self._staging.take(key, self._take_timeout_s)
        for part, seconds in (
            ("wait", wait_s),
            ("fetch", staged.fetch_s),
            ("copy", staged.copy_s),
            ("h2d", staged.h2d_s),
        ):
            self._timer.add(part, seconds)
        return staged, wait_s

    def _prepared(self, shard: Shard, columns: RowValues | None, loss_weight: float) -> Shard:
        """Adds `columns` and the weight of every target; both in the thread that stages."""
        shard = shard if columns is None else with_columns(shard, columns)
        weights = token_weights(
            shard.arrays,
            shard.denominators,
            self._reduction,
            dp_size=self.dp_size,
            constant=self._loss_constant,
            dtype=np.float32 if loss_weight == 1.0 else np.float64,
        )
        if loss_weight != 1.0:
            weights = (weights * loss_weight).astype(np.float32)
        real = (np.asarray(shard.arrays["row_group"]) >= 0).astype(np.float32)
        by_group = real * np.float32(loss_weight * self.dp_size / max(shard.denominators.groups, 1))
        ours = {"loss_weights": weights, "group_weights": by_group}
        if "advantages" in shard.arrays:  # a loss of sequences may follow
            by_row = sequence_weights(shard.arrays, shard.denominators, dp_size=self.dp_size)
            ours["sequence_weights"] = (loss_weight * by_row).astype(np.float32)
        return replace(shard, arrays={**shard.arrays, **ours})

    def _accumulate(self, shard: Shard, loss: Loss | RowLoss | None) -> tuple[Metrics, RowValues | None]:
        """Backward over all micro-batches, reduced over ranks in the last one; this rank's shares, and sums by row."""
        self._targets = (self._targets or 0) + shard.denominators.tokens
        return self._losses(shard, loss, backward=True)

    def _losses(
        self, shard: Shard, loss: Loss | RowLoss | None, *, backward: bool
    ) -> tuple[Metrics, RowValues | None]:
        """This rank's shares of the loss of all micro-batches and of its metrics, and sums by row."""
        from raysvc.actors.model.token_model import merge_metrics

        total: dict[str, torch.Tensor] = {}
        by_row: dict[str, list[torch.Tensor]] = {ROW_LOSS: [], ROW_COUNT: []}  # [rows] of each micro-batch
        last = len(shard.micro_batches) - 1
        for index in range(last + 1):
            with nullcontext() if index == last or not backward else self._no_sync():
                with self._timer.span("forward"):
                    part = self.micro_loss(shard.micro(index), shard.layout, loss)
                if backward:
                    with self._timer.span("backward"):
                        part.total.backward()
            shares = {name: value for name, value in part.metrics.items() if name not in by_row}
            for name in by_row.keys() & part.metrics.keys():
                by_row[name].append(part.metrics[name])
            total = merge_metrics(total, {"loss": part.total.detach(), **shares})
        if backward:
            with self._timer.span("backward"):
                self._reduce()
        metrics = {name: self._share(name, float(value)) for name, value in total.items()}
        losses, counts = (_together(parts) if len(parts) == last + 1 else None for parts in by_row.values())
        return metrics, None if losses is None else row_losses(shard, losses, counts)

    def _share(self, name: str, value: float) -> float:
        """The weights hold dp_size, because the reduction averages over ranks; shares do not."""
        return value if extreme_of(name) else value / self.dp_size

    def _no_sync(self) -> AbstractContextManager[None]:
        """Within it a backward pass reduces nothing over ranks."""
        context: Any = getattr(self.model, "no_sync", nullcontext)
        return context()  # type: ignore[no-any-return]

    def _reduce(self) -> None:
        """Average the gradient over the ranks, where the last backward pass has not."""

    def _clip(self) -> float:
        """Clip by the norm of the whole, reduced gradient; the norm before."""
        import torch

        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise TypeError(
                f"{type(self).__name__} of rank {self.rank} has no optimizer: it only runs forward"
            )
        return self.optimizer

    def _synchronize(self) -> None:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()


def _together(parts: list[torch.Tensor]) -> npt.NDArray[np.float32]:
    import torch

    return np.asarray(torch.cat(parts).cpu().numpy())


def _in_ms(timing: Metrics) -> str:
    return " ".join(f"{part}_ms={seconds * 1e3:.2f}" for part, seconds in timing.items())
