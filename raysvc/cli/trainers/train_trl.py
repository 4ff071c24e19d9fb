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

from raysvc.integrations.trl import trained_and_held

JOB = "job.yaml"
TOKENIZER = "tokenizer"
MODEL = "tiny"
LEARNING_RATE = 3e-3
OUT = "runs/trl"


def main() -> None:
    """Train on the rows of the job, but for those that its evals hold out (one prompt in twenty), which say when to stop."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    trained, held = trained_and_held(JOB)
    # the ids stay ours, and labels are made from our mask when a row is read
    ours = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}

    set_seed(0)
    lora, rows_of_step, most_steps = None, 8, -1
    if MODEL == "tiny":  # random, for trying: adapters of random weights learn nothing
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
        if len(tokenizer) > 65536 and not torch.cuda.is_available():
            rows_of_step, most_steps, held = 2, 60, held.select(range(min(16, len(held))))
            print(
                f"{len(tokenizer):,} tokens make the loss slow on a CPU: {most_steps} steps of {rows_of_step} rows"
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
        if find_spec("peft"):
            from peft import LoraConfig

            lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    args = SFTConfig(
        output_dir=OUT,
        **ours,
        num_train_epochs=3,
        max_steps=most_steps,
        per_device_train_batch_size=rows_of_step,
        per_device_eval_batch_size=rows_of_step,
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
        train_dataset=trained,
        eval_dataset=held,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if Path(OUT).is_dir() else None)
    trainer.save_model(f"{OUT}/model")  # of LoRA: the adapter, which peft opens


if __name__ == "__main__":
    main()
