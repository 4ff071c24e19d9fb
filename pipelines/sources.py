"""Where rows come from: files found, looked through once, and cut into slices.

A slice is a piece of one file that one task reads, tokenizes and writes as one part. How a source is
cut depends on its bytes alone, never on the number of workers, so a build can go on where another
stopped.

Always true:
- slices are in the order of the rows, they touch and do not overlap;
- a slice of a line file starts and ends at a line's end;
- `first_row` numbers rows over all files of the source, broken lines included.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import fsspec

from raysvc.config import SourceConfig
from raysvc.errors import SourceError

Kind = Literal["lines", "json", "csv", "parquet", "arrow", "dataset"]
KINDS: dict[str, Kind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MIN_SLICE_BYTES = 1 << 20
SLICES_WANTED = 64
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Slice:
    """Rows that one task turns into one part.

    Attributes:
        index: position in the source; the part has the same.
            path: of the file; for a `datasets` source the JSON of its config.
        start, end: bytes of a line file, else rows of the file.
        first_row: number of its first row in the whole source.
        num_rows: rows (lines) in it.
    """

    index: int
    path: str
    kind: Kind
    start: int
    end: int
    first_row: int
    num_rows: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for receipts and task arguments."""
        return asdict(self)


@dataclass(frozen=True)
class FileScan:
    """What one look through a file gives: identity and where to cut."""

    path: str
    kind: Kind
    size: int
    sha256: str
    cuts: tuple[tuple[int, int, int], ...]  # (start, end, rows) of each slice


@dataclass(frozen=True)
class Source:
    """A source that was looked through.

    Attributes:
        identity: what the cache key holds of it: size and content hash per file, in order; never a path.
        slices: in row order.
    """

    identity: list[dict[str, Any]]
    slices: tuple[Slice, ...]
    num_rows: int
    num_bytes: int


def find_files(config: SourceConfig) -> list[str]:
    """The files of `source.path`, sorted within each pattern.

    Raises:
        SourceError: a pattern matches nothing, or a folder holds no file of a known kind.
    """
    found: list[str] = []
    for pattern in config.path:
        files = _expand(pattern, config.storage_options)
        if not files:
            raise SourceError(
                "source.path", f"{pattern!r} matches no file", f"name files that end in {_endings()}"
            )
        found.extend(name for name in files if name not in found)
    return found


