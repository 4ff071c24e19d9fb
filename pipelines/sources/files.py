"""Defines what a source file is, and the kinds of files, told apart by their endings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raysvc.errors import SourceError

Kind = Literal["lines", "text", "json", "csv", "tsv", "parquet", "arrow", "tar", "dataset", "ray"]
LINE_KINDS: tuple[Kind, ...] = ("lines", "text")  # cut at line ends
CSV_KINDS: tuple[Kind, ...] = ("csv", "tsv")
BYTE_KINDS: tuple[Kind, ...] = (*LINE_KINDS, *CSV_KINDS, "arrow", "tar")  # a slice is a range of bytes
KINDS: dict[str, Kind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".txt": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
ENDINGS = ", ".join(KINDS)
NO_TEXT = {  # how files begin that are no text in UTF-8 -> what they are, and what to do
    b"\xff\xfe": ("text in UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "save it as UTF-8"),
    b"\x1f\x8b": ("compressed", "add .gz to its name"),
    b"\x28\xb5\x2f\xfd": ("compressed", "add .zst to its name"),
    b"PAR1": ("a Parquet file", "let its name end in .parquet"),
}


@dataclass(frozen=True)
class SourceFile:
    """A file as a listing shows it.

    Attributes:
        path: absolute, or a URL.
        num_bytes: as it lies there, compressed or not.
        tag: what an object store says of its content; None when the bytes have to be hashed.
        seen: what else the listing says that changes with the file, as a time; None when it says nothing.
    """

    path: str
    num_bytes: int
    tag: dict[str, Any] | None
    seen: str | None = None


def name_of(path: str) -> str:
    """A path without the query of its URL."""
    return path.partition("?")[0] if "://" in path else path


def known_kind(path: str) -> Kind | None:
    """The kind of a file, by its name; None when it is no file of rows."""
    stem = name_of(path)
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    return next((kind for ending, kind in KINDS.items() if stem.endswith(ending)), None)


def kind_of(path: str) -> Kind:
    """The kind of a file, by its name.

    Raises:
        SourceError: an ending that is not known.
    """
    kind = known_kind(path)
    if kind is None:
        raise SourceError("source.path", f"{path!r} is of no known kind", f"name files that end in {ENDINGS}")
    return kind


def check_text(path: str, begin: bytes) -> None:
    """Look at the first bytes of a file of text.

    Raises:
        SourceError: no text in UTF-8 begins so.
    """
    for mark, (what, remedy) in NO_TEXT.items():
        if begin.startswith(mark):
            raise SourceError(f"source file {path!r}", f"is {what}", remedy)


def resolve_path(path: str) -> str:
    """The path a worker on another node can open: absolute when it is local.

    Raises:
        SourceError: the home folder of somebody who is not known here.
    """
    path = path.removeprefix("file://")
    try:
        return path if "://" in path else str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # of a user that this machine does not know
        raise SourceError("source.path", f"{path!r}: {error}", "give an absolute path") from error
