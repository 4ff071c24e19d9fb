"""A rank of `accelerate launch`, or the only one: trains on a server, and may be killed. Started by `test_accelerate.py`.

python accelerate_ranks.py KIND SERVER ADDRESS GROUP FOLDER TOKENIZER [kill]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

KILLED_AT, SAVED_EVERY = (
    5,
    3,
)  # optimizer steps; the checkpoint lies in the middle of a step of two mini-batches


def run(
    kind: str, server: str, address: str, group: str, folder: Path, tokenizer: str, kill: bool
) -> list[float]:
    """Losses of the run, those before its checkpoint included; rank 0 has them."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, set_seed
    from transformers import TrainingArguments as Arguments

    import raysvc
    from raysvc.integrations.transformers import FromServer
    from raysvc.integrations.trl_server import TrlFromServer

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)

    class Kill(TrainerCallback):  # type: ignore[misc]
        """SIGKILL of the last rank, between two checkpoints."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if kill and rank == ranks - 1 and state.global_step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)

    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, **sizes))
    options: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 1, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        "save_steps": SAVED_EVERY, "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    with raysvc.attach_rank(server, ranks, rank=rank, address=address, group=group, takeover=True) as ours:
        if kind == "sft":
            from trl import SFTConfig, SFTTrainer

            host = type("Sft", (TrlFromServer, SFTTrainer), {"client": ours})
            more = {"processing_class": AutoTokenizer.from_pretrained(tokenizer)}
            trainer = host(model=model, args=SFTConfig(**options, bf16=False), callbacks=[Kill()], **more)
        else:
            host = type("Mine", (FromServer, Trainer), {"client": ours})
            trainer = host(model=model, args=Arguments(**options), callbacks=[Kill()])
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    kind, server, address, group, folder, tokenizer, *kill = sys.argv[1:]
    found = run(kind, server, address, group, Path(folder), tokenizer, bool(kill))
    if int(os.environ.get("RANK", 0)) == 0:
        Path(folder, "losses.json").write_text(json.dumps(found))
