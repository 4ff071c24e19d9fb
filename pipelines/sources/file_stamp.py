"""Says what a source file is, apart from where it lies, and tells whether it is still the same.

Always true:
- an identity never holds a path, a name or a time;
- on an object store the identity is what the store says of the content, so that nothing is downloaded; web
  servers, whose etags are often made of size and time, have their bytes hashed;
- a stamp is never part of an identity: it only says whether a file has to be read again;
- a stamp is trusted only when the file was still for `RACY_S` before it was read: a change within the resolution
  of the file system's clock, or of a clock that is a little off, would leave the stamp as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

CONTENT_FIELDS = ("md5Hash", "content_md5", "blob_id", "ETag", "etag", "crc32c", "VersionId", "version_id")
TIME_FIELDS = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "updated", "modify")
RACY_S = 10.0
Stamp = dict[str, int]


def store_tag(url: str, info: Mapping[str, Any]) -> dict[str, Any] | None:
    """`{"size", <what the object store says of the content>}`, None when the bytes have to be hashed.

    Args:
        url: of the file.
        info: what fsspec lists of it.
    """
    if "://" not in url or url.startswith(("http://", "https://", "file://")) or info.get("size") is None:
        return None
    for name in CONTENT_FIELDS:
        if info.get(name):
            return {"size": int(info["size"]), name.lower(): str(info[name]).strip('"')}
    return None


def listed_stamp(info: Mapping[str, Any]) -> str | None:
    """Returns what a listing says that changes with a file, too weak to save reading it; None when it says nothing."""
    fields = (*CONTENT_FIELDS, *TIME_FIELDS)
    told = {name: str(info[name]) for name in fields if info.get(name) is not None}
    return f"{info.get('size')} {told}" if told else None


def local_stamp(handle: int) -> Stamp:
    """Returns what changes with every change of an open file: opening it asked an NFS server again.

    The change time is in it because nobody can set it: an edit that puts the old modification time back shows.
    """
    status = os.fstat(handle)
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def is_settled(stamp: Stamp, now_s: float | None = None) -> bool:
    """Returns whether a file with this stamp, read from now on, cannot change without its stamp changing."""
    now_ns = int((time.time() if now_s is None else now_s) * 1e9)
    return max(stamp["mtime_ns"], stamp["ctime_ns"]) + int(RACY_S * 1e9) <= now_ns
