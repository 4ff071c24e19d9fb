"""TRL's SFTTrainer; packed, a batch is as many packs as others have rows, and a pack holds several rows."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from hf_trainer import Loader as TrainerLoader

VERSION = f"trl {importlib.metadata.version('trl')}"
PROMISE = "resumes as the Trainer does; packing puts rows together into sequences of max_length"
SETTINGS = (
    "rows of 3 to 6 tokens, already tokenized; packed: packing=True, packing_strategy=bfd, max_length=12"
)
NOT_OFFERED = {"mixture": "several data sets are mixed by `datasets`, before a trainer gets them"}
IMPORTS = ("torch", "accelerate", "datasets", "trl.trainer.sft_trainer")


class Loader(TrainerLoader):
    def make(self, rows: Path, options: dict[str, Any]) -> Any:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        loader = self

        class Watched(SFTTrainer):
            def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
                loader.step(
                    list(
                        dict.fromkeys(
                            int(token) - 2 for token in inputs["input_ids"].reshape(-1) if token >= 2
                        )
                    )
                )
                return super().training_step(model, inputs, *others, **more)

        numbers = [json.loads(line)["row"] for line in rows.read_text().splitlines()]
        data = Dataset.from_dict({"input_ids": [[number + 2] * (3 + number % 4) for number in numbers]})
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
        )
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, attn_implementation="eager", **sizes))
        args = SFTConfig(**options, packing=self.options.get("packed", False), max_length=12, bf16=False)
        return Watched(model, args, train_dataset=data, processing_class=tokenizer)


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
