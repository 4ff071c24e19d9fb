"""Says where a cache lies, and the store of a path or URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Store
from raysvc.errors import ConfigError, StoreError

DEFAULT_ROOT = ".raysvc/cache"
JOB_FOLDER = "/runtime_resources/working_dir_files/"  # where Ray unpacks what a job uploads


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


def default_root(root: str | None = None) -> str:
    """A cache root: the given one, RAYSVC_CACHE_DIR, or a folder here; absolute when local."""
    return absolute(root or os.environ.get("RAYSVC_CACHE_DIR") or DEFAULT_ROOT)


def absolute(path: str) -> str:
    """A path that means the same in another process; URLs stay as they are.

    Raises:
        ConfigError: a relative path inside a submitted Ray job, whose folder is new for every upload.
    """
    if "://" in path:
        return path
    full = Path(path).expanduser().absolute()
    if JOB_FOLDER in full.as_posix() and not Path(path).expanduser().is_absolute():
        what = f"lies in the temporary folder of a submitted job, {full.parent}, and would be lost with it"
        remedy = "give an absolute path or a URL: cache.root (or RAYSVC_CACHE_DIR) and trainer.run_dir"
        raise ConfigError(path, what, remedy)
    return str(full)
