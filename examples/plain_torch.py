"""A plain torch loop without a server: load, wrap as a `DataLoader`, train. `python examples/plain_torch.py [FOLDER]`

The loss is divided by the targets of the whole mini-batch, so it does not depend on how rows are split.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import raysvc
from raysvc.cli.sample_data import write_job


def main(folder: Path) -> dict[str, Any]:
    plan = {"batch_size": 32, "mini_batch_size": 16, "micro_batch_tokens": 1024, "epochs": 2}
    job = write_job(folder, 128, plan=plan)

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, loss, rows = [], 0.0, 0

    with raysvc.load(job) as loader:  # or raysvc.attach(name, rank=0), of a job that raysvc.serve serves
        for micro in DataLoader(loader.as_torch_dataset(), batch_size=None):
            logits = model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits
            labels = micro["labels"][:, 1:].flatten().long()  # -100 where there is no loss
            total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
            (total * micro["loss_scale"]).backward()  # 1 / targets of the whole mini-batch
            loss += float(total.detach() * micro["loss_scale"])
            rows += int((micro["row_ids"] >= 0).sum())
            if micro["ends_mini"]:
                optimizer.step()
                optimizer.zero_grad()
                losses, loss = [*losses, loss], 0.0
    return {"optimizer_steps": len(losses), "rows": rows, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
