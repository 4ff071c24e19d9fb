"""Finds what every file of a source holds, read only where nobody knows it.

What a file holds is what its bytes say, or what its object store says. A local file that was read before and has the
same stamp is not read again (`raysvc.pipelines.sources.scan_memo`), so a warm start costs the same for any size.

Always true:
- an identity holds kind, size and content, never a path or a time;
- a file that changes while it is read is an error; one that changed since is read again;
- what the memo says is used only when it can be what a scan gives.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Any, get_args

from raysvc.errors import SourceError
from raysvc.pipelines.reading.pins import BLOCK_BYTES, block_bytes_for
from raysvc.pipelines.sources.file_stamp import is_settled, local_stamp
from raysvc.pipelines.sources.files import BYTE_KINDS, Kind, SourceFile
from raysvc.pipelines.sources.scan import FileScan, peek_kind, scan_file
from raysvc.pipelines.sources.scan_memo import Memo

THREADS = 4
REMOTE_THREADS = 16
SMALL_BYTES = 1 << 20
MOST_RECORDS = 256  # of small files: when there are more, they share records
SHARED_RECORDS = 32
RECORD_VERSION = 4  # another one where files are cut otherwise
Json = dict[str, Any]
Group = tuple[SourceFile, ...]
_SHA256 = re.compile("[0-9a-f]{64}")
_XXH3 = re.compile("[0-9a-f]{32}")


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
        self._waiting: list[tuple[Json, Json]] = []  # records that `remember` keeps

    def identities(self, files: Sequence[SourceFile]) -> list[Json]:
        """Kind, size and content of each file."""
        return self._each(files, self._identities)

    def scans(self, files: Sequence[SourceFile]) -> list[FileScan]:
        """Returns where to cut each file, and its digests.

        What is found out about objects of a store is kept only by `remember`: whoever asks looks first whether the
        store still lists what was read.
        """
        return self._each(files, self._scans_of)

    def remember(self) -> None:
        """Keep what was found out about objects of a store."""
        for about, value in self._waiting:
            if self.memo is not None:
                self.memo.put(about, value)
        self._waiting = []

    def _each(self, files: Sequence[SourceFile], look: Any) -> list[Any]:
        groups = _groups(files)
        threads = REMOTE_THREADS if files and "://" in files[0].path else THREADS
        with ThreadPoolExecutor(threads) as pool:
            made = list(pool.map(look, groups))
        found = {
            file.path: one
            for group, ones in zip(groups, made, strict=True)
            for file, one in zip(group, ones, strict=True)
        }
        return [found[file.path] for file in files]

    def _identities(self, group: Group) -> list[Json]:
        if all(file.tag is not None for file in group):
            return [
                {"kind": peek_kind(file.path, self.storage_options), **(file.tag or {})} for file in group
            ]
        stamps = [stamp_of(file) for file in group]
        known = self._remembered(group, stamps, None)
        if known is not None and all(_fits(one) for one in known):
            return known
        return [_identity_of(scan) for scan in self._scans_at(group, stamps)]

    def _scans_of(self, group: Group) -> list[FileScan]:
        return self._scans_at(group, [stamp_of(file) for file in group])

    def _scans_at(self, group: Group, stamps: Sequence[Json | None]) -> list[FileScan]:
        seen = [f"{file.path} {stamp}" for file, stamp in zip(group, stamps, strict=True)]
        if all(one in self._scans for one in seen):
            return [self._scans[one] for one in seen]
        known = self._remembered(group, stamps, self.slice_bytes)
        if known is not None and all(_fits(one) and _cuts_fit(one) and _digests_fit(one) for one in known):
            return [_scan_of(one) for one in known]
        settled = all(  # before the first byte is read
            stamp is not None and (file.tag is not None or is_settled(stamp))
            for file, stamp in zip(group, stamps, strict=True)
        )
        scans = [self._scan(file, stamp) for file, stamp in zip(group, stamps, strict=True)]
        if settled:
            self._keep(group, stamps, scans)
        self._scans.update(zip(seen, scans, strict=True))
        return scans

    def _scan(self, file: SourceFile, stamp: Json | None) -> FileScan:
        block_bytes = block_bytes_for(file.num_bytes)
        scan = scan_file(file.path, self.slice_bytes, self.storage_options, file.tag, block_bytes)
        if stamp_of(file) != stamp:
            raise SourceError(file.path, "changed while it was read", "run again when it is finished")
        return scan

    def _keep(self, group: Group, stamps: Sequence[Json | None], scans: Sequence[FileScan]) -> None:
        if self.memo is None:
            return
        records = [
            (_about(group, stamps, None), _value([_identity_of(scan) for scan in scans])),
            (_about(group, stamps, self.slice_bytes), _value([dict(vars(scan)) for scan in scans])),
        ]
        if any(file.tag is not None for file in group):
            self._waiting += records
            return
        for about, value in records:
            self.memo.put(about, value)

    def _remembered(
        self, group: Group, stamps: Sequence[Json | None], slice_bytes: int | None
    ) -> list[Json] | None:
        if self.memo is None or None in stamps:
            return None
        value = self.memo.get(_about(group, stamps, slice_bytes))
        if value is None:
            return None
        if len(group) == 1:
            return [value]
        files = value.get("files")
        fits = (
            isinstance(files, list)
            and len(files) == len(group)
            and all(isinstance(one, dict) for one in files)
        )
        return files if fits else None


def stamp_of(file: SourceFile) -> Json | None:
    """Returns what changes when the file does; None when nobody can tell without reading.

    Raises:
        SourceError: a local file cannot be opened.
    """
    if file.tag is not None:
        return file.tag
    if "://" in file.path:
        return None
    try:
        handle = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise SourceError(
            "source.path", f"{file.path!r} cannot be read: {error}", "check the file and its permissions"
        ) from error
    try:
        return dict(local_stamp(handle))
    finally:
        os.close(handle)


def _groups(files: Sequence[SourceFile]) -> list[Group]:
    """Files that share a record: each large one alone, and the small ones by their paths when they are many."""
    small = {file.path for file in files if file.num_bytes < SMALL_BYTES and _has_stamp(file)}
    if len(small) <= MOST_RECORDS:
        return [(file,) for file in files]
    shared: dict[int, list[SourceFile]] = {}
    for file in files:
        if file.path in small:
            place = hashlib.sha256(os.fsencode(file.path)).digest()[0] % SHARED_RECORDS
            shared.setdefault(place, []).append(file)
    return [(file,) for file in files if file.path not in small] + [tuple(group) for group in shared.values()]


def _has_stamp(file: SourceFile) -> bool:
    return file.tag is not None or "://" not in file.path


def _about(group: Group, stamps: Sequence[Json | None], slice_bytes: int | None) -> Json:
    """Only a hash of paths and stamps: a path may hold a secret, and ten thousand are long."""
    digest = hashlib.sha256()
    for file, stamp in zip(group, stamps, strict=True):
        digest.update(json.dumps([file.path, stamp], sort_keys=True).encode())
    about = {"version": RECORD_VERSION, "files": digest.hexdigest()}
    return about if slice_bytes is None else {**about, "slice_bytes": slice_bytes}


def _value(values: list[Json]) -> Json:
    return values[0] if len(values) == 1 else {"files": values}


def _scan_of(record: Json) -> FileScan:
    return FileScan(
        record["kind"],
        record["size"],
        record["sha256"],
        tuple(map(tuple, record["cuts"])),
        record["block_bytes"],
        tuple(record["digests"]),
        record["head"],
    )


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
    """Returns whether the cuts are triples of counts that begin at 0 and touch, to the end of a line file."""
    cuts = record.get("cuts")
    if not isinstance(cuts, list) or not all(
        isinstance(cut, list) and len(cut) == 3 and all(type(number) is int for number in cut) for cut in cuts
    ):
        return False
    ranges = [span for span, _ in groupby(cut[:2] for cut in cuts)]  # a batch may be shared by cuts
    if len(ranges) < len(cuts) and record["kind"] != "arrow":
        return False
    ends = [0, *(end for _, end in ranges)]
    begins = [begin for begin, _ in ranges]
    whole = record["kind"] not in BYTE_KINDS or ends[-1] == record["size"]
    return whole and begins == ends[:-1] and all(a < b for a, b in pairwise(ends)) and _rows_fit(record)


def _rows_fit(record: Json) -> bool:
    if record["kind"] == "arrow":
        return all(rows > 0 for _, _, rows in record["cuts"]) and _is_base64(record.get("head"))
    exact = record["kind"] not in BYTE_KINDS
    rows_fit = all(
        rows == end - begin if exact else 0 < rows <= end - begin for begin, end, rows in record["cuts"]
    )
    return rows_fit and _is_base64(record.get("head"))


def _is_base64(text: object) -> bool:
    try:
        return isinstance(text, str) and base64.b64encode(base64.b64decode(text)).decode() == text
    except ValueError:
        return False


def _digests_fit(record: Json) -> bool:
    """Returns whether there is one digest of each block."""
    block_bytes, digests = record.get("block_bytes"), record.get("digests")
    return (
        type(block_bytes) is int
        and block_bytes >= BLOCK_BYTES
        and isinstance(digests, list)
        and len(digests) == -(-record["size"] // block_bytes)
        and all(isinstance(one, str) and _XXH3.fullmatch(one) for one in digests)
    )
