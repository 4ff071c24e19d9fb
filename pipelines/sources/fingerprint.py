"""What every file of a source holds, read only where nobody knows it.

What a file holds is what its bytes say, or what its object store says. A local file that was read before and has the
same stamp is not read again (`raysvc.pipelines.sources.scan_memo`), so a warm start costs the same for any size.

Always true:
- an identity holds kind, size and content, never a path or a time;
- a file that changes while it is read is an error; one that changed since is read again;
- what the memo says is used only when it can be what a scan gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from typing import Any, get_args

from raysvc.errors import SourceError
from raysvc.pipelines.sources.file_stamp import is_settled, local_stamp
from raysvc.pipelines.sources.files import Kind, SourceFile
from raysvc.pipelines.sources.scan import FileScan, peek_kind, scan_file
from raysvc.pipelines.sources.scan_memo import Memo

THREADS = 4
RECORD_VERSION = 1
Json = dict[str, Any]
_SHA256 = re.compile("[0-9a-f]{64}")


class Identifier:
    """Looks through files, or remembers."""

    def __init__(self, slice_bytes: int, storage_options: Json, memo: Memo | None = None) -> None:
        """Nothing is read yet.

        Args:
            slice_bytes: how much of a file makes a slice.
            storage_options: for fsspec.
            memo: what was found out before; None reads every file.
        """
        self.slice_bytes, self.storage_options, self.memo = slice_bytes, storage_options, memo
        self._scans: dict[str, FileScan] = {}  # what was read here: path and stamp -> scan

    def identities(self, files: Sequence[SourceFile]) -> list[Json]:
        """Kind, size and content of each file."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self._identity, files))

    def scans(self, files: Sequence[SourceFile]) -> list[FileScan]:
        """Where to cut each file."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self._scan, files))

    def _identity(self, file: SourceFile) -> Json:
        if file.tag is not None:
            return {"kind": peek_kind(file.path, self.storage_options), **file.tag}
        known = self._remembered(file, stamp_of(file), None)
        if known is not None and _fits(known):
            return known
        scan = self._scan(file)
        return _identity_of(scan)

    def _scan(self, file: SourceFile) -> FileScan:
        stamp = stamp_of(file)
        seen = f"{file.path} {stamp}"
        if seen in self._scans:
            return self._scans[seen]
        known = self._remembered(file, stamp, self.slice_bytes)
        if known is not None and _fits(known) and _cuts_fit(known):
            return FileScan(known["kind"], known["size"], known["sha256"], tuple(map(tuple, known["cuts"])))
        settled = stamp is not None and (
            file.tag is not None or is_settled(stamp)
        )  # before the first byte is read
        scan = scan_file(file.path, self.slice_bytes, self.storage_options)
        if stamp_of(file) != stamp:
            raise SourceError(file.path, "changed while it was read", "run again when it is finished")
        if self.memo is not None and stamp is not None and settled:
            self.memo.put(_about(file, stamp, None), _identity_of(scan))
            self.memo.put(_about(file, stamp, self.slice_bytes), asdict(scan))
        self._scans[seen] = scan
        return scan

    def _remembered(self, file: SourceFile, stamp: Json | None, slice_bytes: int | None) -> Json | None:
        if self.memo is None or stamp is None:
            return None
        return self.memo.get(_about(file, stamp, slice_bytes))


def stamp_of(file: SourceFile) -> Json | None:
    """What changes when the file does; None when nobody can tell without reading.

    Raises:
        SourceError: a local file cannot be opened.
    """
    if file.tag is not None:
        return file.tag
    if "://" in file.path:
        return None
    try:
        with open(file.path, "rb") as handle:
            return dict(local_stamp(handle.fileno()))
    except OSError as error:
        raise SourceError(
            "source.path", f"{file.path!r} cannot be read: {error}", "check the file and its rights"
        ) from error


def _about(file: SourceFile, stamp: Json, slice_bytes: int | None) -> Json:
    about = {"version": RECORD_VERSION, "path": file.path, "stamp": stamp}
    return about if slice_bytes is None else {**about, "slice_bytes": slice_bytes}


def _identity_of(scan: FileScan) -> Json:
    return {"kind": scan.kind, "size": scan.size, "sha256": scan.sha256}


def _fits(record: Json) -> bool:
    kind, size, sha256 = (record.get(name) for name in ("kind", "size", "sha256"))
    return (
        kind in get_args(Kind)
        and type(size) is int
        and size >= 0
        and isinstance(sha256, str)
        and _SHA256.fullmatch(sha256) is not None
    )


def _cuts_fit(record: Json) -> bool:
    """Whether the cuts are triples of counts that begin at 0 and touch, to the end of a line file."""
    cuts = record.get("cuts")
    if not isinstance(cuts, list) or not all(
        isinstance(cut, list) and len(cut) == 3 and all(type(number) is int for number in cut) for cut in cuts
    ):
        return False
    ends = [0, *(end for _, end, _ in cuts)]
    begins = [begin for begin, _, _ in cuts]
    whole = record["kind"] != "lines" or ends[-1] == record["size"]
    return whole and begins == ends[:-1] and all(a < b for a, b in pairwise(ends)) and _rows_fit(record)


def _rows_fit(record: Json) -> bool:
    exact = record["kind"] != "lines"
    return all(
        rows == end - begin if exact else 0 < rows <= end - begin for begin, end, rows in record["cuts"]
    )
