"""Ray Train's `TorchTrainer` in rank mode; one worker is killed during the run. `python examples/ray_train.py [FOLDER]`"""

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


def train_rank(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = prepare_model(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows: list[int] = []
    resumed: list[int] = []

    # a worker that was killed still holds its seat: take over
    with raysvc.attach_rank(config["server"], ranks, rank=rank, takeover=True) as client:
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                saved = torch.load(f"{folder}/rank-{rank}.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            client.load_state_dict(saved["data"])
            rows, resumed = saved["rows"], [*saved["resumed"], client.next_step]
        else:
            client.rewind(0)
        for micro in client:
            loss_of(model, micro, ranks).backward()
            rows += [row for row in micro.tensors["row_ids"].tolist() if row >= 0]
            if micro.ends_mini:
                optimizer.step()
                optimizer.zero_grad()
            if micro.step == 5 and rank == 1 and not resumed:  # once
                ray.train.get_all_reported_checkpoints()  # the controller has the checkpoint of step 3
                os.kill(os.getpid(), signal.SIGKILL)
            if micro.ends_step:
                client.commit(micro.step)
            if micro.ends_step and micro.step % 4 == 3:
                weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved = {**weights, "data": client.state_dict(), "rows": rows, "resumed": resumed}
                with tempfile.TemporaryDirectory() as folder:
                    torch.save(saved, f"{folder}/rank-{rank}.pt")
                    ray.train.report({"step": micro.step}, checkpoint=Checkpoint(folder))


def loss_of(model: torch.nn.Module, micro: Any, ranks: int) -> torch.Tensor:
    logits = model(micro.tensors["input_ids"], attention_mask=micro.tensors["attention_mask"]).logits
    labels = micro.tensors["labels"][:, 1:].flatten().long()
    total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
    return total * raysvc.loss_scale(micro.denominators, ranks)  # DDP averages over the ranks


def build_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size))


def main(folder: Path) -> dict[str, Any]:
    plan = {"batch_size": 16, "micro_batch_tokens": 1024}
    job = write_job(folder, 128, plan=plan)
    server = raysvc.serve(job, name="ray-train", detached=False)  # ends with this process
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"server": server.name},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    with trainer.fit().checkpoint.as_directory() as last:
        ranks = [torch.load(f"{last}/rank-{rank}.pt") for rank in range(2)]
    weights = float(sum(each.double().abs().sum() for each in ranks[0]["model"].values()))
    return {"rows": [rank["rows"] for rank in ranks], "weights": weights, "resumed": ranks[0]["resumed"]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
