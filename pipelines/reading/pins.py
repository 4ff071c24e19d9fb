"""Records what the bytes of a file were when it was scanned, and checks that a later read saw the same.

A scan takes a digest of every block of a file's content. Whoever reads a part of it later reads whole blocks and compares.
The digest finds changes, it is no defence: whoever may write a source may write anything before it is scanned.

Always true:
- blocks are of the content, uncompressed, so a digest does not depend on how a file is stored;
- a byte that is handed out lies in a block whose digest was compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import xxhash

from raysvc.errors import SourceError

BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 1 << 15  # 32 GiB in blocks of 1 MiB; the blocks of larger files are larger


@dataclass(frozen=True)
class Pins:
    """Digests of consecutive blocks.

    Attributes:
        size: bytes of the whole content.
        block_bytes: of every block but the last one of the content.
        first: index of the first block that has a digest here.
        digests: XXH3-128 in hex.
    """

    size: int
    block_bytes: int
    first: int
    digests: tuple[str, ...]

    @property
    def end(self) -> int:
        """The byte behind the last one that has a digest here."""
        return min(self.size, (self.first + len(self.digests)) * self.block_bytes)

    def span(self, start: int, end: int) -> Pins:
        """Only the blocks that bytes [start, end) touch."""
        low, high = start // self.block_bytes, -(-end // self.block_bytes)
        return replace(self, first=low, digests=self.digests[low - self.first : high - self.first])

    def aligned(self, start: int, end: int) -> tuple[int, int]:
        """The same range, grown to whole blocks."""
        low = start // self.block_bytes * self.block_bytes
        return low, min(self.size, -(-end // self.block_bytes) * self.block_bytes)

    def check(self, start: int, data: memoryview, path: str) -> None:
        """Compare whole blocks from `start` on.

        Raises:
            SourceError: they are not what the scan saw.
        """
        index = start // self.block_bytes - self.first
        if index < 0 or start + len(data) > self.end:
            raise changed(path)  # bytes that no read of the scanned file asks for
        for at in range(0, len(data), self.block_bytes):
            block = data[at : at + self.block_bytes]
            if xxhash.xxh3_128_hexdigest(block) != self.digests[index + at // self.block_bytes]:
                raise changed(path)


def changed(path: str) -> SourceError:
    """A file is not what was scanned."""
    return SourceError(
        f"source file {path!r}", "changed while it was tokenized", "run again when it is finished"
    )


def block_bytes_for(num_bytes: int) -> int:
    """The size of blocks for a file that a listing shows with so many bytes."""
    size = BLOCK_BYTES
    while num_bytes > size * MOST_BLOCKS:
        size *= 2
    return size


class PinHasher:
    """Takes the digests while a file streams by."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._open = xxhash.xxh3_128()  # of the block that is not complete
        self._room = block_bytes
        self._size = 0
        self._digests: list[str] = []

    def feed(self, data: bytes) -> None:
        """The next bytes, as many as there are."""
        view = memoryview(data)
        self._size += len(view)
        while len(view):
            part = view[: self._room]
            self._open.update(part)
            self._room -= len(part)
            view = view[len(part) :]
            if self._room == 0:
                self._close()

    def finish(self) -> Pins:
        """All of them."""
        if self._room < self._block_bytes:
            self._close()
        return Pins(self._size, self._block_bytes, 0, tuple(self._digests))

    def _close(self) -> None:
        self._digests.append(self._open.hexdigest())
        self._open, self._room = xxhash.xxh3_128(), self._block_bytes
