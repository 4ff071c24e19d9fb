"""What adapters of loaders of prompts share: rows as conversations, and a loop that counts steps and drops a short last batch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from words import ids_of, text_of

TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
GENERATORS = 8  # that sample at once
ONE = "one loader of the driver gives the batch of all ranks"
NOT_OFFERED = {
    "end": "a short batch is dropped: the case's 51st batch is the next epoch's first",
    **dict.fromkeys(("ranks", "world", "uneven"), ONE),
    "packed": "rows are prompts, which an engine reads",
    "mixture": "files are put one after the other",
    "stream": "rows are what `datasets` maps into memory, as in hf_trainer",
}


class Prompts(ABC):
    """Counts steps, and epochs by them; an adapter makes the loader, and reads texts out of its batches."""

    loader: Any

    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        self.o, self.steps = o, 0
        self.loader = self.made(prompts(rows), o)

    @abstractmethod
    def made(self, file: Path, o: dict[str, Any]) -> Any:
        """The loader of a file of prompts."""

    @abstractmethod
    def texts(self, batch: Any) -> list[str]:
        """The prompts of a batch."""

    def batches(self) -> Iterator[list[Any]]:
        for _ in range(self.steps // len(self.loader), self.o["epochs"]):
            for batch in self.loader:
                self.steps += 1
                ids = [ids_of(text) for text in self.texts(batch)]
                yield ids if self.o.get("ids") else [row[1] - 2 for row in ids]

    def save(self) -> Any:
        return {"steps": self.steps, "loader": self.loader.state_dict()}

    def load(self, state: Any) -> None:
        self.steps = state["steps"]
        self.loader.load_state_dict(state["loader"])


def prompts(rows: Path) -> Path:
    """Rows as conversations of one message, at the same place where they change."""
    path = rows.with_name("prompts.jsonl")
    made = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        text = row.get("text") or text_of(row["row"])
        made.append(json.dumps({"prompt": [{"role": "user", "content": text}], "data_source": "rows"}) + "\n")
    if not path.exists() or path.read_text() != "".join(made):
        path.write_text("".join(made))
    return path


def sampling_s(row: int) -> float:
    """How long the answers of a row take: up to 70 ms, the next row's another time, so that they end in another order."""
    return 0.01 * (row * 5 % 8)
