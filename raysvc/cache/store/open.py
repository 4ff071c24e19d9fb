"""The store of a path or URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Store
from raysvc.errors import StoreError


def open_store(
    root: str, storage_options: Mapping[str, Any] | None = None, unsafe_store: bool = False
) -> Store:
    """The store of a path or fsspec URL; touches nothing yet.

    Args:
        root: folder or URL.
        storage_options: for fsspec (`endpoint_url`, `key`, `secret`, ...).
        unsafe_store: go on where create-if-absent cannot be had; two builders may then overwrite each other's
            manifest.

    Raises:
        StoreError: a scheme that fsspec does not know, or whose package is missing.
    """
    if root.startswith("file://"):
        root = root.removeprefix("file://")
    if "://" not in root:
        return PosixStore(os.path.abspath(os.path.expanduser(root)), unsafe_store)
    if root.startswith(("http://", "https://")):
        raise StoreError(
            root.partition("://")[0] + "://...", "nothing can be written there", "use a folder or a bucket"
        )
    from raysvc.cache.store.fsspec_store import FsspecStore

    return FsspecStore(root.rstrip("/"), dict(storage_options or {}), unsafe_store)
