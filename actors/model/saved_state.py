"""Puts together what the ranks of a checkpoint wrote, for any number of ranks.

This file imports torch; import it inside the function that saves or loads.

    <folder>/model-<rank>.safetensors      weights and buffers
    <folder>/optimizer-<rank>.safetensors  the optimizer's state of each weight
    <folder>/rank-<rank>.json              which rows of which tensors these are, digests, numbers, and its own checksum

1. A tensor of FSDP lies in rows over the ranks, and each writes its own. Any other one is whole and equal on all ranks; the rank with the
   fewest bytes so far writes it.
2. Who loads reads every `rank-<rank>.json`, then of each tensor the pieces that hold rows of its own.

Always true:
- a tensor has one name, and its pieces hold each row once, whatever ranks and strategy wrote it;
- a piece is checked as a whole before a row of it is used, and nothing is unpickled;
- a folder that an earlier version wrote, with pickles, is refused unread.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raysvc.actors.model.tensor_file import Digests, TensorFile, write_tensors
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.local.sealed import opened, sealed
from raysvc.errors import CheckpointDamaged, CheckpointTooOld, StateMismatch

FORMAT = 2  # 1 held pickles
Kind = str  # `model` or `optimizer`


@dataclass(frozen=True)
class Share:
    """The rows of a tensor that this rank holds.

    Attributes:
        rows: of this rank; of a tensor without axes the tensor.
        first: number of the first one.
        shape: of the whole tensor.
        split: whether the other ranks hold other rows.
    """

    rows: torch.Tensor
    first: int
    shape: tuple[int, ...]
    split: bool


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor of this shape in the file of a rank."""

    rank: int
    first: int
    count: int
    shape: tuple[int, ...]


def share_of(tensor: Any) -> Share:
    """This rank's share of a plain tensor, or of one that FSDP splits by rows."""
    if not hasattr(tensor, "placements"):
        return Share(tensor, 0, tuple(tensor.shape), split=False)
    (placement,), mesh = tensor.placements, tensor.device_mesh
    if placement.is_replicate():
        return Share(tensor.to_local(), 0, tuple(tensor.shape), split=False)
    assert placement.is_shard(0), f"FSDP2 splits by rows, this is {placement}"
    most = -(-tensor.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, tensor.shape[0])
    return Share(tensor.to_local(), first, tuple(tensor.shape), split=True)


def write_shares(
    folder: Path, kind: Kind, rank: int, num_ranks: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Write what this rank writes of `tensors`, which all ranks name alike; gives what `rank-<rank>.json` says of it."""
    shares = {name: share_of(tensor) for name, tensor in tensors.items()}
    loads, mine = [0] * num_ranks, {}
    for name, share in shares.items():
        if share.split:
            mine[name] = share
            continue
        writer = loads.index(min(loads))
        loads[writer] += share.rows.nbytes + 1
        if writer == rank:
            mine[name] = share
    rows = {name: share.rows for name, share in mine.items()}
    written = write_tensors(folder / _file(kind, rank), rows)
    places = {
        name: [share.first, _num_rows(share.rows.shape), list(share.shape), written.tensors[name]]
        for name, share in mine.items()
    }
    return {"header": written.header, "tensors": places}


def write_rank(folder: Path, rank: int, facts: Mapping[str, Any], files: Sequence[Path] = ()) -> None:
    """Write `rank-<rank>.json`, which makes a rank's part whole; `files` are those beside it that get a digest too."""
    digests = {path.name: checksum_of(path.read_bytes()) for path in files}
    fields = {**facts, "format": FORMAT, "rank": rank, "files": digests}
    (folder / _rank_file(rank)).write_bytes(sealed(fields))


class SavedState:
    """A checkpoint of any number of ranks, open for reading.

    Attributes:
        ranks: what each wrote of itself.

    Raises:
        CheckpointDamaged: a file is missing, or not what was written.
        StateMismatch: it is no checkpoint, or one of another version.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = _read_rank(folder, 0)
        self.ranks = [first, *(_read_rank(folder, rank) for rank in range(1, int(first["dp_size"])))]
        for rank, facts in enumerate(self.ranks):
            if any(facts[name] != first[name] for name in ("dp_size", "optimizer_steps")):
                raise CheckpointDamaged.of(folder / _rank_file(rank), "is of another checkpoint")
        for name, digest in first["files"].items():
            path = folder / name
            if not path.exists() or checksum_of(path.read_bytes()) != digest:
                raise CheckpointDamaged.of(path, "is damaged" if path.exists() else "is not there")
        self._pieces: dict[tuple[Kind, str], list[_Piece]] = defaultdict(list)  # in order of their rows
        for rank, facts in enumerate(self.ranks):
            for kind in ("model", "optimizer"):
                for name, (begin, count, shape, _) in facts[kind]["tensors"].items():
                    self._pieces[kind, name].append(_Piece(rank, begin, count, tuple(shape)))
        self._files: dict[tuple[Kind, int], TensorFile] = {}

    def names(self, kind: Kind) -> list[str]:
        """The names of all tensors."""
        return [name for of, name in self._pieces if of == kind]

    def shape(self, kind: Kind, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return self._pieces[kind, name][0].shape

    def whole(self, kind: Kind, name: str) -> torch.Tensor:
        """A tensor in host memory."""
        return self.rows(kind, name, 0, _num_rows(self.shape(kind, name)))

    def rows(self, kind: Kind, name: str, first: int, count: int) -> torch.Tensor:
        """Rows of a tensor in host memory; of one without axes the tensor.

        Raises:
            CheckpointDamaged: the bytes are not those that were written.
        """
        end, parts = first + count, []
        for piece in self._pieces[kind, name]:
            begin, stop = max(first, piece.first), min(end, piece.first + piece.count)
            if begin < stop or not count:
                read = self._open(kind, piece.rank).read(name)
                parts.append(
                    read[begin - piece.first : max(stop, begin) - piece.first] if piece.shape else read
                )
            if not count:
                return parts[0][:0]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        if _num_rows(found.shape) != count:
            raise CheckpointDamaged.of(self._folder / _rank_file(0), f"lacks rows of {name}")
        return found

    def close(self) -> None:
        """Close what is open."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, kind: Kind, rank: int) -> TensorFile:
        if (kind, rank) not in self._files:
            facts = self.ranks[rank][kind]
            digests = {name: digest for name, (*_, digest) in facts["tensors"].items()}
            path = self._folder / _file(kind, rank)
            self._files[kind, rank] = TensorFile(path, Digests(facts["header"], digests))
        return self._files[kind, rank]


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _file(kind: Kind, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def _read_rank(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / _rank_file(rank)
    try:
        facts = opened(path.read_bytes())
    except FileNotFoundError:
        there = os.listdir(folder) if folder.is_dir() else []
        if ".metadata" in there or any(name.endswith(".distcp") for name in there):
            raise CheckpointTooOld.of(folder) from None
        raise CheckpointDamaged.of(path, "is not there") from None
    except ValueError as error:
        raise CheckpointDamaged.of(path, str(error)) from None
    if facts.get("format") != FORMAT:
        what = f"has format {facts.get('format')}, and this raysvc reads {FORMAT}"
        raise StateMismatch(str(path), what, "use the raysvc that wrote it")
    return facts
