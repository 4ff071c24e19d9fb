"""Which media an entry refers to, in a file of its folder: `media-<16 digits>.bin`, the digests in binary, sorted.

The manifest's report names it (`report["media"]["digests"]`), so that gc and `cache verify` need not read the parts.

Always true:
- the name is the beginning of the digest of the content: a file of other digests has another name;
- a list that is damaged or missing is an error, never an empty one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from raysvc.cache.store.store import Store
from raysvc.errors import EntryError

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
