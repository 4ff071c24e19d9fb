"""Parts of remote entries as files on this node's disk.

Always true:
- a copy is mapped only after its checksum was compared, each time again, wherever the copy came from;
- the folder holds at most half of `max_bytes` and what is just arriving; the least recently used go first;
- a copy that goes while it is mapped stays readable for those who mapped it, and may fill the other half;
- the folder belongs to this user alone; threads and processes that want the same part share its copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.local.mmap import map_file
from raysvc.cache.part_info import PartInfo
from raysvc.errors import EntryError, StoreError

if TYPE_CHECKING:
    import pyarrow as pa

Download = Callable[[BinaryIO], None]
ABANDONED_S = 3600.0  # a download that wrote nothing for so long belongs to a killed process
LOCAL_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class PartCopies:
    """A bounded folder of copies."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make the folder.

        Args:
            folder: on a local disk.
            max_bytes: of the folder, and of what one entry keeps mapped, together.
        """
        self.folder = _private(folder)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()  # guards _busy
        self._busy: dict[str, threading.Lock] = {}  # one download of a part at a time in this process

    def buffer(self, part: PartInfo, where: str, download: Download) -> pa.Buffer:
        """A part's bytes, mapped from a copy that is made when it is not there.

        Args:
            part: what the bytes must be.
            where: URI of the entry, for messages.
            download: writes the remote file into an empty local one.

        Raises:
            EntryError: the remote file is not what the manifest says, twice.
        """
        path = self._path(part)
        with self._lock:
            busy = self._busy.setdefault(path.name, threading.Lock())
        with busy:
            buffer = _mapped(path, part)
            for _ in range(2):
                if buffer is not None:
                    return buffer
                self._fetch(path, part, download)
                buffer = _mapped(path, part)
        if buffer is None:
            raise EntryError(
                f"{where}/{part.name}",
                "it arrived twice with a wrong size or checksum",
                "run raysvc cache verify on the entry",
            )
        return buffer

    def held_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(size for _, size, _ in self._finished())

    def _path(self, part: PartInfo) -> Path:
        return self.folder / f"{part.checksum}-{part.num_bytes}.arrow"

    def _fetch(self, path: Path, part: PartInfo, download: Download) -> None:
        self._make_room(part.num_bytes)
        staged = self.folder / f".tmp-{uuid.uuid4().hex}"
        try:
            with open(staged, "xb") as file:
                download(file)
            os.replace(staged, path)  # same bytes under the same name, and this disk has one kernel
        except OSError as error:
            if error.errno not in LOCAL_TROUBLE:
                raise
            raise StoreError(
                str(self.folder), f"cannot store copies ({error})", "make room, or set RAYSVC_PART_CACHE_DIR"
            ) from error
        finally:
            staged.unlink(missing_ok=True)

    def _finished(self) -> list[tuple[float, int, str]]:
        """Time of last use, size and path of every copy, and of what killed processes left."""
        found = []
        for item in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                status = item.stat()
                if not item.name.startswith(".tmp-") or time.time() - status.st_mtime > ABANDONED_S:
                    found.append((status.st_mtime, status.st_size, item.path))
        return found

    def _make_room(self, num_bytes: int) -> None:
        copies = self._finished()
        total = sum(size for _, size, _ in copies) + num_bytes
        for _, size, path in sorted(copies):
            if total <= self.max_bytes // 2:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


@cache
def node_copies() -> PartCopies:
    """The copies that all entries of this process use: RAYSVC_PART_CACHE_DIR, RAYSVC_PART_CACHE_GB."""
    return copies_from(os.environ)


def copies_from(environ: Mapping[str, str]) -> PartCopies:
    """Folder and bound from the environment; by default half of what is free in the temporary folder.

    Raises:
        StoreError: `RAYSVC_PART_CACHE_GB` is not a number.
    """
    default = Path(tempfile.gettempdir()) / f"raysvc-parts-{os.getuid()}"
    folder = Path(environ.get("RAYSVC_PART_CACHE_DIR") or default)
    limit_gb = environ.get("RAYSVC_PART_CACHE_GB")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if limit_gb is not None:
        try:
            return PartCopies(folder, int(float(limit_gb) * 1e9))
        except ValueError:
            raise StoreError(
                "RAYSVC_PART_CACHE_GB", f"{limit_gb!r} is not a number", "give gigabytes, like 50"
            ) from None
    copies = PartCopies(folder, 0)
    copies.max_bytes = (copies.held_bytes() + shutil.disk_usage(folder).free) // 2
    return copies


def _private(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="raysvc-parts-"))
    return folder


def _mapped(path: Path, part: PartInfo) -> pa.Buffer | None:
    """The copy when it is there and right; a wrong one is removed."""
    try:
        os.utime(path)
        if path.stat().st_size != part.num_bytes:
            path.unlink()
            return None
        buffer = map_file(path)
    except FileNotFoundError:
        return None
    if checksum_of(memoryview(buffer)) == part.checksum:
        return buffer
    path.unlink(missing_ok=True)
    return None
