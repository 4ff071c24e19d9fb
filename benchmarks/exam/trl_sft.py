"""TRL's SFTTrainer; packed, a batch is as many packs as others have rows, and a pack holds several rows; of pairs, its DPOTrainer."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from epochs import ids, numbers, pairs
from hf_trainer import Loader as TrainerLoader
from hf_trainer import mapped
from words import KNOWN, LONG, WORDS, cut_all, long_number, tokenizer, unpad

VERSION = f"trl {importlib.metadata.version('trl')}"
PROMISE = "resumes as the Trainer does; packing puts rows together into sequences of max_length"
SETTINGS = "rows of 3 to 6 tokens, already tokenized; packed: packing=True, packing_strategy=bfd, max_length=12; pairs: DPOTrainer"
OFFERS = ("pairs",)
NOT_OFFERED = {"mixture": "several data sets are mixed by `datasets`, before a trainer gets them"}
IMPORTS = ("torch", "accelerate", "datasets", "trl.trainer.sft_trainer")


class Loader(TrainerLoader):
    def make(self, rows: Path, options: dict[str, Any]) -> Any:
        import torch
        from datasets import Dataset
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

        loader, of_pairs, is_long = self, self.options.get("pairs", False), self.options.get("long", False)

        class Watched(DPOTrainer if of_pairs else SFTTrainer):  # type: ignore[misc]
            def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
                loader.step(_rows(inputs, loader.options))
                if is_long:  # rows are what is looked at, not a model's memory
                    return torch.zeros(())
                return super().training_step(model, inputs, *others, **more)

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config, more = LlamaConfig(vocab_size=len(KNOWN), attn_implementation="eager", **sizes), {}
        if of_pairs:
            args = DPOConfig(**options, max_length=12, bf16=False)
            more["ref_model"] = LlamaForCausalLM(config)
            data = Dataset.from_json(str(pairs(rows)), cache_dir=str(rows.parent / "hf"))
        else:
            length, packing = LONG if is_long else 12, self.options.get("packed", False)
            args = SFTConfig(**options, packing=packing, max_length=length, bf16=False)
            data = mapped(rows).with_format(None) if is_long else self.short(rows)
        model = LlamaForCausalLM(config)
        return Watched(model, args=args, train_dataset=data, processing_class=tokenizer(), **more)

    def short(self, rows: Path) -> Any:
        from datasets import Dataset

        plain = [[number + 2] * (3 + number % 4) for number in numbers(rows)]
        return Dataset.from_dict({"input_ids": ids(rows) if self.options.get("ids") else plain})


def _rows(inputs: Any, o: dict[str, Any]) -> list[Any]:
    """Row numbers, or the ids of rows: of packs, a row begins where positions are 0."""
    if o.get("long"):
        return [*map(long_number, inputs["input_ids"])]
    if not o.get("ids"):
        words = (int(token) - 2 for token in inputs["input_ids"].reshape(-1))
        return list(dict.fromkeys(word for word in words if 0 <= word < WORDS))
    if "position_ids" not in inputs:
        return unpad(inputs)
    of = (inputs["position_ids"] == 0).cumsum(-1)
    return cut_all(inputs["input_ids"].tolist(), of.tolist())


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
