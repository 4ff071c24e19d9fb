"""Decides where a file is cut.

Always true:
- cuts are in the order of the rows, they touch and do not overlap;
- a cut of a line file starts and ends at a line's end;
- a cut of a Parquet file starts and ends between row groups, unless a group is larger than two slices;
- a line longer than `MAX_LINE_BYTES` is a cut of its own, so that nobody has to hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

MAX_LINE_BYTES = 64 << 20  # a conversation with images has some 10 MB; the parser holds a line several times
NEWLINE = ord("\n")
Cut = tuple[int, int, int]  # start, end, rows; bytes of a line file, else rows


def even_cuts(num_rows: int, num_slices: int) -> list[Cut]:
    """Cut rows into slices whose sizes differ by at most one: (start, end, rows) each, half-open."""
    edges = [num_rows * i // num_slices for i in range(num_slices + 1)] if num_slices else [0]
    return [(a, b, b - a) for a, b in pairwise(edges)]


def group_cuts(groups: Sequence[int], num_slices: int) -> list[Cut]:
    """Cut rows that lie in groups which can only be read whole: at their edges, where a group is not larger than two slices.

    Args:
        groups: rows of each.
        num_slices: about as many cuts.
    """
    most = max(1, -(-sum(groups) // max(num_slices, 1)))
    cuts: list[Cut] = []
    begin = end = 0  # of the open cut
    for rows in groups:
        if end > begin and end + rows - begin > most:
            cuts.append((begin, end, end - begin))
            begin = end
        end += rows
        if rows > 2 * most:
            parts = even_cuts(rows, -(-rows // most))
            cuts += [(begin + a, begin + b, count) for a, b, count in parts]
            begin = end
    return [*cuts, (begin, end, end - begin)] if end > begin else cuts


class LineCutter:
    """Finds slice ends at line ends while a file streams by; counts lines (the last may lack its newline)."""

    def __init__(self, slice_bytes: int, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._slice_bytes, self._max_line_bytes = slice_bytes, max_line_bytes
        self._cuts: list[Cut] = []
        self._start = 0  # of the open slice
        self._rows = 0  # lines ended in the open slice
        self._read = 0
        self._line = 0  # start of the open line

    def feed(self, block: bytes) -> None:
        """The next bytes of the file."""
        for at in range(0, len(block), self._max_line_bytes):
            self._feed(block[at : at + self._max_line_bytes])  # a line that is too long crosses its edge

    def _feed(self, block: bytes) -> None:
        pos = self._end_open_line(block)
        while pos < len(block):
            target = self._start + self._slice_bytes - self._read  # block offset where the slice is full
            cut = block.find(b"\n", max(target, pos)) if target < len(block) else -1
            if cut < 0:
                self._rows += _newlines(block, pos, len(block))
                break
            rows = self._rows + _newlines(block, pos, cut + 1)
            end = self._read + cut + 1
            self._cuts.append((self._start, end, rows))
            self._start, self._rows, pos = end, 0, cut + 1
        last = block.rfind(b"\n")
        if last >= 0:
            self._line = self._read + last + 1
        self._read += len(block)

    def _end_open_line(self, block: bytes) -> int:
        """Returns where the rest of the block begins: behind the open line if that was too long."""
        first = block.find(b"\n")
        if first < 0 or not self._cut_long_line(self._read + first + 1):
            return 0
        return first + 1

    def _cut_long_line(self, end: int) -> bool:
        if end - self._line <= self._max_line_bytes:
            return False
        if self._line > self._start:
            self._cuts.append((self._start, self._line, self._rows))
        self._cuts.append((self._line, end, 1))
        self._start, self._rows, self._line = end, 0, end
        return True

    def finish(self) -> list[Cut]:
        """All cuts."""
        if self._read > self._line and self._cut_long_line(self._read):
            return self._cuts
        if self._read > self._start:
            self._cuts.append((self._start, self._read, self._rows + (self._read > self._line)))
        return self._cuts


def _newlines(block: bytes, start: int, end: int) -> int:
    """Counts in [start, end). `bytes.count` takes twice as long, and the thread that hashes the file would wait for its lock."""
    return int(np.count_nonzero(np.frombuffer(block, np.uint8)[start:end] == NEWLINE))
