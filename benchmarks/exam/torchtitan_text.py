"""torchtitan's HuggingFaceTextDataLoader: rows one after the other in lines of 12 tokens, cut where a line ends."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from words import KNOWN, ids_of

VERSION = f"torchtitan {importlib.metadata.version('torchtitan')}"
PROMISE = (
    "the data loader's state is in the checkpoint, so that a run goes on at the row and token where it was"
)
SETTINGS = "HuggingFaceTextDataLoader(seq_len=12, infinite, num_workers=0) over a map-style data set; its own order: no seed to set"
NOT_OFFERED = {
    "differs": "the order of an epoch follows from its number alone; the first one is that of the file",
    "end": "an epoch ends inside a line, and so inside a batch",
    "world": "the loader refuses the state: another number of ranks is not supported yet",
    "uneven": "a run is a number of steps of a stream that has no end",
    "mixture": "weights are of an interleaved loader, of lines",
    "stream": "rows are what `datasets` maps into memory, as in hf_trainer",
}
IMPORTS = ("torch", "torchtitan.hf_datasets.text_datasets")
BEGIN = KNOWN["[UNK]"]


class _Words:
    """A tokenizer as torchtitan calls it."""

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [BEGIN, *map(int, text.split()), KNOWN["[PAD]"]]


def _words(sample: dict[str, Any]) -> str:
    return " ".join(map(str, sample.get("input_ids") or ids_of(sample["text"])))


class Loader:
    """A row is given with the batch that has its last token."""

    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        from torchtitan.hf_datasets import DatasetConfig, text_datasets

        text_datasets.DATASETS["rows"] = DatasetConfig(str(rows), _read, _words)
        config = text_datasets.HuggingFaceTextDataLoader.Config(
            dataset="rows", infinite=True, num_workers=o["workers"]
        )
        self.loader = text_datasets.HuggingFaceTextDataLoader(
            config, dp_world_size=o["world_size"], dp_rank=o["rank"], tokenizer=_Words(), seq_len=12, local_batch_size=o["batch_size"],
        )  # fmt: skip
        self.o, self.given = o, 0
        self.open_rows: list[list[int]] = [[] for _ in range(max(1, o["workers"]))]
        count = sum(1 for _ in rows.open())
        self.left = o["epochs"] * (count // o["world_size"] + (o["rank"] < count % o["world_size"]))

    def batches(self) -> Iterator[list[Any]]:
        for inputs, _ in self.loader:
            done, worker = [], self.given % len(self.open_rows)  # workers take turns
            self.given += 1
            for token in inputs["input"].reshape(-1).tolist():
                if token != BEGIN:
                    self.open_rows[worker].append(token)
                elif self.open_rows[worker]:
                    done.append(self.open_rows[worker])
                    self.open_rows[worker] = []
            done = done[: self.left]
            self.left -= len(done)
            yield done if self.o.get("ids") else [row[1] - 2 for row in done]
            if not self.left:
                break

    def save(self) -> Any:
        return {"loader": self.loader.state_dict(), "mine": (self.open_rows, self.given, self.left)}

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state["loader"])
        self.open_rows, self.given, self.left = state["mine"]


def _read(path: str) -> Any:
    from datasets import Dataset

    folder = Path(path).parent / "hf"
    return Dataset.from_json(path, cache_dir=str(folder))


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
