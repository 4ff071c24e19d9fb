"""One look through a file: what its content is, where it is cut into slices, and the digests of its blocks."""

from __future__ import annotations

import base64
import hashlib
import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from raysvc.pipelines.reading.json_file import kind_of_json
from raysvc.pipelines.reading.pinned_file import ContentStream, reading
from raysvc.pipelines.reading.pins import BLOCK_BYTES, PinHasher, Pins, changed
from raysvc.pipelines.reading.readers import row_groups
from raysvc.pipelines.sources.cuts import Cut, LineCutter, group_cuts
from raysvc.pipelines.sources.file_stamp import store_tag
from raysvc.pipelines.sources.files import BYTE_KINDS, CSV_KINDS, LINE_KINDS, Kind, check_text, kind_of
from raysvc.pipelines.sources.row_places import Places, arrow_places, csv_places, tar_places
from raysvc.pipelines.sources.slices import Piece

READ_BYTES = 2 << 20
HASHED_BEHIND = 4  # blocks that are read and not yet hashed
PEEK_BYTES = 1 << 16


@dataclass(frozen=True)
class FileScan:
    """Holds what one look through a file gives.

    Attributes:
        size, sha256: of the content, uncompressed.
        cuts: of the slices.
        block_bytes, digests: of the blocks; see `Pins`.
        head: base64 of what ranges of a CSV or Arrow file are read behind.
    """

    kind: Kind
    size: int
    sha256: str
    cuts: tuple[Cut, ...]
    block_bytes: int = BLOCK_BYTES
    digests: tuple[str, ...] = ()
    head: str = ""

    def pieces(self, path: str) -> list[Piece]:
        """One of each cut, with the digests that a reader of it needs."""
        pins = Pins(self.size, self.block_bytes, 0, self.digests)
        if self.kind in BYTE_KINDS:
            return list(self._byte_pieces(path, pins))
        rows = sum(count for _, _, count in self.cuts)
        return [
            Piece(path, self.kind, start, end, count, -(-self.size * count // rows), pins)
            for start, end, count in self.cuts
        ]

    def _byte_pieces(self, path: str, pins: Pins) -> Iterator[Piece]:
        """Cuts of one range follow each other, each with its share of the rows."""
        for (start, end), shared in groupby(self.cuts, key=lambda cut: cut[:2]):
            counts = [count for _, _, count in shared]
            head, span, size = self.head if start else "", pins.span(start, end), end - start
            for place, count in enumerate(counts):
                share, skip = -(-size * count // sum(counts)), sum(counts[:place])
                yield Piece(path, self.kind, start, end, count, share, span, head=head, skip=skip)


class _DigestingStream(io.RawIOBase):
    """A stream that takes the digests of what is read from it; the SHA-256 in a thread, while the next blocks are read."""

    def __init__(self, stream: ContentStream, block_bytes: int) -> None:
        super().__init__()
        self.hasher = PinHasher(block_bytes)
        self._digest = hashlib.sha256()
        self._stream, self._pos = stream, 0
        self._thread = ThreadPoolExecutor(1)
        self._hashing: deque[Future[None]] = deque()  # the newest blocks

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._pos

    def next_block(self, num_bytes: int) -> bytes:
        """Reads so many bytes; returns fewer only at the end."""
        block = self._stream.read(num_bytes)
        self._hashing.append(self._thread.submit(self._digest.update, block))
        if len(self._hashing) > HASHED_BEHIND:
            self._hashing.popleft().result()
        self.hasher.feed(block)
        self._pos += len(block)
        return block

    def sha256(self) -> str:
        """The digest of all that was read."""
        self._thread.shutdown()
        return self._digest.hexdigest()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        block = self.next_block(len(view))
        view[: len(block)] = block
        return len(block)


def scan_file(
    path: str,
    slice_bytes: int,
    storage_options: dict[str, Any],
    tag: dict[str, Any] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> FileScan:
    """Read a file once.

    Args:
        tag: what the store's listing said of it.
        block_bytes: of the digests.

    Raises:
        SourceError: it cannot be read, or the store opened another version than it listed.
    """
    kind = kind_of(path)
    with ContentStream(path, storage_options) as stream, reading(path):
        if tag is not None and store_tag(path, stream.details) not in (None, tag):
            raise changed(path)
        watched = _DigestingStream(stream, block_bytes)
        if kind in CSV_KINDS:
            places = csv_places(path, watched, kind, slice_bytes)
        elif kind == "arrow":
            places = arrow_places(watched, slice_bytes)
        elif kind == "tar":
            places = tar_places(watched, slice_bytes)
        else:
            kind, cuts = _line_cuts(path, watched, kind, slice_bytes)
            places = Places(cuts)
    pins = watched.hasher.finish()
    if kind not in BYTE_KINDS:
        groups = row_groups(Piece(path, kind, 0, 0, 0, pins.size, pins), storage_options)
        slices = max(1, min(sum(groups), -(-pins.size // slice_bytes)))
        places = Places(group_cuts(groups, slices))
    head = base64.b64encode(places.head).decode()
    found = FileScan(kind, pins.size, watched.sha256(), tuple(places.cuts), block_bytes, pins.digests)
    return replace(found, head=head)


def _line_cuts(path: str, watched: _DigestingStream, kind: Kind, slice_bytes: int) -> tuple[Kind, list[Cut]]:
    """Read to the end; the kind, as the first bytes say, and the cuts of a file of lines."""
    cutter = LineCutter(slice_bytes)
    wanted = PEEK_BYTES  # most of many files are small
    while block := watched.next_block(wanted):
        if wanted == PEEK_BYTES and kind != "parquet":
            check_text(path, block)
        if kind == "json" and wanted == PEEK_BYTES:
            kind = kind_of_json(block)
        if kind in LINE_KINDS:
            cutter.feed(block)
        if len(block) < wanted:
            break
        wanted = READ_BYTES
    return kind, cutter.finish()


def peek_kind(path: str, storage_options: dict[str, Any]) -> Kind:
    """The kind by the name, and by the first bytes of a `.json` file."""
    kind = kind_of(path)
    if kind != "json":
        return kind
    with ContentStream(path, storage_options) as stream:
        return kind_of_json(stream.read(PEEK_BYTES))
