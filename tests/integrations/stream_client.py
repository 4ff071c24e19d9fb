"""A rank's client of a job's own stream, without a server and without Ray: what an adapter asks of a `RankClient`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import raysvc
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.builds.job_plan import plan_config, plan_of
from raysvc.client.data_state import frontier_of, state_of
from raysvc.client.steps import MicroBatch, RankStep, micros_of
from raysvc.client.torch_dataset import RankDataset
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job


class StreamClient:
    """One rank of `dp_size`."""

    def __init__(self, job: JobConfig, rank: int = 0, dp_size: int = 1) -> None:
        self.job, self.entry = job, raysvc.tokenize(job)
        self._stream = EntryStream(
            [SourceSpec(uri=str(self.entry.uri))], {}, Recipe(plan_config(job, self.entry), 0)
        )
        self.schedule = plan_of(job, self.entry).schedule
        self.rank, self.dp_size, self.next_step = rank, dp_size, 0
        self.loss_ranks = dp_size
        self._orders: dict[int, str] = {}
        stream = self._stream
        self.lease: Any = SimpleNamespace(
            entry_key=stream.entry_key,
            plan_hash=stream.plan_hash,
            identity=stream.identity,
            decided=(),
        )

    def as_torch_dataset(self) -> RankDataset:
        return RankDataset(self, "cpu", self._state_at)

    def num_micro_batches(self) -> int:
        steps = (self._stream.make(index, (self.dp_size,))[1] for index in range(self.schedule.num_steps))
        return sum(len(shard.micro_batches) for own in steps for shard in own[self.rank :: self.dp_size])

    def steps(self) -> Iterator[RankStep]:
        for index in range(self.next_step, self.schedule.num_steps):
            info, shards = self._stream.make(index, (self.dp_size,))
            own = shards[self.rank :: self.dp_size]
            if info.order is not None:
                self._orders[info.epoch] = info.order
            yield RankStep(index, info.epoch, tuple(own), info.mini_batches)

    def micro_batches(self, device: str = "cpu") -> Iterator[MicroBatch]:
        yield from micros_of(self.steps(), device)

    def commit(self, step: int) -> None:
        self.next_step = step + 1

    def rewind(self, step: int) -> None:
        self.next_step = step

    def state_dict(self) -> dict[str, Any]:
        return self._state_at(self.next_step)

    def _state_at(self, step: int) -> dict[str, Any]:
        return {**state_of(self.lease, self.schedule, step, self._orders), "dp_size": self.dp_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.check(state["plan"])
        self.next_step = frontier_of(state)


def client_of(
    folder: Path, sample: dict[str, str], rank: int = 0, dp_size: int = 1, **plan: Any
) -> StreamClient:
    """Of a job over the sample's rows, all assistant messages trained, with this `plan`."""
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "train_on": "all_assistant_messages",
        "cache": {"root": str(folder / "cache")},
        "plan": plan,
    }
    return StreamClient(load_job(job), rank, dp_size)


def tiny_lm(critic: bool = False, vocab_size: int = 512) -> Any:
    """A Llama of one layer; with one output where it is a reward model."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, num_labels=1, pad_token_id=0, **sizes)
    return LlamaForSequenceClassification(config) if critic else LlamaForCausalLM(config)


def arguments(folder: Path) -> dict[str, Any]:
    """Of any trainer: quiet, on the CPU, without a checkpoint."""
    return {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
            "logging_steps": 1, "lr_scheduler_type": "constant", "num_train_epochs": 1}  # fmt: skip
