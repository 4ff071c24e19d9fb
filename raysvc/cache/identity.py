"""What a source file is, apart from where it lies.

Always true:
- an identity never holds a path, a name or a time;
- two local files have equal identities exactly when their bytes are equal;
- on an object store the identity is what the store says of the content (etag, checksum, version), so that
  nothing is downloaded; a store that says nothing has its bytes hashed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from raysvc.errors import SourceError

CONTENT_FIELDS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c", "blob_id", "VersionId", "version_id")
BLOCK = 1 << 20
THREADS = 8


def file_identity(url: str, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Size and content of one file: `{"size", "sha256"}`, or `{"size", <what the object store says>}`.

    Args:
        url: a path or any fsspec URL.
        storage_options: for fsspec.

    Raises:
        SourceError: the file cannot be read.
    """
    try:
        if "://" not in url:
            with open(url, "rb") as file:
                return _hashed(file, os.fstat(file.fileno()).st_size)
        return _remote_identity(url, dict(storage_options or {}))
    except (OSError, ImportError) as error:
        raise SourceError(url, f"cannot be read ({error})", "check the path and the credentials") from error


def file_identities(
    urls: Sequence[str], storage_options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """`file_identity` of many files, in their order; reads several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda url: file_identity(url, storage_options), urls))


def _remote_identity(url: str, options: dict[str, Any]) -> dict[str, Any]:
    import fsspec

    fs, path = fsspec.core.url_to_fs(url, **options)
    info = fs.info(path)
    says = {name: str(info[name]).strip('"') for name in CONTENT_FIELDS if info.get(name)}
    if says and info.get("size") is not None:
        name = next(iter(says))
        return {"size": int(info["size"]), name.lower(): says[name]}
    with fs.open(path, "rb") as file:
        return _hashed(file, info.get("size"))


def _hashed(file: BinaryIO, expected: int | None) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    while block := file.read(BLOCK):
        digest.update(block)
        size += len(block)
    if expected is not None and size != expected:
        raise OSError(f"the file changed while it was read: {expected} bytes, then {size}")
    return {"size": size, "sha256": digest.hexdigest()}
