"""TRL's `GRPOTrainer` on a server of prompts, stopped and resumed. `python examples/trl_grpo.py [FOLDER]`

The policy learns to write vowels. It is stopped in the middle of a generation batch, whose completions it has trained once of twice.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

import raysvc
from raysvc.cli.sample_data import write_job
from raysvc.integrations.trl_prompts import PromptsFromServer

PROMPTS, EACH = 4, 8  # of a generation batch, completions of a prompt


def main(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    source = {
        "path": str(write_prompts(folder / "prompts.jsonl", 64)),
        "format": "prompt",
        "carry": ["letters"],
    }
    plan = {"batch_size": PROMPTS, "layout": "padded_left", "tail": "drop"}
    job = write_job(folder, 8, source=source, plan=plan)
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    server = raysvc.serve(job, name="trl-grpo", detached=False)  # ends with this process
    with raysvc.attach_rank(server.name, rank=0) as ours:

        class Grpo(PromptsFromServer, GRPOTrainer):
            client = ours

        whole = trainer(Grpo, folder / "whole", tokenizer)
        whole.train()
        trainer(Grpo, folder / "halves", tokenizer, stop_at=13).train()  # in the middle of a generation batch
        resumed = trainer(Grpo, folder / "halves", tokenizer)
        resumed.train(resume_from_checkpoint=True)
        left = ours.schedule.num_steps - ours.next_step
    return {"left": left, "whole": facts(whole), "resumed": facts(resumed)}


def share_of_letters(completions: list[str], letters: list[str], **others: Any) -> list[float]:
    """How much of a completion are the letters that its row wants."""
    return [
        sum(text.count(one) for one in wanted) / max(len(text), 1)
        for text, wanted in zip(completions, letters, strict=True)
    ]


def write_prompts(path: Path, num_prompts: int) -> Path:
    rng = random.Random(0)
    rows = [
        {"prompt": f"How many are {rng.randint(2, 60)} and {rng.randint(2, 39)}?", "letters": "aeiou"}
        for _ in range(num_prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trainer(kind: type[Any], folder: Path, tokenizer: Any, stop_at: int = -1) -> Any:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    args = GRPOConfig(
        output_dir=str(folder),
        num_train_epochs=1,  # plan.epochs counts epochs
        per_device_train_batch_size=PROMPTS * EACH,
        num_generations=EACH,
        num_iterations=2,  # two optimizer steps a generation batch
        max_completion_length=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_steps=stop_at,
        save_steps=13,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, pad_token_id=tokenizer.pad_token_id, **size))
    return kind(model=model, reward_funcs=share_of_letters, args=args, processing_class=tokenizer)


def facts(trainer: Any) -> dict[str, list[float]]:
    """Loss and gradient of each optimizer step, reward of each generation batch that was generated."""
    lines = trainer.state.log_history
    return {name: [line[name] for line in lines if name in line] for name in ("loss", "grad_norm", "reward")}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
