"""Remembers the bytes of a mapped part that have been compared with what its builder wrote.

A part is checked in blocks of `BLOCK` bytes, each before the first row in it is read. So a random batch of a large
entry reads a block for each row, not every part; a scan compares every block once.

Always true:
- a range that `check` returned for holds the bytes that were written;
- a block is compared once for each mapping of its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.cache.local.checksum import BLOCK, DIGITS, block_checksum, checksum_of
from raysvc.errors import EntryError

if TYPE_CHECKING:
    import pyarrow as pa

    from raysvc.cache.part_info import PartInfo

SPAN = 4  # so many blocks in a row are compared without asking which of them are needed
Places = npt.NDArray[np.integer[Any]]


class Blocks:
    """The blocks of one mapped part.

    Args:
        buffer: the whole file.
        part: what it must be.
        where: URI of the entry, for messages.
    """

    def __init__(self, buffer: pa.Buffer, part: PartInfo, where: str) -> None:
        self._data, self._part, self._where = memoryview(buffer), part, where
        self._checked = np.zeros(-(-part.num_bytes // BLOCK), bool)
        self._all = False

    @property
    def is_done(self) -> bool:
        """Returns whether every byte was compared."""
        return self._all

    def check_neighbours(self, start: int, stop: int) -> bool:
        """Compare all blocks of one byte range, if they are few; whether they are.

        Raises:
            EntryError: bytes are not those that were written.
        """
        low, high = start // BLOCK, max(stop - 1, start) // BLOCK
        if high - low > SPAN:
            return False
        left = np.flatnonzero(~self._checked[low : high + 1])
        if len(left):
            self._compare(left + low)
        return True

    def check(self, starts: Places, stops: Places) -> None:
        """Compare the blocks of byte ranges.

        Args:
            starts, stops: first byte of each range, and the one after its last; [N].

        Raises:
            EntryError: bytes are not those that were written.
        """
        if self._all or not len(starts):
            return
        firsts, lasts = starts // BLOCK, np.maximum(stops - 1, starts) // BLOCK
        wanted = np.zeros(len(self._checked) + 1, np.int32)
        np.add.at(wanted, firsts, 1)
        np.add.at(wanted, lasts + 1, -1)
        self._compare(np.flatnonzero((np.cumsum(wanted[:-1]) > 0) & ~self._checked))

    def check_all(self) -> None:
        """Compare what has not been compared."""
        if not self._all:
            self._compare(np.flatnonzero(~self._checked))

    def _compare(self, blocks: npt.NDArray[np.intp]) -> None:
        if not self._part.blocks:  # an early entry has one checksum for the whole part
            self._whole()
            return
        for block in blocks.tolist():
            expected = self._part.blocks[block * DIGITS : (block + 1) * DIGITS]
            if block_checksum(self._data[block * BLOCK : (block + 1) * BLOCK]) != expected:
                self._refuse()
        self._checked[blocks] = True
        self._all = bool(self._checked.all())

    def _whole(self) -> None:
        if checksum_of(self._data) != self._part.checksum:
            self._refuse()
        self._all = True

    def _refuse(self) -> None:
        raise EntryError(
            f"{self._where}/{self._part.name}",
            "its bytes are not those that were written (checksum)",
            "run raysvc cache verify on the entry, then raysvc tokenize again",
        )