def scan(config: SourceConfig, slice_bytes: int | None = None) -> Source:
    """Look through every file once.

    Raises:
        SourceError: no files, no rows, or a file that cannot be read.
    """
    if config.dataset is not None:
        return _scan_dataset(config)
    paths = find_files(config)
    sizes = {path: _size(path, config.storage_options) for path in paths}
    wanted = slice_bytes or max(MIN_SLICE_BYTES, min(32 << 20, sum(sizes.values()) // SLICES_WANTED))
    scans = [scan_file(path, wanted, config.storage_options) for path in paths]
    slices: list[Slice] = []
    row = 0
    for item in scans:
        for start, end, rows in item.cuts:
            slices.append(Slice(len(slices), item.path, item.kind, start, end, row, rows))
            row += rows
    if row == 0:
        raise SourceError(
            "source.path", f"{', '.join(config.path)} has no rows", "give files with at least one row"
        )
    identity = [{"kind": item.kind, "size": item.size, "sha256": item.sha256} for item in scans]
    return Source(identity, tuple(slices), row, sum(sizes.values()))


def _scan_dataset(config: SourceConfig) -> Source:
    from raysvc.pipelines.readers import load_dataset_rows

    data = load_dataset_rows(config)
    if len(data) == 0:
        raise SourceError("source.dataset", f"{config.dataset!r} has no rows", "check source.split")
    num_bytes = int(data.data.nbytes)
    cuts = even_cuts(len(data), min(len(data), max(1, min(SLICES_WANTED, num_bytes // MIN_SLICE_BYTES))))
    where = config.model_dump_json()
    pieces = [
        Slice(i, where, "dataset", start, end, start, rows) for i, (start, end, rows) in enumerate(cuts)
    ]
    # the fingerprint chains what made the rows: source files, revision and every transformation since
    identity = [
        {"kind": "dataset", "rows": len(data), "fingerprint": data._fingerprint, "split": config.split}
    ]
    return Source(identity, tuple(pieces), len(data), num_bytes)


def scan_file(path: str, slice_bytes: int, storage_options: dict[str, Any]) -> FileScan:
    """Identity of one file, and its cuts."""
    kind = kind_of(path)
    digest = hashlib.sha256()
    size = 0
    cutter = _LineCutter(slice_bytes)
    with _open(path, storage_options) as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            size += len(block)
            if kind == "json" and size == len(block) and not block.lstrip().startswith(b"["):
                kind = "lines"  # .json with one object per line
            if kind == "lines":
                cutter.feed(block)
    if kind == "lines" and not path.endswith(COMPRESSED):
        cuts = cutter.finish()
    elif kind == "lines":
        cuts = [(0, size, sum(rows for _, _, rows in cutter.finish()))]
    else:
        from raysvc.pipelines.readers import count_rows

        rows = count_rows(path, kind, storage_options)
        cuts = even_cuts(rows, max(1, min(rows, -(-size // slice_bytes))) if rows else 0)
    return FileScan(path, kind, size, digest.hexdigest(), tuple(cuts))


def even_cuts(num_rows: int, num_slices: int) -> list[tuple[int, int, int]]:
    """Cut rows into slices whose sizes differ by at most one: (start, end, rows) each, half-open."""
    edges = [num_rows * i // num_slices for i in range(num_slices + 1)] if num_slices else [0]
    return [(a, b, b - a) for a, b in pairwise(edges)]


def kind_of(path: str) -> Kind:
    """The kind of a file, by its name.

    Raises:
        SourceError: an ending that is not known.
    """
    stem = path
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    for ending, kind in KINDS.items():
        if stem.endswith(ending):
            return kind
    raise SourceError("source.path", f"{path!r} is of no known kind", f"name files that end in {_endings()}")


def resolve_path(path: str) -> str:
    """The path a worker on another node can open: absolute when it is local."""
    if "://" in path:
        return path
    from pathlib import Path

    return str(Path(path).expanduser().absolute())


class _LineCutter:
    """Finds slice ends at line ends while a file streams by; counts lines (the last may lack its newline)."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._cuts: list[tuple[int, int, int]] = []
        self._start = 0  # of the open slice
        self._rows = 0  # lines ended in the open slice
        self._read = 0
        self._open_line = False

    def feed(self, block: bytes) -> None:
        pos = 0
        while pos < len(block):
            target = self._start + self._slice_bytes - self._read  # block offset where the slice is full
            if target >= len(block):
                self._rows += block.count(b"\n", pos)
                break
            cut = block.find(b"\n", max(target, pos))
            if cut < 0:
                self._rows += block.count(b"\n", pos)
                break
            rows = self._rows + block.count(b"\n", pos, cut + 1)
            end = self._read + cut + 1
            self._cuts.append((self._start, end, rows))
            self._start, self._rows, pos = end, 0, cut + 1
        self._read += len(block)
        self._open_line = not block.endswith(b"\n")

    def finish(self) -> list[tuple[int, int, int]]:
        if self._read > self._start:
            self._cuts.append((self._start, self._read, self._rows + self._open_line))
        return self._cuts


def _expand(pattern: str, storage_options: dict[str, Any]) -> list[str]:
    path = resolve_path(pattern)
    try:
        fs, root = fsspec.core.url_to_fs(path, **storage_options)
        names = fs.find(root) if fs.isdir(root) else sorted(n for n in fs.glob(root) if not fs.isdir(n))
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(
            "source.path", f"{pattern!r} cannot be listed: {error}", "check the URL and credentials"
        ) from error
    if fs.isdir(root):
        names = sorted(name for name in names if _known(name))
    return [fs.unstrip_protocol(name) if "://" in path else str(name) for name in names]


def _known(name: str) -> bool:
    stem = name
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    return stem.endswith(tuple(KINDS)) and not name.rsplit("/", 1)[-1].startswith((".", "_"))


def _size(path: str, storage_options: dict[str, Any]) -> int:
    fs, name = fsspec.core.url_to_fs(path, **storage_options)
    return int(fs.size(name) or 0)


def _open(path: str, storage_options: dict[str, Any]) -> Any:
    try:
        return fsspec.open(path, "rb", compression="infer", **storage_options).open()
    except (OSError, ImportError) as error:
        raise SourceError(
            "source.path", f"{path!r} cannot be read: {error}", "check the file and its rights"
        ) from error


def _endings() -> str:
    return ", ".join(KINDS)


def nearest(name: str, names: Iterator[str] | list[str]) -> str | None:
    """The most similar of some names, for error messages."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return close[0] if close else None
