"""A controller loop in SkyRL's shape: prompt mini-batches of step-wise rollouts, refs `[mini][dp]`, workers that hold
the model. `python examples/skyrl_controller.py`

The worker here is a stand-in that opens shards by itself. For SkyRL's own workers the role says that its refs are
ready batches: `raysvc.attach(name, roles={"policy": raysvc.Role(dp_size, batches=BatchRules())})`.

The controller opens no tensor. Where SkyRL calls `MeshDispatch.stage_chunks` on a batch that it holds itself, it hands
on refs that the server made: one per (mini-batch, data-parallel rank), padded to the ranks, groups never split.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import numpy as np
import ray

import raysvc
from raysvc import Group
from raysvc.rl.advantages import group_advantages

COLUMNS = ("input_ids", "loss_mask", "advantages")
PLAN = {
    "batch_size": 4,
    "mini_batch_size": 2,
    "layout": "padded_left",
    "micro_batch_size": 4,
    "columns": COLUMNS,
}


@ray.remote(num_cpus=0.5)
class PolicyWorker:
    """One data-parallel rank with `forward_backward` and `optim_step`, like a SkyRL worker."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.weights = torch.nn.Parameter(torch.zeros(50))
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)

    def forward_backward(self, chunk: Any) -> list[int]:
        import torch

        shard = raysvc.read_shard(chunk)
        ids, mask, advantages = (
            torch.tensor(shard.arrays[name]) for name in ("input_ids", "loss_mask", "advantages")
        )
        logprobs = self.weights.log_softmax(0)[ids.long()]
        (-(logprobs * advantages[:, None] * mask).sum() / shard.denominators.tokens).backward()
        return [row for row in shard.row_ids.tolist() if row >= 0]

    def optim_step(self) -> float:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.weights.abs().sum())


def rollouts_of(prompt: int) -> Group:
    """Two trajectories of one prompt, one to three turns each; every turn is a sequence (step-wise)."""
    rng = np.random.default_rng(prompt)
    turns = [trajectory for trajectory in range(2) for _ in range(int(rng.integers(1, 4)))]
    ids = [rng.integers(1, 50, int(rng.integers(6, 20))) for _ in turns]
    mask = [np.arange(len(each)) >= 4 for each in ids]  # four tokens of prompt
    # the reward is the trajectory's, and so is the advantage: all its turns have it
    advantages = group_advantages(rng.random(2), np.zeros(2, int))[turns]
    return Group(f"prompt-{prompt}", ids, mask, rows={"advantages": advantages.astype(np.float32)})


def main(dp_size: int = 2) -> dict[str, Any]:
    server = raysvc.serve_rollouts(
        "skyrl", run_dir=tempfile.mkdtemp(), pad_token_id=0, plan=PLAN, detached=False
    )
    raysvc.rollouts(server.name).put_groups([rollouts_of(prompt) for prompt in range(8)])
    policy = [PolicyWorker.remote() for _ in range(dp_size)]
    shape, trained = [], []

    with raysvc.attach(server.name, dp_size) as client:
        for step in client.steps(stop=2):
            staged = [mini.shards for mini in step.mini_batches]  # [mini][dp], refs that nobody opened
            shape.append([len(refs) for refs in staged])
            for mini in staged:
                done = [actor.forward_backward.remote(ref) for actor, ref in zip(policy, mini, strict=True)]
                trained.append(sorted(row for rank in ray.get(done) for row in rank))
                ray.get([actor.optim_step.remote() for actor in policy])
            client.commit(step.index)
    return {"shape": shape, "rows": trained}


if __name__ == "__main__":
    print(json.dumps(main()))
