"""The `Trainer` of transformers on a batch server, stopped and resumed. `python examples/hf_trainer.py [FOLDER]`"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import raysvc
from raysvc.cli.sample_data import write_job
from raysvc.integrations.transformers import FromServer


def main(folder: Path) -> dict[str, Any]:
    plan = {"batch_size": 32, "mini_batch_size": 16, "micro_batch_tokens": 1024}
    job = write_job(folder, 128, plan=plan)
    server = raysvc.serve(job, name="hf-trainer", detached=False)  # ends with this process
    with raysvc.attach(server.name, rank=0) as ours:

        class MyTrainer(FromServer, Trainer):
            client = ours

        whole = trainer(MyTrainer, folder / "whole")
        whole.train()
        trainer(
            MyTrainer, folder / "halves", stop_at=3
        ).train()  # in the middle of a step of two mini-batches
        resumed = trainer(MyTrainer, folder / "halves")
        resumed.train(resume_from_checkpoint=True)
        left = ours.schedule.num_steps - ours.frontier
    return {"left": left, "whole": losses(whole), "resumed": losses(resumed)}


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def trainer(kind: type[Trainer], folder: Path, stop_at: int = -1) -> Trainer:
    set_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size))
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # plan.epochs counts epochs
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_steps=stop_at,
        save_steps=3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return kind(model=model, args=args)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
