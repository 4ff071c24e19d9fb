"""TRL's `DPOTrainer` and `RewardTrainer` on one server of pairs, stopped and resumed. `python examples/trl_pairs.py [FOLDER]`"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

import raysvc
from raysvc.cli.sample_data import write_job
from raysvc.integrations.trl_server import PairsFromServer


def main(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    source = {"path": str(write_pairs(folder / "pairs.jsonl", 64)), "format": "preference"}
    job = write_job(folder, 8, source=source, plan={"batch_size": 16, "mini_batch_size": 8})
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    server = raysvc.serve(job, name="trl-pairs", detached=False)  # ends with this process
    with raysvc.attach_rank(server.name, rank=0) as ours:

        class Dpo(PairsFromServer, DPOTrainer):
            client = ours

        class Reward(PairsFromServer, RewardTrainer):
            client = ours

        facts = {}
        for name, kind in {"dpo": Dpo, "reward": Reward}.items():
            whole = trainer(name, kind, folder / name / "whole", tokenizer)
            whole.train()
            # stopped in the middle of a step of two mini-batches
            trainer(name, kind, folder / name / "halves", tokenizer, stop_at=3).train()
            resumed = trainer(name, kind, folder / name / "halves", tokenizer)
            resumed.train(resume_from_checkpoint=True)
            facts[name] = {"whole": losses(whole), "resumed": losses(resumed)}
        left = ours.schedule.num_steps - ours.next_step
    return {"left": left, **facts}


def write_pairs(path: Path, num_pairs: int) -> Path:
    """Sums: the chosen answer is right, the rejected one is off by one."""
    rng = random.Random(0)
    lines = []
    for _ in range(num_pairs):
        a, b = rng.randint(2, 60), rng.randint(2, 39)
        right, wrong = ([{"role": "assistant", "content": f"{a} + {b} = {a + b + off}."}] for off in (0, 1))
        prompt = [{"role": "user", "content": f"How many are {a} and {b}?"}]
        lines.append(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}) + "\n")
    path.write_text("".join(lines))
    return path


def trainer(name: str, kind: type[Any], folder: Path, tokenizer: Any, stop_at: int = -1) -> Any:
    set_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=1024, num_labels=1, pad_token_id=tokenizer.pad_token_id, **size)
    if name == "dpo":
        models = {"model": LlamaForCausalLM(config), "ref_model": LlamaForCausalLM(config)}
        models["ref_model"].load_state_dict(models["model"].state_dict())
    else:
        models = {"model": LlamaForSequenceClassification(config)}
    args = {"dpo": DPOConfig, "reward": RewardConfig}[name](
        output_dir=str(folder),
        num_train_epochs=1,  # plan.epochs counts epochs
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_length=None,  # of the job: max_length, truncation
        max_steps=stop_at,
        save_steps=3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return kind(**models, args=args, processing_class=tokenizer)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
