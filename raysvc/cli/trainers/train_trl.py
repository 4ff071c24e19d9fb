"""TRL's `SFTTrainer` with LoRA, gradient checkpointing and early stopping: `python train_trl.py`. Needs `raysvc[trl]`.

LoRA needs peft (`pip install peft`); without it all weights are trained.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import raysvc
from raysvc.integrations.trl import labelled

JOB = "job.yaml"
TOKENIZER = "tokenizer"
MODEL = "tiny"
LEARNING_RATE = 3e-3
OUT = "runs/trl"


def main() -> None:
    """Train on the rows of the job, but for one in twenty, which say when to stop."""
    entry = raysvc.tokenize(JOB)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows = labelled(entry.uri)
    # the ids stay ours, and labels are made from our mask when a row is read
    ours = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    halves = rows.train_test_split(test_size=0.05, seed=0)

    set_seed(0)
    lora = None
    if MODEL == "tiny":  # random, for trying: adapters of random weights learn nothing
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    else:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
        if find_spec("peft"):
            from peft import LoraConfig

            lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    args = SFTConfig(
        output_dir=OUT,
        **ours,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=LEARNING_RATE * 10 if lora else LEARNING_RATE,  # adapters want a higher one
        gradient_checkpointing=True,
        bf16=torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        logging_steps=1,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=halves["train"],
        eval_dataset=halves["test"],
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if Path(OUT).is_dir() else None)
    trainer.save_model(f"{OUT}/model")  # of LoRA: the adapter, which peft opens


if __name__ == "__main__":
    main()
