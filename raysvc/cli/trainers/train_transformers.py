"""The `Trainer` of transformers on raysvc's steps: `python train_transformers.py`, again after a stop. Needs `raysvc[hf]`."""

from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import raysvc
from raysvc.integrations.transformers import FromServer

JOB = "job.yaml"
TOKENIZER = "tokenizer"
MODEL = "tiny"
LEARNING_RATE = 3e-3
OUT = "runs/transformers"


def main() -> None:
    """Train all steps of the job that are left."""
    ours = raysvc.load(JOB)  # or raysvc.attach_rank(name, rank=rank), of a job that raysvc serve serves
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)

    class MyTrainer(FromServer, Trainer):
        client = ours

    set_seed(0)
    if MODEL == "tiny":  # random, for trying
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    else:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    args = TrainingArguments(
        output_dir=OUT,
        num_train_epochs=1,  # plan.epochs counts epochs
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=MODEL != "tiny",
        save_steps=50,
        logging_steps=1,
        report_to="none",
    )
    trainer = MyTrainer(model=model, args=args, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if Path(OUT).is_dir() else None)
    trainer.save_model(f"{OUT}/model")


if __name__ == "__main__":
    main()
