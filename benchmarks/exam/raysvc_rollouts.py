"""raysvc's rollout server, which hands out prompts and outlives the learner that is killed, with producers as threads of that learner."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from prompt_rows import GENERATORS, TEMPLATE, prompts, sampling_s
from words import WORDS, ids_of, number_of, save_tokenizer

import raysvc


class Learner:
    """A learner of groups of two answers; `sampled` are the prompts that its producers answered."""

    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        folder = rows.with_suffix(".chat")
        if not folder.exists():
            save_tokenizer(folder)
        job = {
            "source": {"path": str(prompts(rows)), "format": "prompt"},
            "tokenizer": {"name": str(folder), "chat_template": TEMPLATE},
            "cache": {"root": str(rows.parent / "cache")},
            "plan": {"epochs": o["epochs"], "seed": o["seed"], "shuffle": "full"},
        }
        plan = {"batch_size": o["batch_size"], "micro_batch_size": 2 * o["batch_size"]}
        raysvc.serve_rollouts(o["run"], run_dir=str(rows.parent / o["run"]), pad_token_id=WORDS + 3, plan=plan, prompts=job,
                              max_staleness=1)  # fmt: skip
        self.name, self.client, self.sampled = o["run"], raysvc.attach(o["run"], takeover=True), []

    def batches(self) -> Iterator[list[int]]:
        self.version = self.client.next_step
        self.client.rollouts.set_weight_version(self.version)
        for number in range(GENERATORS):
            threading.Thread(target=self.produce, args=(f"producer-{number}",), daemon=True).start()
        for step in self.client.steps():
            self.client.commit(step.index)
            self.version = step.index + 1
            self.client.rollouts.set_weight_version(self.version)
            shards = [raysvc.read_shard(ray.get(mini.shards[0])) for mini in step.optimizer_steps()]
            yield [number_of(ids) for shard in shards for ids in shard.arrays["input_ids"].tolist()[::2]]

    def produce(self, owner: str) -> None:
        producer = raysvc.rollouts(self.name, owner=owner)
        for prompt in producer.prompts():
            ids = [*map(int, prompt.input_ids)]
            time.sleep(sampling_s(number_of(ids)))
            answers = [[*ids, *ids_of("word")]] * 2
            producer.put_groups(prompt.group(answers, weight_version=self.version))
            self.sampled.append(number_of(ids))

    def save(self) -> Any:
        return self.client.state_dict()

    def load(self, state: Any) -> None:
        self.client.load_state_dict(state)
