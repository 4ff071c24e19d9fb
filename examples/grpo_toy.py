"""GRPO with a producer of groups: a policy learns to answer in low token ids. `python examples/grpo_toy.py [RUN_DIR [STEPS [TRACKER]]]`

The server hands out prompts; a producer samples four answers to each with the newest weights and puts them as a group; the
learner trains steps of whole groups. No group is trained that is more than one weight version old. If it is killed, the same
command with the same folder resumes from the last checkpoint, and trains the groups that were trained after it again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import raysvc
from raysvc.actors.worker.losses import PolicyLoss
from raysvc.actors.worker.micro_losses import MicroLosses
from raysvc.cli.sample_data import write_job
from raysvc.rl.advantages import group_advantages
from raysvc.rl.loop_checkpoint import LoopCheckpoint

VOCAB, LOW, ANSWER, SAMPLES, STEPS = 1024, 512, 6, 4, 15
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "old_logprobs", "advantages")
PLAN = {"batch_size": 8, "micro_batch_size": 32, "columns": COLUMNS}


def build_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **size))


@torch.no_grad()
def sample(model: torch.nn.Module, prompt: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers to a prompt, and the log-probability of each of their tokens."""
    ids, logprobs = torch.tensor(prompt).long().repeat(SAMPLES, 1), []
    for _ in range(ANSWER):
        last = model(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(last.exp(), 1)
        ids, logprobs = torch.cat([ids, token], 1), [*logprobs, last.gather(1, token)]
    return ids, torch.cat(logprobs, 1)


@ray.remote(num_cpus=0.5)
def produce(server: str) -> None:
    model, producer = build_model(), raysvc.rollouts(server, owner="producer-0")
    version, tensors = producer.weights()
    for prompt in producer.prompts():  # waits while enough groups are ready
        version, tensors = producer.weights(after=version, wait_s=0) or (version, tensors)
        model.load_state_dict(tensors)
        ids, logprobs = sample(model, prompt.input_ids)
        reward = (ids[:, -ANSWER:] < LOW).float().mean(1).numpy()
        advantages = group_advantages(reward, np.zeros(SAMPLES, int)).astype(np.float32)
        group = prompt.group(
            ids,
            tokens={"old_logprobs": logprobs},
            align={"old_logprobs": "response"},
            rows={"reward": reward, "advantages": advantages},
            weight_version=version,
        )
        producer.put_groups(group)


def learn(server: str, folder: Path, stop: int, trackers: list[str]) -> list[dict[str, float]]:
    model, facts = build_model(), []
    losses, optimizer = MicroLosses(model, PolicyLoss()), torch.optim.AdamW(model.parameters(), lr=4e-2)
    with raysvc.attach(server, look_ahead_steps=0, takeover=True) as client:
        client.report_to(*trackers, folder=folder)
        checkpoint = LoopCheckpoint(folder / "checkpoint.pt", client, model=model, optimizer=optimizer)
        client.rollouts.publish(checkpoint.restore(), model.state_dict())
        for step in client.steps(stop=stop):
            for mini in step.optimizer_steps():
                for micro in losses(raysvc.read_shard(ray.get(mini.shards[0]))):
                    micro.total.backward()
                optimizer.step()
                optimizer.zero_grad()
            client.commit(step.index)
            client.rollouts.publish(step.index + 1, model.state_dict())
            checkpoint.save()
            facts.append(step.rollouts.metrics())  # what trackers get too
    return facts


def main(run_dir: str | None = None, stop: int = STEPS, *trackers: str) -> dict[str, Any]:
    folder = Path(run_dir or tempfile.mkdtemp())
    prompts = write_job(folder / "prompts", 64, plan={"epochs": 4})
    server = raysvc.serve_rollouts(
        "grpo",
        run_dir=str(folder),
        pad_token_id=0,
        plan=PLAN,
        prompts=prompts,
        max_staleness=1,
        detached=False,
    )
    produce.remote(server.name)  # while the learner trains
    facts = learn(server.name, folder, stop, list(trackers))
    ends = {"first": facts[0]["reward_mean"], "last": facts[-1]["reward_mean"]}
    return {**ends, "oldest": int(max(each["staleness_max"] for each in facts)), "steps": len(facts)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:2], *map(int, sys.argv[2:3]), *sys.argv[3:])))
