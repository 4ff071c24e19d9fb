"""A checkpoint of a loop of one's own, in one file: weights, optimizer, and where its data is.

Always true:
- the file is the last checkpoint, whole, whenever the loop is killed;
- what is restored is of one moment: modules and data belong together;
- nothing of it is unpickled but tensors and plain values;
- it ends with a digest of what is before (XXH3-128): a file that is not what was written is refused by name. `torch.load` reads it too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from raysvc.cache.local.mmap import map_file
from raysvc.errors import StateMismatch

if TYPE_CHECKING:
    from raysvc.client.batch_client import BatchClient

DATA = "data"
MARK = b"raysvc-xxh3:"  # before the digest
ENDING = len(MARK) + 32
END_OF_ZIP = b"PK\x05\x06"  # 22 bytes before the end of what `torch.save` writes


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
            hashed = _Hashed(file)
            torch.save({**state, DATA: self._client.state_dict()}, hashed)
            file.write(MARK + hashed.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)

    def restore(self) -> int:
        """Load the checkpoint, and go to its step; without one go to step 0, whatever was committed. Returns the next step to train.

        Raises:
            StateMismatch: it is of other parts, of other data, or damaged.
        """
        import torch

        if not self.path.exists():
            self._client.rewind(0)
            return 0
        _check(self.path)
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  of an earlier version, without a digest: torch says it in many types
            raise _damaged(self.path, type(error).__name__) from None
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
        return self._client.next_step


class _Hashed:
    """A file that is written, as `torch.save` wants it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> int:
        """Writes and hashes."""
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Hands on what is held back."""
        self._file.flush()


def _check(path: Path) -> None:
    data = memoryview(map_file(path))
    if data[-len(END_OF_ZIP) - 18 : -18] == END_OF_ZIP:
        return  # an earlier version wrote it
    ending = bytes(data[-ENDING:])
    if ending != MARK + xxhash.xxh3_128_hexdigest(data[:-ENDING]).encode():
        raise _damaged(path, "its digest does not match")


def _damaged(path: Path, why: str) -> StateMismatch:
    return StateMismatch(str(path), f"is damaged ({why})", "restore it, or remove it and start again")
