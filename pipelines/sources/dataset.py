"""Rows of a `datasets` name, or of a folder that `save_to_disk` wrote.

Always true:
- a folder is identified by the content of its Arrow files: its fingerprint is only what the writer believed, and
  stays when a function reads another file or a global;
- a name is identified by the commit that was resolved and by the fingerprint, which chains what was made of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.arrow_rows import first_of_table
from raysvc.pipelines.reading.readers import is_saved, load_dataset_rows, load_parts
from raysvc.pipelines.sources.cuts import even_cuts
from raysvc.pipelines.sources.files import SourceFile, resolve_path
from raysvc.pipelines.sources.fingerprint import Identifier
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.slices import Piece, Slice, packed
from raysvc.pipelines.sources.source import MIN_SLICE_BYTES, SLICES_WANTED, share_of

_COMMIT = re.compile(r"@([0-9a-f]{40})/")


def saved_folder(config: SourceConfig) -> str | None:
    """The folder that `source.path` names, when `save_to_disk` wrote it."""
    if len(config.path) != 1:
        return None
    path = resolve_path(config.path[0])
    return path if "://" not in path and os.path.isdir(path) and is_saved(Path(path)) else None


class DatasetSource:
    """See `raysvc.pipelines.sources.source.Source`."""

    def __init__(
        self, config: SourceConfig, slice_bytes: int | None = None, memo: Memo | None = None
    ) -> None:
        self._config, self._memo = config, memo
        self._data = load_dataset_rows(config)
        self.num_bytes = int(self._data.data.nbytes)
        self._slice_bytes = slice_bytes or share_of(self.num_bytes)
        self._files = self._saved_files()
        self.identity = self._identity()

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Slices of about equal numbers of rows.

        Raises:
            SourceError: the split has no rows.
        """
        rows = len(self._data)
        if rows == 0:
            raise SourceError("source.dataset", f"{self._config.dataset!r} has no rows", "check source.split")
        if self._files:
            return packed(self._saved_pieces(), self._slice_bytes)
        wanted = max(1, min(rows, SLICES_WANTED, self.num_bytes // self._slice_bytes))
        where, fingerprint = self._config.model_dump_json(), self._data._fingerprint
        size = -(-self.num_bytes // wanted)
        cuts = even_cuts(rows, wanted)
        return packed((Piece(where, "dataset", *cut, size, None, fingerprint) for cut in cuts), size)

    def first_row(self) -> dict[str, Any] | None:
        """The first one."""
        return next(first_of_table(self._data.with_format("arrow")[:1]), None)

    def check_unchanged(self) -> None:
        """Compares a folder with what was scanned; what lies in the cache of `datasets` is never changed.

        Raises:
            SourceError: the folder changed.
        """
        if self._identity() != self.identity:
            raise SourceError(
                "source.dataset",
                f"{self._config.dataset!r} changed while it was tokenized",
                "run again when whoever writes there has finished",
            )

    def _saved_pieces(self) -> Iterator[Piece]:
        identifier = Identifier(self._slice_bytes, {}, self._memo)
        for part, begin, end in load_parts(self._config):
            files = _files_of(part)
            pairs = zip(files, identifier.scans(files), strict=True)
            yield from _rows_between((p for file, scan in pairs for p in scan.pieces(file.path)), begin, end)

    def _saved_files(self) -> list[SourceFile]:
        if not is_saved(Path(str(self._config.dataset))):
            return []
        parts = [_files_of(part) for part, _, _ in load_parts(self._config)]
        return list({file.path: file for files in parts for file in files}.values())

    def _identity(self) -> list[dict[str, Any]]:
        known = {"kind": "dataset", "rows": len(self._data), "split": self._config.split}
        if self._files:
            contents = Identifier(MIN_SLICE_BYTES, {}, self._memo).identities(self._files)
            return [{**known, "files": [{n: one[n] for n in ("size", "sha256")} for one in contents]}]
        return [{**known, "revision": resolved_revision(self._data), "fingerprint": self._data._fingerprint}]


def _files_of(data: Any) -> list[SourceFile]:
    files = [Path(item["filename"]).absolute() for item in data.cache_files]
    return [SourceFile(str(file), file.stat().st_size, None) for file in files]


def _rows_between(pieces: Iterable[Piece], begin: int, end: int) -> Iterator[Piece]:
    """Returns what rows [begin, end) of all take of each piece."""
    row = 0
    for piece in pieces:
        low = max(begin - row, 0)
        high = min(end - row, piece.num_rows)
        row += piece.num_rows
        if low < high:
            size = -(-piece.num_bytes * (high - low) // piece.num_rows)
            yield replace(piece, skip=piece.skip + low, num_rows=high - low, num_bytes=size)


def resolved_revision(data: Any) -> str | None:
    """The commit that the hub resolved, as the addresses of the files that were loaded say it."""
    urls = " ".join(sorted(getattr(data.info, "download_checksums", None) or {}))
    commits = sorted(set(_COMMIT.findall(urls)))
    return ",".join(commits) or None
