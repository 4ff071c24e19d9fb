"""Lists the media that an entry refers to, in a file of its folder: `media-<16 digits>.bin`, the digests in binary, sorted.

The manifest's report names it (`report["media"]["digests"]`), so that gc and `cache verify` need not read the parts.

Always true:
- the name is the beginning of the digest of the content: a file of other digests has another name;
- a list that is damaged or missing is an error, never an empty one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysvc.cache import names
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.store import Store
from raysvc.cache.verify import THREADS, Problem
from raysvc.errors import EntryError
from raysvc.media.media_store import medium_path, read_medium

NAME = re.compile(r"media-[0-9a-f]{16}\.bin")
BYTES = 32  # of a digest
REMEDY = "run raysvc cache verify on the entry, then raysvc tokenize again"


def write_digests(store: Store, folder: str, digests: Iterable[str]) -> dict[str, Any]:
    """Write the list; what the report says of it."""
    found = sorted(set(digests))
    data = bytes.fromhex("".join(found))
    name = f"media-{hashlib.sha256(data).hexdigest()[:16]}.bin"
    store.create(f"{folder}/{name}", data)
    return {"digests": name, "count": len(found)}


def name_in(report: Mapping[str, Any]) -> str | None:
    """The file that a manifest's report names; None where the entry has no media."""
    told = report.get("media")
    name = told.get("digests") if isinstance(told, Mapping) else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def read_digests(store: Store, folder: str, report: Mapping[str, Any]) -> list[str]:
    """The digests of an entry, sorted; empty where it has no media.

    Raises:
        EntryError: the list is missing or damaged.
    """
    if "media" not in report:
        return []
    name = name_in(report)
    where = f"{store.url}/{folder}/{name}"
    if name is None:
        raise EntryError(where, "its report names no list of media", REMEDY)
    try:
        data = store.read(f"{folder}/{name}")
    except FileNotFoundError:
        raise EntryError(where, "the list of its media is missing", REMEDY) from None
    if len(data) % BYTES or name != f"media-{hashlib.sha256(data).hexdigest()[:16]}.bin":
        raise EntryError(where, "the list of its media is damaged", REMEDY)
    return [data[at : at + BYTES].hex() for at in range(0, len(data), BYTES)]


def media_problems(store: Store, folder: str, manifest: Manifest) -> list[Problem]:
    """Media that an entry refers to, and that are not there or not themselves; for `raysvc.cache.verify`."""
    try:
        digests = read_digests(store, folder, manifest.report)
    except EntryError as error:
        return [Problem(name_in(manifest.report) or names.MANIFEST, "missing", error.what)]
    with ThreadPoolExecutor(THREADS) as pool:
        return [one for one in pool.map(lambda digest: _problem(store, digest), digests) if one is not None]


def _problem(store: Store, sha256: str) -> Problem | None:
    try:
        read_medium(store, sha256)
    except EntryError as error:
        return Problem(medium_path(sha256), "missing" if "missing" in error.what else "content", error.what)
    return None
