"""Ray Train's own loop over `get_dataset_shard`, which goes on where it was. `python examples/ray_train_data.py [FOLDER]`

The lines with a # are what differs from a loop over a Ray Dataset. One of two workers is killed during the first run; a second
run goes on with three.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import raysvc
from raysvc.cli.sample_data import write_job
from raysvc.integrations.ray_train import EntryData, EntryDataConfig

EPOCHS = 2


def train_rank(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shard = ray.train.get_dataset_shard("train")
    rows: list[list[int]] = []
    starts = 0
    checkpoint = ray.train.get_checkpoint() or config["checkpoint"]
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        shard.load_state_dict(saved["data"])  #
        rows, starts = saved["rows"], saved["starts"] + 1

    for _ in range(shard.epoch, EPOCHS):  #
        for batch in shard.iter_torch_batches(batch_size=config["batch_size"]):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(all_rows(batch["row_id"]))
            if len(rows) == 6 and rank == 1 and not starts:  # once
                ray.train.get_all_reported_checkpoints()  # the controller has that of batch 4
                os.kill(os.getpid(), signal.SIGKILL)
            if len(rows) % 4 == 0:
                weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state = {**weights, "data": shard.state_dict(), "rows": rows, "starts": starts}  #
                save(state if rank == 0 else None)  # it is the same on every rank
            if len(rows) == config["stop"]:
                return


def save(state: dict[str, Any] | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if state:
            torch.save(state, f"{folder}/state.pt")
        ray.train.report({}, checkpoint=Checkpoint(folder) if state else None)


def all_rows(row_ids: torch.Tensor) -> list[int]:
    """Rows of all ranks in a batch, for the test of this page."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, row_ids.tolist())
    return [row for its in gathered for row in its]


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"].long(), attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:].flatten().long()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)


def build_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size))


def run(folder: Path, uri: str, workers: int, **config: Any) -> Any:
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"checkpoint": None, "stop": None, **config},
        datasets={"train": EntryData(uri, columns=["input_ids", "loss_mask"])},  #
        dataset_config=EntryDataConfig(),  #
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    return trainer.fit().checkpoint


def main(folder: Path) -> dict[str, Any]:
    entry = raysvc.tokenize(write_job(folder, 128))
    first = run(folder, entry.uri, 2, batch_size=5, stop=8)
    second = run(folder, entry.uri, 3, batch_size=4, checkpoint=first)
    saved = []
    for checkpoint in (first, second):
        with checkpoint.as_directory() as last:
            saved.append(torch.load(f"{last}/state.pt"))
    facts = [{"starts": one["starts"], "batches": [len(rows) for rows in one["rows"]]} for one in saved]
    return {"runs": facts, "rows": [row for rows in saved[1]["rows"] for row in rows], "uri": entry.uri}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
