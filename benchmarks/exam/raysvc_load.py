"""raysvc without a server: raysvc.load."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raysvc

VERSION = f"raysvc {raysvc.__version__}"
PROMISE = "rows are trained once each, in one order, whatever is killed and on however many ranks it goes on"
SETTINGS = "plan.shuffle: full; workers: as_torch_dataset in torch's DataLoader"


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit

        folder = rows.parent / "tokenizer"
        folder.mkdir(exist_ok=True)
        words = Tokenizer(
            WordLevel({"[UNK]": 0, "row": 1, **{str(n): n + 2 for n in range(1000)}}, unk_token="[UNK]")
        )
        words.pre_tokenizer = WhitespaceSplit()
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[UNK]", "eos_token": "[UNK]"}'
        )
        job = {
            "source": {"path": str(rows), "format": "text"},
            "tokenizer": {"name": str(folder)},
            "cache": {"root": str(rows.parent / "cache")},
            "plan": {"batch_size": o["batch_size"] * o["world_size"], "micro_batch_size": o["batch_size"], "epochs": o["epochs"],
                     "seed": o["seed"], "shuffle": "full" if o["shuffle"] else "none"},
        }  # fmt: skip
        self.workers = o["workers"]
        with contextlib.redirect_stderr(io.StringIO()):
            self.loader = raysvc.load(job, rank=o["rank"], dp_size=o["world_size"])

    def batches(self) -> Iterator[list[int]]:
        if self.workers:
            from torch.utils.data import DataLoader

            loader = DataLoader(self.loader.as_torch_dataset(), batch_size=None, num_workers=self.workers)
            for micro in loader:
                yield _rows(micro["input_ids"])
            return
        for step in self.loader.steps():
            self.loader.commit(step.index)
            yield [row for shard in step.shards for row in _rows(shard.arrays["input_ids"])]

    def save(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def _rows(input_ids: Any) -> list[int]:
    """Row numbers, which the second word of each row says; padding rows have none."""
    return [int(word) - 2 for word in input_ids.reshape(-1).tolist() if word >= 2]


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
