"""Tensors in files of the format safetensors, written one at a time and checked while they are read.

This file imports torch; import it inside the function that saves or loads.

    8 bytes length of the header | header, JSON: name -> dtype, shape, place | the tensors, one after the other

`safetensors` itself reads what is written here. Its own functions take all tensors at once in host memory, and know no digest.

Always true:
- a file that is read runs no code: it holds JSON and numbers;
- header and tensors together are the whole file, and each has a digest (XXH3-128), so a changed bit anywhere is found by who reads it;
- a digest is made of bytes that were just copied, while they are in the processor's cache: 0.07 s for a gigabyte;
- nothing that differs from its digest gets into a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from raysvc.cache.local.checksum import checksum_of
from raysvc.errors import CheckpointDamaged

CHUNK = 1 << 18  # bytes that are copied at once; they fit a processor's cache
AT_MOST = 1 << 30  # bytes of a header
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Digests:
    """Holds what was written: of the header, and of each tensor by name."""

    header: str
    tensors: dict[str, str]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Digests:
    """Write tensors of any device; one at a time is in host memory."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        places[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(places, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    digests = {}
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for name, tensor in tensors.items():
            data = bytes_of(tensor.detach().cpu().contiguous())
            digests[name] = checksum_of(data)
            _write_all(file, data)
    return Digests(checksum_of(header), digests)


class TensorFile:
    """An open file of tensors.

    Args:
        path: of the file.
        digests: that it must have.

    Raises:
        CheckpointDamaged: it is not there, or its header differs.
    """

    def __init__(self, path: Path, digests: Digests) -> None:
        self._path, self._digests = path, digests
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise CheckpointDamaged.of(path, "is not there") from None
        size = path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if length > min(size - 8, AT_MOST):
            raise CheckpointDamaged.of(path, f"is cut off or damaged: it has {size} bytes")
        self._file.seek(0)
        header = self._file.read(8 + length)
        if checksum_of(header) != digests.header:
            raise CheckpointDamaged.of(path, "has a damaged header")
        self._begin, self._places = 8 + length, json.loads(header[8:])
        ends = [place["data_offsets"][1] for place in self._places.values()]
        if size != self._begin + max(ends, default=0):
            raise CheckpointDamaged.of(path, f"is cut off or damaged: it has {size} bytes")

    def read(self, name: str) -> torch.Tensor:
        """A tensor in host memory.

        Raises:
            CheckpointDamaged: it is not what was written.
        """
        place = self._places[name]
        tensor = torch.empty(place["shape"], dtype=DTYPES[place["dtype"]])
        data, found = bytes_of(tensor), xxhash.xxh3_128()
        self._file.seek(self._begin + place["data_offsets"][0])
        for at in range(0, len(data), CHUNK):
            chunk = data[at : at + CHUNK]
            if self._file.readinto(chunk) != len(chunk):
                raise CheckpointDamaged.of(self._path, f"ends inside of {name}")
            found.update(chunk)
        if found.hexdigest() != self._digests.tensors[name]:
            raise CheckpointDamaged.of(self._path, f"has damaged bytes in {name}")
        return tensor

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    flat: Any = tensor.reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
