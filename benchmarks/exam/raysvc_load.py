"""raysvc without a server: raysvc.load. `raysvc_served` builds on it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raysvc

VERSION = f"raysvc {raysvc.__version__}"
PROMISE = "rows are trained once each, in one order, whatever is killed and on however many ranks it goes on"
SETTINGS = "plan.shuffle: full, steps(), commit() after each"
OFFERS = ("pairs",)
NOT_OFFERED = {
    "workers": "DataLoader(num_workers=) above 0 is refused by name: rows are read ahead by a thread, or by a server"
}
WORDS = 2000  # numbers that are words
IMPORTS = ("torch", "transformers", "raysvc.loader")


def job_of(rows: Path, o: dict[str, Any]) -> dict[str, Any]:
    """The job: row numbers are words of a tokenizer of their own."""
    from epochs import converted, pairs, sources
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    with converted(rows, ".tokenizer") as (folder, is_old):
        if is_old:
            known = {"[UNK]": 0, "row": 1, "word": WORDS + 2, **{str(n): n + 2 for n in range(WORDS)}}
            words = Tokenizer(WordLevel(known, unk_token="[UNK]"))
            words.pre_tokenizer = WhitespaceSplit()
            folder.mkdir()
            words.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(
                '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[UNK]", "eos_token": "[UNK]"}'
            )
    plan = {"batch_size": o["batch_size"] * o["world_size"], "micro_batch_size": 4, "epochs": o["epochs"],
            "seed": o["seed"], "shuffle": "full" if o["shuffle"] else "none"}  # fmt: skip
    if o.get("packed"):
        del plan["micro_batch_size"]
        plan.update(layout="packed", micro_batch_tokens=12)
    if o.get("pairs"):
        source = {"path": str(pairs(rows)), "format": "preference"}
        return {
            "source": source,
            "tokenizer": {"name": str(folder)},
            "cache": {"root": str(rows.parent / "cache")},
            "plan": plan,
        }
    paths = {path.stem: {"path": str(path), "format": "text"} for path in sources(rows, o)}
    mixture = {"sources": {name: {"source": one, "weight": 0.5} for name, one in paths.items()}}
    return {**({"source": paths["rows"]} if len(paths) == 1 else {"mixture": mixture}), "tokenizer": {"name": str(folder)},
            "cache": {"root": str(rows.parent / "cache")}, "plan": plan}  # fmt: skip


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            self.loader = self.open(job_of(rows, o), o)

    def open(self, job: dict[str, Any], o: dict[str, Any]) -> Any:
        return raysvc.load(job, rank=o["rank"], dp_size=o["world_size"])

    def batches(self) -> Iterator[list[int]]:
        for step in self.loader.steps():
            self.loader.commit(step.index)
            yield [row for shard in step.shards for row in _rows(shard.arrays["input_ids"])]

    def save(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def _rows(input_ids: Any) -> list[int]:
    """Row numbers, which a word of each row says; padding has none."""
    return [int(word) - 2 for word in input_ids.reshape(-1).tolist() if 2 <= word < WORDS + 2]


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
