"""Encoded media in a cache root: one file for each digest, whoever refers to it.

    <root>/.media/<first two digits>/<sha256>

The folder begins with a dot: an older raysvc takes any other folder of a root for an entry, and removes it.

Always true:
- a file appears complete under the digest of its bytes, or not at all, and is never changed;
- no byte is handed out that does not have the digest it was asked by;
- equal bytes are written once, in any process on any node.
"""

from __future__ import annotations

import hashlib

from raysvc.cache.store.store import Store
from raysvc.errors import EntryError
from raysvc.media.medium import DIGEST

FOLDER = ".media"
REMEDY = "run raysvc cache verify on the entry, then raysvc tokenize again"


def digest_of(data: bytes) -> str:
    """SHA-256, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def medium_path(sha256: str) -> str:
    """The name of a medium in the root.

    Raises:
        EntryError: not a digest.
    """
    if not DIGEST.fullmatch(sha256):
        raise EntryError(repr(sha256)[:80], "it is not the digest of a medium", REMEDY)
    return f"{FOLDER}/{sha256[:2]}/{sha256}"


def write_medium(store: Store, data: bytes) -> str:
    """Keep some bytes; their digest."""
    digest = digest_of(data)
    path = medium_path(digest)
    try:
        store.read(path, 0, 1)
    except FileNotFoundError:
        store.create(path, data)
    return digest


def read_medium(store: Store, sha256: str) -> bytes:
    """The bytes of a digest.

    Raises:
        EntryError: they are not there, or are others.
    """
    path = medium_path(sha256)
    try:
        data = store.read(path)
    except FileNotFoundError:
        raise EntryError(f"{store.url}/{path}", "the medium is missing", REMEDY) from None
    if digest_of(data) != sha256:
        raise EntryError(f"{store.url}/{path}", "its bytes are not those that were written", REMEDY)
    return data
