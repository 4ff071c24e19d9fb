"""Reading one object by a signed URL and plain HTTP.

s3fs moves every block through one event loop in Python; a signed URL needs no client at all, so a thread
reads from the socket straight into the file. The URL carries the credentials' signature, so whatever way of
authentication the file system knows works here too.

Always true:
- a download either has all bytes, or says that it did not happen and the caller reads in the ordinary way.
"""

from __future__ import annotations

import http.client
import logging
import urllib.request
from typing import Any, BinaryIO
from urllib.parse import urlsplit

BLOCK = 1 << 20
TIMEOUT_S = 60.0
LIFETIME_S = 3600
logger = logging.getLogger(__name__)


def download_signed(fs: Any, path: str, target: BinaryIO) -> bool:
    """Write an object to `target`; False when that cannot be had or was cut short.

    Args:
        fs: fsspec file system.
        path: of the object.
        target: empty file at its start.
    """
    url = _signed_url(fs, path)
    if url is None:
        return False
    try:
        return _get(url, target)
    except (OSError, http.client.HTTPException) as error:
        logger.info("signed read failed path=%s error=%s", path, error)
        return False


def _signed_url(fs: Any, path: str) -> str | None:
    """Only for S3 file systems with ordinary transport: no proxy, no client certificates of their own."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    options = {**(getattr(fs, "client_kwargs", None) or {}), **(getattr(fs, "config_kwargs", None) or {})}
    if "s3" not in protocols or getattr(fs, "anon", False) or {"verify", "proxies"} & set(options):
        return None
    if getattr(fs, "req_kw", None) or urllib.request.getproxies():
        return None
    try:
        return str(fs.sign(path, expiration=LIFETIME_S))
    except (OSError, ValueError, NotImplementedError) as error:
        logger.info("read without a signed address path=%s error=%s", path, error)
        return None


def _get(url: str, target: BinaryIO) -> bool:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=TIMEOUT_S)  # a part is large enough for a connection of its own
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        response = connection.getresponse()
        size = int(response.headers.get("Content-Length", -1))
        return response.status == 200 and _copy(response, target) == size
    finally:
        connection.close()


def _copy(response: http.client.HTTPResponse, target: BinaryIO) -> int:
    block, total = memoryview(bytearray(BLOCK)), 0
    while count := response.readinto(block):
        target.write(block[:count])
        total += count
    return total
