"""TRL's SFTTrainer; packed, a batch is as many packs as others have rows, and a pack holds several rows; of pairs, its DPOTrainer."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from epochs import numbers, pairs
from hf_trainer import Loader as TrainerLoader

VERSION = f"trl {importlib.metadata.version('trl')}"
PROMISE = "resumes as the Trainer does; packing puts rows together into sequences of max_length"
SETTINGS = "rows of 3 to 6 tokens, already tokenized; packed: packing=True, packing_strategy=bfd, max_length=12; pairs: DPOTrainer"
OFFERS = ("pairs",)
NOT_OFFERED = {"mixture": "several data sets are mixed by `datasets`, before a trainer gets them"}
IMPORTS = ("torch", "accelerate", "datasets", "trl.trainer.sft_trainer")
WORDS = 2000


class Loader(TrainerLoader):
    def make(self, rows: Path, options: dict[str, Any]) -> Any:
        from datasets import Dataset
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

        loader, of_pairs = self, self.options.get("pairs", False)

        class Watched(DPOTrainer if of_pairs else SFTTrainer):  # type: ignore[misc]
            def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
                words = (int(token) - 2 for token in inputs["input_ids"].reshape(-1))
                loader.step(list(dict.fromkeys(word for word in words if 0 <= word < WORDS)))
                return super().training_step(model, inputs, *others, **more)

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config, more = LlamaConfig(vocab_size=2048, attn_implementation="eager", **sizes), {}
        if of_pairs:
            args = DPOConfig(**options, max_length=12, bf16=False)
            more["ref_model"] = LlamaForCausalLM(config)
            data = Dataset.from_json(str(pairs(rows)), cache_dir=str(rows.parent / "hf"))
        else:
            args = SFTConfig(**options, packing=self.options.get("packed", False), max_length=12, bf16=False)
            data = Dataset.from_dict(
                {"input_ids": [[number + 2] * (3 + number % 4) for number in numbers(rows)]}
            )
        model = LlamaForCausalLM(config)
        return Watched(model, args=args, train_dataset=data, processing_class=_tokenizer(), **more)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"[UNK]": 0, "[PAD]": 1, **{str(n): n + 2 for n in range(WORDS)}, "row": WORDS + 2}
    words = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
