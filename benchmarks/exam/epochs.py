"""What adapters of loaders with a state of their own share: a loop over epochs, and the epoch beside the loader's state."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from table import REJECTED, SECOND
from words import parts_of


class Epochs:
    """A contestant, see `play.py`.

    Args:
        loader: of one epoch, with `state_dict` and `load_state_dict`.
        epochs: how many.
        rows_of: batch of the loader -> its row numbers.
        epoch_of: state of the loader -> epoch, where it is not the one that the loop was in.
        set_epoch: is told the epoch before each one; None: the loader counts by itself.
    """

    def __init__(
        self,
        loader: Any,
        epochs: int,
        rows_of: Callable[[Any], list[int]],
        set_epoch: Callable[[int], None] | None = None,
        epoch_of: Callable[[Any], int] | None = None,
    ) -> None:
        self._epoch_of = epoch_of
        self._loader, self._epochs, self._rows_of, self._set_epoch = loader, epochs, rows_of, set_epoch
        self._epoch = 0

    def batches(self) -> Iterator[list[int]]:
        for epoch in range(self._epoch, self._epochs):
            self._begin(epoch)
            for batch in self._loader:
                yield self._rows_of(batch)

    def save(self) -> Any:
        state = self._loader.state_dict()
        return {"epoch": self._epoch if self._epoch_of is None else self._epoch_of(state), "loader": state}

    def load(self, state: Any) -> None:
        self._begin(state["epoch"])
        self._loader.load_state_dict(state["loader"])

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        if self._set_epoch is not None:
            self._set_epoch(epoch)


def sources(rows: Path, o: dict[str, Any]) -> list[Path]:
    """The files that are read: of a mixture, two, which are written here."""
    if not o.get("mixture"):
        return [rows]
    lines = rows.read_text().splitlines(keepends=True)
    both = [[], []]
    for line in lines:
        both[json.loads(line)["row"] >= SECOND].append(line)
    paths = [rows.with_name(name) for name in ("first.jsonl", "second.jsonl")]
    for path, some in zip(paths, both, strict=True):
        if not path.exists():
            path.write_text("".join(some))
    return paths


def pairs(rows: Path) -> Path:
    """Rows of a chosen and a rejected answer, whose number is that of the row and `REJECTED` more."""
    path = rows.with_name("pairs.jsonl")
    if not path.exists():
        made = [
            {"prompt": "row", "chosen": f" {row}", "rejected": f" {row + REJECTED}"} for row in numbers(rows)
        ]
        path.write_text("".join(json.dumps(one) + "\n" for one in made))
    return path


def ids(rows: Path) -> list[list[int]]:
    """Ids of the rows of a file."""
    return [json.loads(line)["input_ids"] for line in rows.read_text().splitlines()]


def numbers(rows: Path) -> list[int]:
    """Row numbers of a file."""
    return [json.loads(line)["row"] for line in rows.read_text().splitlines()]


def long_rows(rows: Path) -> Iterator[Any]:
    """Ids of the rows of a stream, an array each, read some at a time."""
    import pyarrow.parquet as pq

    for part in parts_of(rows):
        for batch in pq.ParquetFile(part).iter_batches(64, columns=["input_ids"]):
            yield from batch.column(0).flatten().to_numpy().reshape(len(batch), -1)


@contextmanager
def converted(rows: Path, suffix: str) -> Iterator[tuple[Path, bool]]:
    """Gives the folder of rows in a contestant's own format, and whether it is to be written: it is not there, or the rows changed.

    One process has it at a time.
    """
    folder, of = rows.with_suffix(suffix), rows.with_suffix(f"{suffix}.of")
    with rows.with_suffix(f"{suffix}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = rows.read_text()
        is_old = not of.exists() or of.read_text() != text
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
        yield folder, is_old
        of.write_text(text)
