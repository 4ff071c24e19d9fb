"""Where rows come from: what a source holds, and how it is cut into slices.

How a source is cut depends on its bytes alone, never on the number of workers, so a build can go on where another
stopped. What it holds is known at once; the cuts are looked for when somebody asks for them, since a finished entry
needs none.

Always true:
- an identity is the content, and never a path or a time;
- slices cover every row once, in order.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

from raysvc.config import SourceConfig
from raysvc.errors import SourceError
from raysvc.pipelines.sources.files import find_files
from raysvc.pipelines.sources.fingerprint import Identifier, stamp_of
from raysvc.pipelines.sources.readers import first_row
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.slices import Slice, numbered

MIN_SLICE_BYTES = 4 << 20  # below, what a slice costs itself (task, sample, part) is a third of its time
MAX_SLICE_BYTES = 32 << 20
SLICES_WANTED = 64


class Source(Protocol):
    """A source whose content is known.

    Attributes:
        identity: what the cache key holds of it, in the order of its files.
        num_bytes: of all files.
    """

    identity: list[dict[str, Any]]
    num_bytes: int

    @property
    def slices(self) -> tuple[Slice, ...]:
        """In row order; SourceError when there are no rows."""
        ...

    def first_row(self) -> dict[str, Any] | None:
        """The first row that can be read."""
        ...

    def check_unchanged(self) -> None:
        """SourceError when it does not hold any more what the identity says."""
        ...


def look_at(config: SourceConfig, slice_bytes: int | None = None, memo: Memo | None = None) -> Source:
    """The source of a job.

    Args:
        config: which files or dataset.
        slice_bytes: size of a slice; None follows from the size of the source.
        memo: what was found out before; None reads every file.

    Raises:
        SourceError: no files, or one that cannot be read.
    """
    if config.dataset is not None:
        from raysvc.pipelines.sources.dataset import DatasetSource

        return DatasetSource(config, memo)
    return FileSource(config, slice_bytes, memo)


class FileSource:
    """Files; see `Source`."""

    def __init__(
        self, config: SourceConfig, slice_bytes: int | None = None, memo: Memo | None = None
    ) -> None:
        self._config = config
        self._files = find_files(config)
        self.num_bytes = sum(file.num_bytes for file in self._files)
        share = max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, self.num_bytes // SLICES_WANTED))
        self._identifier = Identifier(slice_bytes or share, config.storage_options, memo)
        self._stamps = [stamp_of(file) for file in self._files]
        self.identity = self._identifier.identities(self._files)

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The first time this reads every file that the memo does not know."""
        scans = self._identifier.scans(self._files)
        pairs = zip(self._files, scans, strict=True)
        slices = numbered((file.path, scan.kind, cut) for file, scan in pairs for cut in scan.cuts)
        if not slices:
            where = ", ".join(self._config.path)
            raise SourceError("source.path", f"{where} has no rows", "give files with at least one row")
        return slices

    def first_row(self) -> dict[str, Any] | None:
        """Of the first file that has one; reads no more than that needs."""
        for file, identity in zip(self._files, self.identity, strict=True):
            row = first_row(file.path, identity["kind"], self._config.storage_options)
            if row is not None:
                return row
        return None

    def check_unchanged(self) -> None:
        """Looks at the stamps, and reads only files whose stamp is another one; new files do not matter."""
        there = {file.path: file for file in find_files(self._config)}
        files = [there[file.path] for file in self._files if file.path in there]
        if [stamp_of(file) for file in files] == self._stamps:
            return
        if self._identifier.identities(files) != self.identity:
            raise SourceError(
                "source.path",
                f"{', '.join(self._config.path)} changed while it was tokenized",
                "run again when whoever writes there has finished",
            )
