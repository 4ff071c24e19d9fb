"""A checkpoint of a loop of one's own, in one file: weights, optimizer, and where its data is.

Always true:
- the file is the last checkpoint, whole, whenever the loop is killed;
- what is restored is of one moment: modules and data belong together;
- nothing of it is unpickled but tensors and plain values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.errors import StateMismatch

if TYPE_CHECKING:
    from raysvc.client.batch_client import BatchClient

DATA = "data"


class LoopCheckpoint:
    """See the module.

    Args:
        path: of the file; its folder is made.
        client: that the loop is attached with.
        parts: by name, what has a `state_dict` and a `load_state_dict`: model, optimizer, schedule.
    """

    def __init__(self, path: str | Path, client: BatchClient, **parts: Any) -> None:
        self.path, self._client, self._parts = Path(path), client, parts
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        """Replace the checkpoint by one of now; the steps that are committed are trained in it."""
        import torch

        state = {name: part.state_dict() for name, part in self._parts.items()}
        draft = self.path.with_name(f".{self.path.name}.new")
        with draft.open("wb") as file:
            torch.save({**state, DATA: self._client.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)

    def restore(self) -> int:
        """Load the checkpoint, and go to its step; without one go to step 0, whatever was committed. Returns the next step to train.

        Raises:
            StateMismatch: it is of other parts, or of other data.
        """
        import torch

        if not self.path.exists():
            self._client.rewind(0)
            return 0
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        if saved.keys() != {*self._parts, DATA}:
            there = ", ".join(sorted(saved.keys() - {DATA}))
            raise StateMismatch(
                str(self.path),
                f"holds {there}, not {', '.join(sorted(self._parts))}",
                f"restore {', '.join(sorted(self._parts))}",
            )
        self._client.load_state_dict(saved[DATA])
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        return self._client.frontier
