"""A worker in this process: every mean of the loss can be staged, and nothing moves without a target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysvc.actors.staging.staging import StagingOptions
from raysvc.actors.worker.losses import LossSum
from raysvc.actors.worker.process_group import threads_of
from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
from raysvc.actors.worker.worker import Worker
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError, WorkerFailed
from raysvc.job.config import JobConfig
from raysvc.training.train_loop import model_spec

from .shards import minis_of, random_rows


class BigramWorker(Worker):
    """A table [V, V] in float64 under AdamW with weight decay and momentum."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Embedding(64, 64, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.5)

    def micro_loss(self, tensors: dict[str, Any], layout: str, loss: Any) -> LossSum:
        logits_BLV = self.model(tensors["input_ids"].long())[:, :-1]
        labels_BL, weights_BL = tensors["labels"][:, 1:].long(), tensors["loss_weights"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits_BLV.mT, labels_BL, reduction="none")
        return LossSum((losses * weights_BL).sum(), {})


def shards_of_steps(trained: bool) -> Shard:
    """One mini-batch of four rows, with targets or without."""
    rows = random_rows(4, seed=5)
    if not trained:
        rows.tokens["loss_mask"][:] = 0
    ((_, (shard,), _),) = minis_of(rows, {"batch_size": 4, "micro_batch_size": 2, "shuffle": "none"}, 1)
    return shard


def worker_of(**options: Any) -> BigramWorker:
    worker = BigramWorker(0, 1, "cpu", **options)
    worker.setup("")
    return worker


def loss_of(worker: Worker) -> float:
    worker.stage((0, 0), shards_of_steps(trained=True))
    return worker.forward_backward((0, 0))["loss"]


@pytest.mark.parametrize(("num_cores", "dp_size", "threads"), [(2, 1, 2), (8, 3, 2), (2, 2, 1), (2, 5, 1)])
def test_the_ranks_of_a_node_share_its_cores(num_cores: int, dp_size: int, threads: int) -> None:
    assert threads_of(num_cores, dp_size) == threads


@pytest.mark.parametrize(("given", "spins"), [(None, False), ("ACTIVE", True)])
def test_threads_of_a_rank_on_cpus_sleep_while_they_wait(given: str | None, spins: bool) -> None:
    """By what GNU's OpenMP says of itself when torch loads it."""
    code = "from raysvc.actors.worker.process_group import join; join('cpu', '', 0, 1)"
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE", "OMP_WAIT_POLICY": given or ""}
    if not given:
        del environment["OMP_WAIT_POLICY"]
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stderr  # fmt: skip
    (count,) = re.findall("GOMP_SPINCOUNT = '(.*)'", told)
    assert (count != "0") is spins


def test_the_constant_reduction_is_staged_and_divides_every_row() -> None:
    loss = loss_of(worker_of(reduction="constant", loss_constant=8.0))
    shard = shards_of_steps(trained=True)
    summed = loss_of(worker_of()) * shard.denominators.tokens
    assert loss == pytest.approx(summed / (8.0 * 4), rel=1e-6)


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_a_constant_that_is_missing_is_refused_when_the_worker_is_made(constant: float | None) -> None:
    with pytest.raises(ConfigError, match="loss_constant"):
        BigramWorker(0, 1, "cpu", reduction="constant", loss_constant=constant)


@pytest.mark.parametrize("call", ["train_step", "optim_step"])
def test_a_mini_batch_without_a_target_moves_no_weight(call: str) -> None:
    worker = worker_of()
    worker.stage((0, 0), shards_of_steps(trained=True))
    worker.train_step([(0, 0)])  # from here on the optimizer has momentum
    before = worker.model.weight.detach().clone()
    state = {name: value.clone() for name, value in worker.optimizer.state[worker.model.weight].items()}
    worker.stage((1, 0), shards_of_steps(trained=False))
    if call == "train_step":
        (result,) = worker.train_step([(1, 0)])
        assert (result.loss, result.grad_norm) == (0.0, 0.0)
    else:
        worker.forward_backward((1, 0))
        assert worker.optim_step()["grad_norm"] == 0.0
    assert torch.equal(worker.model.weight, before)
    after = worker.optimizer.state[worker.model.weight]
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert worker.optimizer_steps == 2, "the schedule goes on: learning rates of later steps stay"
    worker.stage((2, 0), shards_of_steps(trained=True))
    worker.train_step([(2, 0)])
    assert not torch.equal(worker.model.weight, before)


def test_a_mini_batch_without_a_target_beside_one_with_targets_is_stepped() -> None:
    worker = worker_of()
    before = worker.model.weight.detach().clone()
    for key, trained in enumerate((True, False)):
        worker.stage((0, key), shards_of_steps(trained))
        worker.forward_backward((0, key))
    worker.optim_step()
    assert not torch.equal(worker.model.weight, before)


def test_a_job_switches_parts_of_staging_and_the_mean_of_the_loss() -> None:
    trainer = {
        "loss": "constant",
        "loss_constant": 512,
        "timing": True,
        "staging": {
            "prefetch": False,
            "copy_stream": False,
            "pin_memory": False,
            "ring_mb": 1.5,
            "timing_every_steps": 4,
        },
    }
    job = JobConfig(source={"path": "rows.jsonl"}, tokenizer="tokenizer", trainer=trainer)
    entry: Any = SimpleNamespace(report={"vocab_size": 64}, entries=[SimpleNamespace(recipe={})])
    spec = model_spec(job, entry)
    assert spec.staging == StagingOptions(False, False, False, 1_500_000, timing=True, timing_every_steps=4)
    assert (spec.loss, spec.loss_constant) == ("constant", 512)
    with pytest.raises(ValueError, match="loss_constant"):
        JobConfig(source={"path": "rows.jsonl"}, tokenizer="tokenizer", trainer={"loss": "constant"})


def test_only_every_nth_step_is_measured() -> None:
    worker = worker_of(staging=StagingOptions(timing=True, timing_every_steps=2))
    for step in range(4):
        worker.stage((step, 0), shards_of_steps(trained=True))
        (result,) = worker.train_step([(step, 0)])
        assert bool(result.timing) == (step % 2 == 0)
        assert step % 2 or result.timing["forward"] > 0


def test_a_folder_of_a_model_that_this_node_lacks_is_said() -> None:
    worker = object.__new__(CausalLMWorker)
    worker.spec = ModelSpec.model_construct(model="/nowhere/model", vocab_size=8)
    with pytest.raises(ConfigError, match="there is no folder /nowhere/model on"):
        worker.load_lm()


def test_a_shard_that_cannot_be_prepared_ends_the_step_that_waits_for_it() -> None:
    shard = shards_of_steps(trained=True)
    arrays = {name: array for name, array in shard.arrays.items() if name != "labels"}
    worker = worker_of(take_timeout_s=5.0)
    with pytest.raises(KeyError, match="labels"):
        worker.stage((0, 0), replace(shard, arrays=arrays))
    with pytest.raises(WorkerFailed, match="rank 0 failed in stage: KeyError: 'labels'"):
        worker.train_step([(0, 0)])
