"""Ranks on CPUs, in two processes: how gradients are averaged, what is imported for a step; and the optimizer in this one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from raysvc.actors.model.load_model import load_lm
from raysvc.actors.worker import checkpoint, replicas
from raysvc.actors.worker.adamw import PlainAdamW

ROOT = Path(__file__).parents[2]
RANK = """
import gc, json, os, sys
from tests.actors.ranks import tiny_spec
from tests.actors.shards import minis_of, random_rows
from raysvc.actors.worker.torch_worker import CausalLMWorker

rank, folder = int(sys.argv[1]), sys.argv[2]
worker = CausalLMWorker(rank, 2, "cpu", tiny_spec().model_dump_json())
assert "torch" not in sys.modules
worker.setup("file://" + folder + "/meet")
import torch
from raysvc.actors.worker import replicas, spread
frozen, model_id = gc.get_freeze_count(), id(worker.model)
looked_at = {id(thing) for thing in gc.get_objects()}
plan = {"batch_size": 4, "micro_batch_size": 1, "shuffle": "none"}
((_, shards, _),) = minis_of(random_rows(4, seed=5), plan, 2)
worker.stage((0, 0), shards[rank])
worker.train_step([(0, 0)])
worker.save_checkpoint(folder)
worker.save_hf_model(folder)
names = sorted(name for name in ("torch._dynamo", "transformers", "datasets", "pandas") if name in sys.modules)

