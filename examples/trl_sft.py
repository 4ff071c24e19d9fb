"""TRL's `SFTTrainer` on a cache entry, with our ids and our mask. `python examples/trl_sft.py [FOLDER]`"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import raysvc
from raysvc.cli.sample_data import write_job
from raysvc.integrations.trl import labelled


def main(folder: Path) -> dict[str, Any]:
    entry = raysvc.tokenize(write_job(folder, 128))
    rows = labelled(entry.uri)
    # the ids stay ours, and labels are made from our mask when a row is read
    ours = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}

    set_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    args = SFTConfig(
        output_dir=str(folder / "trl"),
        **ours,
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, pad_token_id=tokenizer.pad_token_id, **size))
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"uri": entry.uri, "rows": len(rows), "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()))))
