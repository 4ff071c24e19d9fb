"""Workers without a model. Each of their processes imports this module, which imports little, and nothing of the tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from raysvc.collate.row_values import RowValues, gather_rows, with_columns


class FakeWorker:
    """Answers at once and remembers when it was asked for what."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.log: list[tuple[str, Any, float]] = []
        self.staged: dict[Any, Any] = {}
        self.model = True
        self.broken = -1

    def stage(self, key: Any, shard: Any, columns: Any = None, loss_weight: float = 1.0) -> int:
        self.staged[key] = shard if columns is None else with_columns(shard, columns)
        return 0

    def forward(self, key: Any) -> RowValues:
        assert self.model
        shard = self._take(key)
        self._note("forward", self.number)
        return gather_rows(shard, {"logprobs": shard.arrays["input_ids"] * 2.0})

    def forward_backward(self, key: Any, loss: Any) -> dict[str, float]:
        assert self.model
        shard = self._take(key)
        self._note("forward_backward", sorted(shard.arrays))
        return {"loss": 0.5, "ratio_max": float(self.number), "lr": 0.1}

    def optim_step(self) -> dict[str, float]:
        self._note("optim_step", None)
        return {"grad_norm": 1.0}

    def place(self, part: str, on_device: bool) -> None:
        self._note("place", (part, on_device))
        if part == "model":
            self.model = on_device

    def set_lr(self, learning_rate: float) -> None:
        self._note("set_lr", learning_rate)

    def evaluate(self, key: Any) -> RowValues:
        assert self.model
        shard = self._take(key)
        self._note("evaluate", self.number)
        return gather_rows(shard, {})

    def evaluate_loss(self, key: Any) -> dict[str, float]:
        assert self.model
        self._take(key)
        self._note("evaluate_loss", self.number)
        return {"loss": 0.5}

    def save_checkpoint(self, folder: str) -> None:
        if folder == "/disk":
            raise OSError(f"{folder} is full")
        self._note("save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        self._note("load_checkpoint", folder)

    def save_hf_model(self, folder: str) -> None:
        self._note("save_hf_model", folder)

    def export_weights(self) -> Any:
        assert self.model
        if self.number == self.broken:
            raise KeyError("broken")
        self._note("export_weights", self.number)
        return f"weights of {self.number}" if self.number == 0 else None

    def import_weights(self, weights: Any) -> None:
        assert self.model
        self._note("import_weights", weights)

    def break_(self, number: int) -> None:
        self.broken = number

    def node_id(self) -> str:
        return f"node-{self.number % 2}"

    def address(self) -> str:
        return ""

    def setup(self, address: str) -> None:
        self._note("setup", address)

    def call_after(self, name: str, num_after: int, *values: Any) -> Any:
        return getattr(self, name)(*values[num_after:])

    def read(self) -> list[tuple[str, Any, float]]:
        return self.log

    def _take(self, key: Any) -> Any:
        while key not in self.staged:
            time.sleep(0.001)
        return self.staged[key]

    def _note(self, name: str, what: Any) -> None:
        self.log.append((name, what, time.monotonic()))


class MeetingWorker:
    """Its ranks meet in `meet`, as in a collective: who comes waits for the others."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank

    def meet(self, failing: int) -> int:
        if self._rank == failing:
            raise ValueError("a bad row")
        while not (self._folder / "all").exists():
            time.sleep(0.05)
        return self._rank

    def drop(self, dying: int) -> None:
        if self._rank == dying:
            time.sleep(0.5)  # the others lose their connection first
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("Connection closed by peer [192.0.2.2]:1234")

    def pid(self) -> int:
        return os.getpid()
