"""Reads the file of a medium that a row names: a path beside the row's own file, or a URL.

Always true:
- only regular files are read, and no more than was asked for;
- options of the source's store go to that store alone, never to another server that a row names.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from raysvc.pipelines.reading.pinned_file import file_system


def read_media_file(path: str, folder: str, most: int, options: dict[str, Any]) -> bytes:
    """The bytes of a file, one more than `most` where it is longer.

    Args:
        path: absolute, a URL, or relative to `folder`.
        folder: of the row's file; a path or URL; empty: the working directory.
        most: bytes.
        options: storage options of the source.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
    """
    full = path if "://" in path or os.path.isabs(path) or not folder else f"{folder}/{path}"
    if "://" not in full:
        return _local(full, most)
    ours = full.partition("://")[0] == folder.partition("://")[0]
    try:
        fs, name = file_system(full, options if ours else {})
        with fs.open(name, "rb") as file:
            return bytes(file.read(most + 1))
    except FileNotFoundError as error:
        if full.startswith(("http://", "https://")):  # also where no server answers
            raise OSError(f"the server did not give it: {error}") from None
        raise
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  every store has errors of its own, and it is this row's fault
        raise OSError(f"{type(error).__name__}: {error}") from None


def folder_of(path: str) -> str:
    """The folder of a source file; empty for what is not a file, like a `datasets` name."""
    return "" if path.startswith("{") else path.rpartition("/")[0]


def _local(path: str, most: int) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")
    with open(path, "rb") as file:
        return file.read(most + 1)
