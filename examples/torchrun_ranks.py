"""Ranks as torchrun starts them, here started as Ray actors; each rank attaches by itself. `python examples/torchrun_ranks.py [FOLDER]`

The same `train` runs under `torchrun --nproc-per-node 2`: it reads RANK, WORLD_SIZE and MASTER_ADDR from the environment.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

import raysvc
from raysvc.cli.sample_data import write_job


def train(server: str) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows: list[int] = []

    with raysvc.attach_rank(server, ranks, rank=rank) as client:
        client.rewind(0)  # whatever an earlier run committed
        loader = DataLoader(client.as_torch_dataset(), batch_size=None)
        for micro in loader:
            logits = model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits
            labels = micro["labels"][:, 1:].flatten().long()
            total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
            (total * micro["loss_scale"]).backward()  # ranks / targets of the whole mini-batch: DDP averages
            rows += [row for row in micro["row_ids"].tolist() if row >= 0]
            if micro["ends_mini"]:
                optimizer.step()
                optimizer.zero_grad()
    torch.distributed.destroy_process_group()
    weights = float(sum(each.double().abs().sum() for each in model.state_dict().values()))
    return {"rows": rows, "weights": weights}


@ray.remote(num_cpus=0.5)
class Rank:
    """A process of torchrun."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def train(self, server: str) -> dict[str, Any]:
        return train(server)


def main(folder: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    plan = {"batch_size": 32, "mini_batch_size": 16, "micro_batch_tokens": 1024}
    job = write_job(folder, 128, plan=plan)
    server = raysvc.serve(job, name="torchrun", detached=False)  # ends with this process
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [Rank.remote(rank, num_ranks, port) for rank in range(num_ranks)]
    results: list[dict[str, Any]] = ray.get([rank.train.remote(server.name) for rank in ranks])
    return results


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
