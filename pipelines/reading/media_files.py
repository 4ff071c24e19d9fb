"""Reads the file of a medium that a row names, where `raysvc.media.reference` lets it.

Always true:
- only regular files are read, and no more than was asked for;
- options of the source's store go to that store alone, never to another server that a row names.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from raysvc.media.reference import AllowedPlaces
from raysvc.pipelines.reading.pinned_file import file_system
from raysvc.pipelines.reading.web_file import read_web_file


def read_media_file(reference: str, places: AllowedPlaces, most: int, options: dict[str, Any]) -> bytes:
    """The bytes of a file, one more than `most` where it is longer.

    Args:
        reference: as the row has it.
        places: where it may lie.
        most: bytes.
        options: storage options of the source.

    Raises:
        NotAllowed: the row may not name it.
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
    """
    full = places.address_of(reference, os.path.realpath)
    if "://" not in full:
        return _local(full, most)
    if full.startswith(("http://", "https://")):
        return read_web_file(full, most, places, options)
    ours = full.partition("://")[0] == places.folder.partition("://")[0]
    try:
        fs, name = file_system(full, options if ours else {})
        with fs.open(name, "rb") as file:
            return bytes(file.read(most + 1))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  every store has errors of its own, and it is this row's fault
        raise OSError(f"{type(error).__name__}: {error}") from None


def folder_of(path: str) -> str:
    """The folder of a source file; empty for what is not a file, like a `datasets` name."""
    return "" if path.startswith("{") else path.rpartition("/")[0]


def _local(real: str, most: int) -> bytes:
    """Reads the file of a path without links: one that was put there in the meantime is not followed."""
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        return file.read(most + 1)
