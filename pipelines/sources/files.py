"""Files of a source: found by pattern, told apart by their endings.

Always true:
- files are sorted within each pattern, and none comes twice;
- what a listing says of a file is kept, so that nothing asks for it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fsspec

from raysvc.config import SourceConfig
from raysvc.errors import SourceError
from raysvc.pipelines.sources.file_stamp import store_tag

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


@dataclass(frozen=True)
class SourceFile:
    """A file as a listing shows it.

    Attributes:
        path: absolute, or a URL.
        num_bytes: as it lies there, compressed or not.
        tag: what an object store says of its content; None when the bytes have to be hashed.
    """

    path: str
    num_bytes: int
    tag: dict[str, Any] | None


def find_files(config: SourceConfig) -> list[SourceFile]:
    """The files of `source.path`, sorted within each pattern.

    Raises:
        SourceError: a pattern matches nothing, or a folder holds no file of a known kind.
    """
    found: dict[str, SourceFile] = {}
    for pattern in config.path:
        files = _expand(pattern, config.storage_options)
        if not files:
            raise SourceError(
                "source.path", f"{pattern!r} matches no file", f"name files that end in {_endings()}"
            )
        for file in files:
            found.setdefault(file.path, file)
    return list(found.values())


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
    path = path.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def open_file(path: str, storage_options: dict[str, Any]) -> Any:
    """Its bytes, uncompressed, as a stream."""
    try:
        return fsspec.open(path, "rb", compression="infer", **storage_options).open()
    except (OSError, ImportError) as error:
        raise SourceError(
            "source.path", f"{path!r} cannot be read: {error}", "check the file and its rights"
        ) from error


def _expand(pattern: str, storage_options: dict[str, Any]) -> list[SourceFile]:
    path = resolve_path(pattern)
    try:
        fs, root = fsspec.core.url_to_fs(path, **storage_options)
        is_folder = fs.isdir(root)
        infos = fs.find(root, detail=True) if is_folder else fs.glob(root, detail=True)
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(
            "source.path", f"{pattern!r} cannot be listed: {error}", "check the URL and credentials"
        ) from error
    named = [(name, info) for name, info in sorted(infos.items()) if info["type"] != "directory"]
    if is_folder:
        named = [(name, info) for name, info in named if _known(name)]
    return [_file(fs.unstrip_protocol(name) if "://" in path else str(name), info) for name, info in named]


def _file(path: str, info: dict[str, Any]) -> SourceFile:
    return SourceFile(path, int(info.get("size") or 0), store_tag(path, info))


def _known(name: str) -> bool:
    stem = name
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    return stem.endswith(tuple(KINDS)) and not name.rsplit("/", 1)[-1].startswith((".", "_"))


def _endings() -> str:
    return ", ".join(KINDS)
