"""A source that is followed: files that appear, and lines that are appended, become slices behind those that are there.

1. Look: list the files.
2. Leave out what is not complete. A file of an object store is complete when it is listed. A file in a folder is when nobody wrote
   to it for `RACY_S`. Lines of a file that is not compressed count one by one, once their newline is there.
3. Refuse a file that is counted and has changed, by name.
4. Cut what is new into slices, and write the next listing. Where somebody else wrote one meanwhile, begin again.

Always true:
- rows are those of the listings, and what is not listed does not exist;
- the source's identity is the name of its first listing, so it never changes;
- a file that is gone is needed only where its slices are still to be built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

from raysvc.cache.growing.listings import Listing, Listings
from raysvc.cache.key import canonical_json
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.readers import first_row
from raysvc.pipelines.sources.appended import CountedLines, appended, may_grow, shorter, written_over
from raysvc.pipelines.sources.file_stamp import RACY_S, is_settled
from raysvc.pipelines.sources.files import SourceFile, resolve_path
from raysvc.pipelines.sources.fingerprint import Identifier, stamp_of
from raysvc.pipelines.sources.listing import find_files
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.slices import Piece, Slice, packed
from raysvc.pipelines.sources.source import share_of
from raysvc.row_ids import MOST_SLICES

log = logging.getLogger(__name__)
LISTING_BYTES = 1 << 30  # of one listing: what is there at the beginning becomes several
LISTING_FILES = 4096
Json = dict[str, Any]


@dataclass(frozen=True)
class _NewPieces:
    """Holds what a look found of one file: its new pieces, and what of it is counted then."""

    path: str
    pieces: list[Piece]
    counted: Json


class FollowedSource:
    """See the module, and `raysvc.pipelines.sources.source.Source`.

    Args:
        config: names files, globs or folders.
        slice_bytes: size of a slice; None follows from the size of a listing.
        memo: tells the cache root, where the listings lie.

    Raises:
        SourceError: nothing is there yet, or a file cannot be followed.
    """

    def __init__(self, config: SourceConfig, slice_bytes: int | None, memo: Memo) -> None:
        self._config, self._slice_bytes, self._memo = config, slice_bytes, memo
        self._counted: dict[str, Json] = {}
        self._by_lines: dict[CountedLines, str] = {}  # what is counted of a file of lines -> its path
        self._taken = 0  # listings whose files are in _counted
        self._unended: dict[str, int] = {}  # files whose last line was said to lack its newline
        self._seen: dict[str, tuple[Json, float]] = {}  # stamps of files that may be written to, since when
        self._empty: dict[str, Json | None] = {}  # stamps of whole files that have no rows
        self.listings = Listings(memo.store, _name_of(config))
        self.listings.refresh()
        if not self.listings.known:
            self._first_look()
        self.identity = [{"kind": "followed", "listing": self.listings.uid}]

    @property
    def num_bytes(self) -> int:
        """Bytes of all listings."""
        return sum(listing.num_bytes for listing in self.listings.known)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Those of all listings."""
        return tuple(Slice.from_json(dict(one)) for listing in self.listings.known for one in listing.slices)

    def slice(self, index: int) -> Slice:
        """One of them.

        Raises:
            IndexError: it is not listed.
        """
        for listing in reversed(self.listings.known):
            if listing.first_slice <= index:
                return Slice.from_json(dict(listing.slices[index - listing.first_slice]))
        raise IndexError(index)

    def first_row(self) -> dict[str, Any] | None:
        """The first one, as it is kept in the first listing; of a kind that JSON cannot hold, as the file has it."""
        listing = self.listings.known[0]
        if listing.first_row is not None:
            return dict(listing.first_row)
        return self._first_row_of([Slice.from_json(dict(one)) for one in listing.slices])

    def check_unchanged(self) -> None:
        """Does nothing: every `look` looks at what is counted."""

    def look(self) -> bool:
        """List what is new; whether there is a new listing, by whoever.

        Raises:
            SourceError: a file that is counted has changed, or one cannot be read.
        """
        self.listings.refresh()
        before = len(self.listings.known)
        self._take_known()
        new = list(self._new())
        pieces = [piece for one in new for piece in one.pieces]
        if not pieces:
            return len(self.listings.known) > before
        first = self.listings.num_slices
        row = self.listings.num_groups
        size = self._slice_bytes or share_of(sum(piece.num_bytes for piece in pieces))
        slices = [
            replace(one, index=one.index + first, first_row=one.first_row + row)
            for one in packed(pieces, size)
        ]
        if first + len(slices) > MOST_SLICES:
            what = f"has more than {MOST_SLICES} slices"
            raise SourceError("source.follow", what, "begin a run of its own, in another cache root")
        contents = [str(one.identity()["bytes"]) for one in slices]
        files = {one.path: one.counted for one in new}
        head = None if first else _plain(self._first_row_of(slices))
        self.listings.append(Listing(first, [one.to_json() for one in slices], contents, files, head))
        return len(self.listings.known) > before

    def _first_look(self) -> None:
        """Make the first listing, of what is there or will be complete in a moment."""
        files = find_files(self._config)  # says what is wrong where nothing matches
        if self.look() or self.listings.known:
            return
        if not all(map(may_grow, files)):
            time.sleep(RACY_S + 1)  # somebody wrote to them just now
            self.look()
        if not self.listings.known:
            where = ", ".join(self._config.path)
            what = f"{where} holds no complete row yet"
            raise SourceError("source.path", what, "start again when a first file is complete")

    def _first_row_of(self, slices: Sequence[Slice]) -> dict[str, Any]:
        """Returns the first row of the first file that has one.

        Raises:
            SourceError: none has; before that is listed for good.
        """
        files = {piece.path: piece.kind for one in slices for piece in one.pieces}
        rows = (first_row(path, kind, self._config.storage_options) for path, kind in files.items())
        row = next((row for row in rows if row is not None), None)
        if row is None:
            what = f"{', '.join(self._config.path)} holds no row that can be read"
            raise SourceError("source", what, "give files with one JSON object per line")
        return row

    def _take_known(self) -> None:
        for listing in self.listings.known[self._taken :]:
            self._counted.update({path: dict(one) for path, one in listing.files.items()})
            lines = {path: one for path, one in listing.files.items() if "end" in one}
            self._by_lines.update({CountedLines.from_json(one): path for path, one in lines.items()})
            self._taken += 1

    def _new(self) -> Iterator[_NewPieces]:
        """Returns what is new and complete, up to the size of a listing."""
        num_bytes, num_files, whole = 0, 0, list[SourceFile]()
        for file in self._changed_files():
            if num_bytes >= LISTING_BYTES or num_files >= LISTING_FILES:
                break
            if not may_grow(file):
                whole.append(file)
                num_bytes, num_files = num_bytes + file.num_bytes, num_files + 1
                continue
            found = self._lines_of(file, LISTING_BYTES - num_bytes)
            if (
                found.pieces
            ):  # a line that is not complete is no work: thousands of them would hide what is behind
                num_bytes += sum(piece.num_bytes for piece in found.pieces)
                num_files += 1
                yield found
        yield from self._whole(whole)

    def _changed_files(self) -> Iterator[SourceFile]:
        """Files that have something that is not counted, in the order of the listing."""
        for file in find_files(self._config, may_be_none=bool(self.listings.known)):
            counted = self._counted.get(file.path)
            if may_grow(file):
                if counted is None or file.num_bytes != counted["end"]:
                    if counted is not None and file.num_bytes < counted["end"]:
                        raise shorter(file.path, counted["end"], file.num_bytes)
                    yield file
                continue
            if "://" in file.path and file.tag is None:
                what = f"{file.path!r} lies where a listing does not tell when a file is complete"
                raise SourceError("source.follow", what, "follow a folder, or a bucket of an object store")
            stamp = _stamp(file)
            if stamp is None:
                continue
            if counted is not None and counted["stamp"] != stamp:
                raise written_over(file.path)
            if file.path in self._empty and self._empty[file.path] == stamp:
                continue
            if counted is None and (file.tag is not None or self._is_still(file.path, stamp)):
                yield file

    def _is_still(self, path: str, stamp: Json) -> bool:
        """Returns whether nobody wrote to a file for `RACY_S`: by its times, or, where these lie in the future, by what was seen of it."""
        if is_settled(stamp):
            self._seen.pop(path, None)
            return True
        now_s = time.monotonic()
        seen, since_s = self._seen.get(path, (None, now_s))
        self._seen[path] = stamp, since_s if seen == stamp else now_s
        return seen == stamp and now_s - since_s > RACY_S

    def _lines_of(self, file: SourceFile, most_bytes: int) -> _NewPieces:
        counted = CountedLines.from_json(self._counted.get(file.path, CountedLines().to_json()))
        size = self._slice_bytes or share_of(file.num_bytes - counted.end)
        now, pieces = appended(file.path, counted, size, most_bytes)
        stamp = stamp_of(file)
        if now.end == counted.end < file.num_bytes and stamp is not None and is_settled(stamp):
            if self._unended.get(file.path) != file.num_bytes:
                left = file.num_bytes - counted.end
                log.warning("the last %d bytes of %s lack a newline and are not counted", left, file.path)
            self._unended[file.path] = file.num_bytes
        if not counted.end and now.end and (known := self._by_lines.get(now)) is not None:
            what = "%s has the lines of %s, which are counted already, and is trained too: was it renamed, copied or linked?"
            log.warning(what, file.path, known)
        return _NewPieces(file.path, pieces, now.to_json())

    def _whole(self, files: list[SourceFile]) -> Iterator[_NewPieces]:
        """Files that are counted as a whole; one that was written over while it was read is left for the next look."""
        stamps = [stamp_of(file) for file in files]
        size = self._slice_bytes or share_of(sum(file.num_bytes for file in files))
        scans = Identifier(size, self._config.storage_options, self._memo).scans(files)
        now = {one.path: one for one in find_files(self._config, may_be_none=True)} if files else {}
        for file, stamp, scan in zip(files, stamps, scans, strict=True):
            if file.tag is not None and (file.path not in now or now[file.path].tag != file.tag):
                continue
            if pieces := scan.pieces(file.path):
                yield _NewPieces(file.path, pieces, {"stamp": stamp})
            else:
                self._empty[file.path] = stamp


def _stamp(file: SourceFile) -> Json | None:
    """None: it was removed since it was listed."""
    try:
        return stamp_of(file)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _name_of(config: SourceConfig) -> str:
    """The folder of the listings of a source."""
    paths = [resolve_path(path) for path in config.path]
    return hashlib.sha256(canonical_json({"path": paths})).hexdigest()[:32]


def _plain(row: Mapping[str, Any]) -> Json | None:
    """The row where JSON can hold it, times and decimals as text."""
    try:
        return dict(json.loads(json.dumps(row, default=_as_text)))
    except (TypeError, ValueError):
        return None


def _as_text(value: object) -> str:
    if isinstance(value, date | time_of_day | Decimal):
        return str(value)
    raise TypeError(value)