module = torch.nn.ParameterList([torch.full((2,), float(rank + 1)) for _ in range(5)])
module[3].requires_grad_(False)
weights = spread._take_weights(module)
spread.give_out(module, weights if rank == 0 else [], "cpu")
module[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
if rank == 1:
    module[1].grad = torch.tensor([4.0, 0.0])
module[4].grad = torch.tensor([8.0, 8.0])
replicas.BUCKET_BYTES = 16  # two weights
replicas.average_gradients(module)
norm = torch.nn.BatchNorm1d(1)
norm.register_buffer("own", torch.full((1,), float(rank)), persistent=False)
norm(torch.full((2, 1), float(rank)))
replicas.share_buffers(norm)
buffers = {name: buffer.tolist() for name, buffer in norm.named_buffers()}
torch.distributed.destroy_process_group()
grads = [None if weight.grad is None else weight.grad.tolist() for weight in module]
print(json.dumps({"names": names, "frozen": frozen, "sees_model": model_id in looked_at, "sees_torch": id(vars(torch)) in looked_at, "weights": [weight.tolist() for weight in module], "grads": grads, "buffers": buffers}), flush=True)
os._exit(0)  # a thread of gloo may still hold the last tensor, and aborts a Python that is ending
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks says of itself."""
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    folder = str(tmp_path_factory.mktemp("replicas"))
    running = [
        subprocess.Popen([*command, str(rank), folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in told]


def test_a_rank_steps_saves_and_exports_without_the_compiler_of_torch(ranks: list[dict[str, Any]]) -> None:
    assert [rank["names"] for rank in ranks] == [[], []]


def test_the_collector_looks_through_a_model_and_not_through_torch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["frozen"] > 100_000
        assert (rank["sees_model"], rank["sees_torch"]) == (True, False)


def test_all_ranks_start_with_the_weights_of_the_first(ranks: list[dict[str, Any]]) -> None:
    assert [rank["weights"] for rank in ranks] == [[[1.0, 1.0]] * 5] * 2


def test_a_gradient_is_the_mean_over_the_ranks_and_one_that_nobody_has_stays_away(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["grads"] for rank in ranks] == [[[1.5, 3.0], [2.0, 0.0], None, None, [8.0, 8.0]]] * 2


def test_buffers_that_a_checkpoint_holds_are_those_of_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    kept = {"running_mean": [0.0], "running_var": pytest.approx([0.9]), "num_batches_tracked": 1}
    assert [rank["buffers"] for rank in ranks] == [{**kept, "own": [0.0]}, {**kept, "own": [1.0]}]


def test_weights_share_buckets_by_dtype_and_bytes_in_time_that_grows_with_their_number() -> None:
    empty, small, half = torch.zeros(0), torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    large = torch.zeros(replicas.BUCKET_BYTES // 4)
    weights = [empty, small, half, half, small, large, empty, small]
    found = replicas._buckets(weights)
    assert [len(bucket) for bucket in found] == [2, 2, 1, 2, 1]
    assert [id(weight) for bucket in found for weight in bucket] == [id(weight) for weight in weights]
    began_s = time.process_time()
    assert [len(bucket) for bucket in replicas._buckets([small] * 20_000)] == [20_000]
    assert time.process_time() - began_s < 2  # 0.01; where each weight sums up those before it, 15


def stepped(kind: Any, steps: int) -> tuple[Any, Any]:
    """`tiny` after some steps with random gradients."""
    torch.manual_seed(0)
    model = load_lm("tiny", 64, critic=False, vision=None)
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        optimizer.zero_grad()


def test_the_optimizer_is_that_of_torch_bit_by_bit_and_each_loads_the_others_state() -> None:
    expected, of_torch = stepped(torch.optim.AdamW, 3)
    model, plain = stepped(PlainAdamW, 3)
    states = deepcopy([plain.state_dict(), of_torch.state_dict()])  # loading copies no tensor
    of_torch.load_state_dict(states[0])
    plain.load_state_dict(states[1])
    torch.manual_seed(1)
    step(expected, of_torch, 2)
    torch.manual_seed(1)
    step(model, plain, 2)
    assert all(torch.equal(*pair) for pair in zip(expected.parameters(), model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def on_disk(folder: Path, *of: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved, read by `safetensors` itself: weights, and the optimizer's state by `<field>:<weight>`."""
    from safetensors.torch import load_file

    checkpoint.save(folder, 0, *of, steps=0)
    names = ("model-00000.safetensors", "optimizer-00000.safetensors")
    model, optimizer = (load_file(folder / name) for name in names)
    return model, optimizer


def test_what_is_saved_is_what_torch_says_of_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model, optimizer = stepped(PlainAdamW, 2)
    weights, moments = on_disk(tmp_path, model, optimizer)
    expected = get_model_state_dict(model)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    of_torch = get_optimizer_state_dict(model, optimizer)["state"]
    flat = {f"{field}:{name}": value for name, of in of_torch.items() for field, value in of.items()}
    assert moments.keys() == flat.keys() != set()
    assert all(torch.equal(moments[key], value) for key, value in flat.items())


@pytest.mark.parametrize("kind", [PlainAdamW, torch.optim.AdamW])
def test_a_checkpoint_before_the_first_step_changes_no_later_one(
    kind: type[torch.optim.AdamW], tmp_path: Path
) -> None:
    """torch makes the state of an optimizer by a step with gradients of zero, which counts as its first."""
    never_saved, saving, loading = (stepped(kind, 0) for _ in range(3))
    checkpoint.save(tmp_path, 0, *saving, steps=0)
    assert checkpoint.load(tmp_path, 0, *loading) == 0
    for model, optimizer in (never_saved, saving, loading):
        torch.manual_seed(1)
        step(model, optimizer, 2)
        pairs = zip(never_saved[0].parameters(), model.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


class Halving(PlainAdamW):
    """Says its state in its own way."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        halved = {n: {**one, "exp_avg": one["exp_avg"] / 2} for n, one in found["state"].items()}
        return {**found, "state": halved}


def test_what_is_saved_of_an_optimizer_with_its_own_state_is_what_it_says(tmp_path: Path) -> None:
    model, optimizer = stepped(Halving, 2)
    _, saved = on_disk(tmp_path, model, optimizer)
    for name, weight in model.named_parameters():
        assert torch.equal(saved[f"exp_avg:{name}"], optimizer.state[weight]["exp_avg"] / 2)


def test_names_of_weights_that_are_saved_or_exported_do_not_tell_what_is_compiled(tmp_path: Path) -> None:
    model, optimizer = stepped(PlainAdamW, 2)
    names = list(model.state_dict())
    model.model.layers[0] = torch.compile(model.model.layers[0])  # compiled when it is called
    weights, moments = on_disk(tmp_path, model, optimizer)
    assert sorted(weights) == sorted(checkpoint.full_weights(model)) == sorted(names)
    assert {key.partition(":")[2] for key in moments} <= set(names)


def test_a_checkpoint_goes_on_where_a_weight_never_had_a_gradient(tmp_path: Path) -> None:
    models = []
    for steps in (2, 0):
        torch.manual_seed(0)
        model = load_lm("tiny", 64, critic=False, vision=None)
        optimizer = PlainAdamW(model.parameters(), lr=1e-2)
        without, *_ = model.parameters()
        without.requires_grad_(False)
        for _ in range(steps):
            sum(weight.square().sum() for weight in model.parameters() if weight.requires_grad).backward()
            optimizer.step()
            optimizer.zero_grad()
        without.requires_grad_(True)
        models.append((model, optimizer))
    checkpoint.save(tmp_path, 0, *models[0], steps=2)
    assert checkpoint.load(tmp_path, 0, *models[1]) == 2
    for model, optimizer in models:
        torch.manual_seed(1)
        step(model, optimizer, 2)
    ours, theirs = (list(model.parameters()) for model, _ in models)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
