"""raysvc without a server: raysvc.load. `raysvc_served` builds on it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from words import WORDS, cut_all, long_number, parts_of

import raysvc

VERSION = f"raysvc {raysvc.__version__}"
PROMISE = "rows are trained once each, in one order, whatever is killed and on however many ranks it goes on"
SETTINGS = "plan.shuffle: full, steps(), commit() after each"
OFFERS = ("pairs",)
NOT_OFFERED = {
    "workers": "DataLoader(num_workers=) above 0 is refused by name: rows are read ahead by a thread, or by a server"
}
IMPORTS = ("torch", "transformers", "raysvc.loader")


def job_of(rows: Path, o: dict[str, Any]) -> dict[str, Any]:
    """The job: row numbers are words of a tokenizer of their own."""
    from epochs import converted, pairs, sources
    from words import save_tokenizer

    with converted(rows, ".tokenizer") as (folder, is_old):
        if is_old:
            save_tokenizer(folder)
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
    form = "pretokenized" if o.get("ids") or o.get("long") else "text"
    if o.get("long"):
        rows = Path(parts_of(rows)[0]).parent
    paths = {
        "rows" if o.get("long") else path.stem: {"path": str(path), "format": form}
        for path in sources(rows, o)
    }
    mixture = {"sources": {name: {"source": one, "weight": 0.5} for name, one in paths.items()}}
    # of long rows, the process that asks makes the entry, and starts no others for it
    return {**({"source": paths["rows"]} if len(paths) == 1 else {"mixture": mixture}), "tokenizer": {"name": str(folder)},
            "cache": {"root": str(rows.parent / "cache")}, "plan": plan,
            **({"workers": {"max": 1}} if o.get("long") else {})}  # fmt: skip


class Loader:
    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        self.with_ids, self.is_long = o.get("ids", False), o.get("long", False)
        with contextlib.redirect_stderr(io.StringIO()):
            self.loader = self.open(job_of(rows, o), o)

    def open(self, job: dict[str, Any], o: dict[str, Any]) -> Any:
        return raysvc.load(job, rank=o["rank"], dp_size=o["world_size"])

    def batches(self) -> Iterator[list[int]]:
        for step in self.loader.steps():
            self.loader.commit(step.index)
            yield [row for shard in step.shards for row in self.rows(shard.arrays)]

    def rows(self, arrays: Any) -> list[Any]:
        if self.is_long:
            return [*map(long_number, arrays["input_ids"])]
        if not self.with_ids:
            return _numbers(arrays["input_ids"])
        of = arrays["segment_ids" if "segment_ids" in arrays else "attention_mask"]
        return cut_all(arrays["input_ids"].tolist(), of.tolist())

    def save(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def _numbers(input_ids: Any) -> list[int]:
    """Row numbers, which a word of each row says; padding has none."""
    return [int(word) - 2 for word in input_ids.reshape(-1).tolist() if 2 <= word < WORDS + 2]


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
