"""Files as a source; see `raysvc.pipelines.sources.source`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.pins import changed
from raysvc.pipelines.reading.readers import first_row
from raysvc.pipelines.sources.files import SourceFile
from raysvc.pipelines.sources.fingerprint import Identifier, stamp_of
from raysvc.pipelines.sources.listing import find_files
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.slices import Slice, packed
from raysvc.pipelines.sources.source import share_of


class FileSource:
    """Files; see `Source`."""

    def __init__(
        self, config: SourceConfig, slice_bytes: int | None = None, memo: Memo | None = None
    ) -> None:
        self._config = config
        self._files = find_files(config)
        self.num_bytes = sum(file.num_bytes for file in self._files)
        self._slice_bytes = slice_bytes or share_of(self.num_bytes)
        self._identifier = Identifier(self._slice_bytes, config.storage_options, memo)
        self._marks = [_mark(file) for file in self._files]
        self.identity = self._identifier.identities(self._files)

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The first time this reads every file that the memo does not know.

        Raises:
            SourceError: no file has a row, or one changed while it was read.
        """
        scans = self._identifier.scans(self._files)
        if any(file.tag is not None for file in self._files):
            self._check_tags()
        self._identifier.remember()
        pairs = zip(self._files, scans, strict=True)
        slices = packed(
            (piece for file, scan in pairs for piece in scan.pieces(file.path)), self._slice_bytes
        )
        if not slices:
            where = ", ".join(self._config.path)
            raise SourceError("source.path", f"{where} has no rows", "give files with at least one row")
        return slices

    def first_row(self) -> dict[str, Any] | None:
        """Returns the first row of the first file that has one; reads no more than that needs."""
        for file, identity in zip(self._files, self.identity, strict=True):
            row = first_row(file.path, identity["kind"], self._config.storage_options)
            if row is not None:
                return row
        return None

    def check_unchanged(self) -> None:
        """Looks at the listing and the stamps, and reads only files that these do not tell; new files do not matter.

        Raises:
            SourceError: a file changed.
        """
        files = self._listed()
        marks = [_mark(file) for file in files]
        if marks == self._marks and None not in marks:
            return
        before = self._identifier
        again = Identifier(self._slice_bytes, self._config.storage_options, before.memo)
        for file, identity in zip(files, again.identities(files), strict=True):
            if identity != self.identity[self._places[file.path]]:
                raise changed(file.path)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {file.path: place for place, file in enumerate(self._files)}

    def _check_tags(self) -> None:
        """Checks that what was read was read between two listings that say the same."""
        for file, now in zip(self._files, self._listed(), strict=True):
            if file.tag != now.tag:
                raise changed(file.path)

    def _listed(self) -> list[SourceFile]:
        """Its files as they are now.

        Raises:
            SourceError: one is gone.
        """
        there = {file.path: file for file in find_files(self._config)}
        for file in self._files:
            if file.path not in there:
                raise changed(file.path)
        return [there[file.path] for file in self._files]


def _mark(file: SourceFile) -> dict[str, Any] | str | None:
    """Returns what changes when the file does: a stamp, or what its listing says."""
    return stamp_of(file) or file.seen
