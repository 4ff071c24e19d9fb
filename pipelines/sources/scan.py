"""One look through a file: what its content is, where it is cut into slices, and the digests of its blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from raysvc.pipelines.reading.json_file import kind_of_json
from raysvc.pipelines.reading.pinned_file import ContentStream
from raysvc.pipelines.reading.pins import BLOCK_BYTES, PinHasher, Pins, changed
from raysvc.pipelines.reading.readers import count_rows
from raysvc.pipelines.sources.cuts import Cut, LineCutter, even_cuts
from raysvc.pipelines.sources.file_stamp import store_tag
from raysvc.pipelines.sources.files import LINE_KINDS, Kind, kind_of
from raysvc.pipelines.sources.slices import Piece

READ_BYTES = 8 << 20
PEEK_BYTES = 1 << 16


@dataclass(frozen=True)
class FileScan:
    """What one look through a file gives.

    Attributes:
        size, sha256: of the content, uncompressed.
        cuts: of the slices.
        block_bytes, digests: of the blocks; see `Pins`.
    """

    kind: Kind
    size: int
    sha256: str
    cuts: tuple[Cut, ...]
    block_bytes: int = BLOCK_BYTES
    digests: tuple[str, ...] = ()

    def pieces(self, path: str) -> list[Piece]:
        """One of each cut, with the digests that a reader of it needs."""
        pins = Pins(self.size, self.block_bytes, 0, self.digests)
        rows = sum(cut_rows for _, _, cut_rows in self.cuts)
        lines = self.kind in LINE_KINDS
        return [
            Piece(
                path,
                self.kind,
                start,
                end,
                cut_rows,
                end - start if lines else -(-self.size * cut_rows // rows),
                pins.span(start, end) if lines else pins,
            )
            for start, end, cut_rows in self.cuts
        ]


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
    digest, hasher = hashlib.sha256(), PinHasher(block_bytes)
    cutter = LineCutter(slice_bytes)
    wanted = PEEK_BYTES  # most of many files are small
    with ContentStream(path, storage_options) as stream:
        if tag is not None and store_tag(path, stream.details) not in (None, tag):
            raise changed(path)
        while block := stream.read(wanted):
            digest.update(block)
            hasher.feed(block)
            if kind == "json" and wanted == PEEK_BYTES:
                kind = kind_of_json(block)
            if kind in LINE_KINDS:
                cutter.feed(block)
            if len(block) < wanted:
                break
            wanted = READ_BYTES
    pins = hasher.finish()
    if kind in LINE_KINDS:
        cuts = cutter.finish()
    else:
        rows = count_rows(Piece(path, kind, 0, 0, 0, pins.size, pins), storage_options)
        cuts = even_cuts(rows, max(1, min(rows, -(-pins.size // slice_bytes))) if rows else 0)
    return FileScan(kind, pins.size, digest.hexdigest(), tuple(cuts), block_bytes, pins.digests)


def peek_kind(path: str, storage_options: dict[str, Any]) -> Kind:
    """The kind by the name, and by the first bytes of a `.json` file."""
    kind = kind_of(path)
    if kind != "json":
        return kind
    with ContentStream(path, storage_options) as stream:
        return kind_of_json(stream.read(PEEK_BYTES))
