"""Saves checkpoints in processes that are killed on the way: `python saving.py FOLDER`; prints what is there after each.

Every life loads the newest checkpoint, trains one step, and saves; each is killed with SIGKILL at another point.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from raysvc.actors.worker import checkpoint
from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
from raysvc.training.run_folder import RunFolder

SPEC = ModelSpec(
    model="tiny", vocab_size=64, learning_rate=1e-2, weight_decay=0.0, max_grad_norm=None, loss="token_mean",
    seed=0,
)  # fmt: skip
KEEP = 2


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# in the place of what the process dies, and the checkpoints that count then
POINTS = {
    "tensors written, not what lies in them": ("raysvc.actors.model.saved_state.write_rank", [1, 2]),
    "ranks done, not published": ("raysvc.training.run_folder.RunFolder.publish", [1, 2]),
    "state drafted, not in place": ("os.link", [1, 2]),
    "published, old ones not pruned": ("raysvc.training.run_folder.RunFolder.prune", [1, 2, 3]),
    "old one unmarked, not removed": ("shutil.rmtree", [2, 3, 4]),
}


def digest(worker: CausalLMWorker) -> str:
    """Of weights, Adam's moments, optimizer steps and the next random number."""
    hashed = hashlib.sha256(str(worker.optimizer_steps).encode())
    for name, weight in sorted(checkpoint.full_weights(worker.model).items()):
        hashed.update(name.encode() + weight.numpy().tobytes())
    assert worker.optimizer is not None
    for state in worker.optimizer.state.values():
        for name, value in sorted(state.items()):
            hashed.update(name.encode() + value.numpy().tobytes())
    state = torch.get_rng_state()
    hashed.update(torch.rand(4).numpy().tobytes())
    torch.set_rng_state(state)
    return hashed.hexdigest()


def live(folder: RunFolder, worker: CausalLMWorker) -> str:
    """Load, train, save; returns what was saved."""
    newest = folder.newest()
    if newest is not None:
        worker.load_checkpoint(str(newest.folder))
        assert digest(worker) == newest.state["digest"], "what was loaded is not what was saved"
    for parameter in worker.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    worker.optim_step()
    steps = newest.step + 1 if newest else 1
    assert worker.optimizer_steps == steps
    made = folder.new_checkpoint(steps)
    worker.save_checkpoint(str(made))
    folder.publish(made, {"digest": digest(worker), "data": {"frontier": steps}})
    folder.prune(KEEP)
    return digest(worker)


def one_life(folder: RunFolder, worker: CausalLMWorker, killed_in: str | None) -> int:
    """In a process of its own; its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        with nullcontext() if killed_in is None else mock.patch(killed_in, die):
            live(folder, worker)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def main(path: str) -> None:
    folder = RunFolder(Path(path))
    worker = CausalLMWorker(0, 1, "cpu", SPEC.model_dump_json())
    worker.setup("")
    torch.set_num_threads(1)  # a forked process has no other threads
    for _ in range(2):
        assert one_life(folder, worker, None) == 0
    for point, (function, expected) in POINTS.items():
        status = one_life(folder, worker, function)
        there = [found.step for found in folder.checkpoints()]
        frontiers = [found.state["data"]["frontier"] for found in folder.checkpoints()]
        facts = {
            "point": point,
            "status": status,
            "expected": expected,
            "there": there,
            "frontiers": frontiers,
        }
        print(json.dumps(facts), flush=True)
    assert one_life(folder, worker, None) == 0
    left = [found.step for found in folder.checkpoints()]
    print(json.dumps({"left": left, "folders": len(os.listdir(Path(path) / "checkpoints"))}))
    shutil.rmtree(path)


if __name__ == "__main__":
    main(sys.argv[1])
