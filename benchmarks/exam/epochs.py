"""What adapters of loaders with a state of their own share: a loop over epochs, and the epoch beside the loader's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Epochs:
    """A contestant, see `play.py`.

    Args:
        loader: of one epoch, with `state_dict` and `load_state_dict`.
        epochs: how many.
        rows_of: batch of the loader -> its row numbers.
        set_epoch: is told the epoch before each one; None: the loader counts by itself.
    """

    def __init__(
        self,
        loader: Any,
        epochs: int,
        rows_of: Callable[[Any], list[int]],
        set_epoch: Callable[[int], None] | None = None,
    ) -> None:
        self._loader, self._epochs, self._rows_of, self._set_epoch = loader, epochs, rows_of, set_epoch
        self._epoch = 0

    def batches(self) -> Iterator[list[int]]:
        for epoch in range(self._epoch, self._epochs):
            self._begin(epoch)
            for batch in self._loader:
                yield self._rows_of(batch)

    def save(self) -> Any:
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def load(self, state: Any) -> None:
        self._begin(state["epoch"])
        self._loader.load_state_dict(state["loader"])

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        if self._set_epoch is not None:
            self._set_epoch(epoch)
