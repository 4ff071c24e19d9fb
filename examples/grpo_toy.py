"""GRPO with a producer of groups: the policy learns to say one word. `python examples/grpo_toy.py [RUN_DIR [STEPS]]`

A producer samples four answers to a prompt with the newest weights and puts them as a group; the learner trains steps
of whole groups. No group is trained that is more than one weight version old. If it is killed, the same command with
the same folder resumes from the last checkpoint, and trains the groups that were trained after it again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import raysvc
from raysvc import Group
from raysvc.actors.worker.losses import PolicyLoss, Targets
from raysvc.rl.advantages import group_advantages

VOCAB, WORD, ANSWER, STEPS = 16, 7, 6, 15
COLUMNS = ("input_ids", "attention_mask", "labels", "logprobs", "advantages", "reward")
PLAN = {"batch_size": 8, "micro_batch_size": 32, "columns": COLUMNS}


def build_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **size))


@ray.remote(num_cpus=0.5)
class Producer:
    """Samples groups with the weights that were published last."""

    def __init__(self, server: str) -> None:
        self.model, self.server = build_model(), raysvc.rollouts(server)

    def produce(self) -> None:
        version, tensors = self.server.weights()
        while True:
            self.model.load_state_dict(tensors)
            self.server.put_groups(self.group(version))  # waits while enough groups are ready
            version, tensors = self.server.weights(after=version, wait_s=0) or (version, tensors)

    @torch.no_grad()
    def group(self, version: int) -> Group:
        ids = torch.randint(1, VOCAB, (1, 3)).repeat(4, 1)  # one prompt, four answers
        logprobs = torch.zeros(4, 3)
        for _ in range(ANSWER):
            last = self.model(ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(last.exp(), 1)
            ids, logprobs = torch.cat([ids, token], 1), torch.cat([logprobs, last.gather(1, token)], 1)
        reward = (ids[:, 3:] == WORD).float().mean(1).numpy()
        advantage = group_advantages(reward, np.zeros(4, int)).astype(np.float32)
        return Group(
            uid=f"prompt-{uuid.uuid4().hex[:12]}",
            input_ids=ids.numpy(),
            loss_mask=[[0] * 3 + [1] * ANSWER] * 4,
            tokens={"logprobs": logprobs.numpy(), "advantages": advantage[:, None].repeat(3 + ANSWER, 1)},
            rows={"reward": reward},
            weight_version=version,
        )


def main(run_dir: str | None = None, stop: int = STEPS) -> dict[str, Any]:
    folder = Path(run_dir or tempfile.mkdtemp())
    server = raysvc.serve_rollouts(
        "grpo", run_dir=str(folder), pad_token_id=0, plan=PLAN, max_staleness=1, detached=False
    )
    producer = Producer.remote(server.name)
    producer.produce.remote()  # while this loop trains
    model, loss = build_model(), PolicyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rewards, ages = [], []

    with raysvc.attach(server.name, look_ahead_steps=0, takeover=True) as client:
        restore(folder, model, optimizer, client)
        client.publish(client.frontier, model.state_dict())
        for step in client.steps(stop=stop):
            for mini in step.mini_batches:
                shard = raysvc.read_shard(ray.get(mini.shards[0]))
                optimizer.zero_grad()
                policy_loss(model, shard, loss).backward()
                optimizer.step()
                rewards.append(float(shard.arrays["reward"].mean()))
            ages.append(step.index - step.weight_versions[0])
            client.commit(step.index)
            client.publish(step.index + 1, model.state_dict())
            save(folder, model, optimizer, client)
    return {"first": rewards[0], "last": rewards[-1], "oldest": max(ages), "steps": len(rewards)}


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, client: Any) -> None:
    """Write weights and the state of the data to one file, atomically."""
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": client.state_dict()}
    torch.save(whole, folder / "checkpoint.new")
    (folder / "checkpoint.new").rename(folder / "checkpoint.pt")


def restore(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, client: Any) -> None:
    """Load the last checkpoint; without one, start from step 0, whatever an earlier trainer committed."""
    if not (folder / "checkpoint.pt").exists():
        client.rewind(0)
        return
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    client.load_state_dict(saved["data"])


def policy_loss(model: torch.nn.Module, shard: Any, loss: PolicyLoss) -> torch.Tensor:
    arrays = {name: torch.from_numpy(array.copy()) for name, array in shard.arrays.items()}
    labels = arrays["labels"][:, 1:].long()
    is_target = labels != -100
    logprobs = model(arrays["input_ids"].long(), attention_mask=arrays["attention_mask"]).logits[:, :-1]
    now = logprobs.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][is_target]
    columns = {"old_logprobs": arrays["logprobs"], "advantages": arrays["advantages"]}
    at_targets = {name: column[:, 1:][is_target] for name, column in columns.items()}
    weights = torch.full_like(now, raysvc.loss_scale(shard.denominators, ranks=1))
    return loss(Targets(weights, at_targets, logprobs=now)).total


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:2], *map(int, sys.argv[2:3]))))
