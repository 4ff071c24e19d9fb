"""Files that are written once, whose name ends with the digest of their bytes (XXH3-64).

    000000000042.g1.1a2b3c4d-0123456789abcdef.arrow

Always true:
- a file with a digest in its name is read as it was written, or refused by name; one without comes from an earlier version.
"""

from __future__ import annotations

import re

import xxhash

from raysvc.cache.store.store import Data, Store, buffers_of
from raysvc.errors import StoreError

_DIGEST = re.compile(r"-([0-9a-f]{16})\.\w+$")


def named(stem: str, ending: str, data: Data) -> str:
    """The name of a file of these bytes."""
    found = xxhash.xxh3_64()
    for buffer in buffers_of(data):
        found.update(buffer)
    return f"{stem}-{found.hexdigest()}.{ending}"


def read_named(store: Store, path: str, remedy: str) -> bytes:
    """The bytes of a file.

    Raises:
        FileNotFoundError: it is not there.
        StoreError: they are not those that were written.
    """
    data, digest = store.read(path), _DIGEST.search(path)
    if digest is not None and xxhash.xxh3_64_hexdigest(data) != digest[1]:
        raise StoreError(
            f"{store.url}/{path}", "is damaged: its bytes do not have the digest in its name", remedy
        )
    return data
