"""Real processes for tests of several ranks: three Ray actors that run a worker each, in worlds of one to three."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
from raysvc.collate.shard import Shard

VOCAB = 64


def tiny_spec(**changes: Any) -> ModelSpec:
    spec = ModelSpec(
        model="tiny",
        vocab_size=VOCAB,
        learning_rate=1e-2,
        weight_decay=0.0,
        max_grad_norm=None,
        loss="token_mean",
        seed=0,
    )
    return spec.model_copy(update=changes)


class DoubleWorker(CausalLMWorker):
    """The shipped worker in float64, so that a wrong weight cannot hide in rounding."""

    def load_lm(self) -> Any:
        import torch

        lm = super().load_lm()
        return lm.double() if self.spec.precision == "fp32" else lm.to(torch.float32)


class Rank:
    """One process; makes a worker, runs a function on it, forgets it."""

    def run(
        self,
        rank: int,
        world: int,
        meeting: str,
        spec_json: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Any:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if dist.is_initialized():  # not at the end of a run: another rank may still be at its last collective
            dist.destroy_process_group()
        worker = DoubleWorker(rank, world, "cpu", spec_json)
        worker.setup(f"file://{meeting}")
        return function(worker, *arguments)


class Ranks:
    """Three processes that outlive a test."""

    def __init__(self) -> None:
        import ray

        actor = ray.remote(Rank)
        self._actors = [actor.options(num_cpus=0).remote() for _ in range(3)]

    def run(
        self, spec: ModelSpec, function: Callable[..., Any], per_rank: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """`function(worker, *arguments)` in as many ranks as there are arguments."""
        with tempfile.TemporaryDirectory(prefix="raysvc-ranks-") as folder:
            return self._run(os.path.join(folder, "meet"), spec, function, per_rank)

    def _run(
        self, meeting: str, spec: ModelSpec, function: Callable[..., Any], per_rank: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        import ray

        world = len(per_rank)
        calls = [
            self._actors[rank].run.remote(
                rank, world, meeting, spec.model_dump_json(), function, per_rank[rank]
            )
            for rank in range(world)
        ]
        pending = list(calls)
        while pending:  # the first failure, at once: the other ranks would wait for it
            done, pending = ray.wait(pending, timeout=280)
            assert done, f"{len(pending)} ranks hang"
            ray.get(done)
        return list(ray.get(calls))


def gradients(worker: Any) -> dict[str, np.ndarray]:
    """Every gradient by name, whole on every rank; zeros where the loss does not reach."""
    out = {}
    for name, parameter in worker.model.named_parameters():
        grad = parameter.detach() * 0 if parameter.grad is None else parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        out[name.removeprefix("module.")] = grad.double().cpu().numpy().copy()
    return out


def gradients_of(
    worker: Any, shards: list[Shard], losses: list[Any], weights: Sequence[float] = (1.0,)
) -> list[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Gradients and metrics of each loss, over one rank's shards."""
    out = []
    for number, loss in enumerate(losses):
        worker.optimizer.zero_grad(set_to_none=True)
        total: dict[str, float] = {}
        for index, shard in enumerate(shards):
            key = (number, index)
            worker.stage(key, shard, loss_weight=weights[index % len(weights)])
            for name, value in worker.forward_backward(key, loss).items():
                total[name] = total.get(name, 0.0) + value
        out.append((gradients(worker), total))
    return out
