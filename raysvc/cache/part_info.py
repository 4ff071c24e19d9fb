"""Defines what a manifest or a receipt says of one part.

Always true:
- what `part_info` returns is safe to act on: the name stays in its folder, counts and checksums are some, offsets lie in the file.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from raysvc.cache import names
from raysvc.cache.local.checksum import BLOCK, DIGITS
from raysvc.errors import EntryError

REBUILD = "build it again with cache.force: true"
_DIGITS = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True)
class PartInfo:
    """One Arrow IPC stream file that holds exactly one record batch.

    Attributes:
        name: file in the entry's folder.
        num_rows, num_tokens: what it holds.
        num_bytes: size of the file.
        checksum: XXH3-128 of the whole file, 32 hex digits.
        offsets_start: where in the file the token offsets lie, int32 [num_rows + 1]; 0 without rows.
        offsets_checksum: of these bytes, so that lengths can be read alone.
        blocks: checksums of the blocks of the file, see `raysvc.cache.local.checksum`; empty: the whole
            file is compared when it is read first.
    """

    name: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    checksum: str
    offsets_start: int
    offsets_checksum: str
    blocks: str = ""


class LazyParts(Sequence[PartInfo]):
    """Parts that are looked up one by one, when they are asked for; a subclass says how many there are, and what one is."""

    @abstractmethod
    def part(self, index: int) -> PartInfo:
        """One of them."""

    @overload
    def __getitem__(self, index: int) -> PartInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PartInfo]: ...
    def __getitem__(self, index: int | slice) -> PartInfo | Sequence[PartInfo]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.part(index)

    def __iter__(self) -> Iterator[PartInfo]:
        for index in range(len(self)):
            yield self.part(index)


def part_info(raw: Any, where: str) -> PartInfo:
    """A part of plain data.

    Args:
        raw: its fields.
        where: for messages.

    Raises:
        EntryError: it is damaged.
    """
    if not isinstance(raw, dict):
        raise damaged(where, "a part is not an object")
    part = PartInfo(
        name=str(raw.get("name")),
        num_rows=count(raw, "num_rows", where),
        num_tokens=count(raw, "num_tokens", where),
        num_bytes=count(raw, "num_bytes", where),
        checksum=str(raw.get("checksum")),
        offsets_start=count(raw, "offsets_start", where),
        offsets_checksum=str(raw.get("offsets_checksum")),
        blocks=str(raw.get("blocks", "")),
    )
    if not names.PART.fullmatch(part.name):
        raise damaged(where, f"{part.name[:80]!r} is not the name of a part")
    if not are_checksums(part.checksum + part.offsets_checksum, 2):
        raise damaged(where, f"a checksum of {part.name} is not one")
    num_blocks = -(-part.num_bytes // BLOCK)
    if part.blocks and (not _DIGITS.fullmatch(part.blocks) or len(part.blocks) != DIGITS * num_blocks):
        raise damaged(where, f"the checksums of the blocks of {part.name} are not {num_blocks}")
    if part.offsets_start + 4 * (part.num_rows + 1) > part.num_bytes:
        raise damaged(where, f"the offsets of {part.name} lie outside the file")
    return part


def are_checksums(digits: str, number: int) -> bool:
    """Returns whether these are so many checksums of files, one after the other."""
    return len(digits) == 32 * number and _DIGITS.fullmatch(digits) is not None


def count(raw: Mapping[str, Any], name: str, where: str) -> int:
    """A field that counts something.

    Raises:
        EntryError: it does not.
    """
    value = raw.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise damaged(where, f"{name} is {str(value)[:40]!r}, not a count")
    return value


def damaged(where: str, what: str) -> EntryError:
    """That a file of an entry is not what its builder wrote."""
    return EntryError(where, what, REBUILD)
