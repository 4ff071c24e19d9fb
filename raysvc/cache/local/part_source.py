"""Decides where the bytes of an entry's parts come from: the file itself, or a checked copy of a remote one.

Always true:
- `buffer` gives memory-mapped bytes of exactly the size that the manifest says;
- `prefetch` never blocks, and never fetches more than the copies may hold.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from raysvc.cache.local.mmap import map_file
from raysvc.cache.local.part_cache import PartCopies
from raysvc.cache.part_info import PartInfo
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError

if TYPE_CHECKING:
    import pyarrow as pa

DOWNLOADS = max(4, min(16, 2 * (os.cpu_count() or 1)))  # a connection gives some 100 MB/s and half a core
NO_LIMIT = 1 << 62


class LocalParts:
    """Files that this node can map: a local disk, or NFS.

    Attributes:
        max_mapped_bytes: that an entry may keep mapped.
        are_checked: whether `buffer` compared the bytes with their checksum.
    """

    max_mapped_bytes = NO_LIMIT
    are_checked = False

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder

    def buffer(self, part: PartInfo) -> pa.Buffer:
        """Map the file.

        Raises:
            EntryError: the part is missing, or its bytes are not those of the manifest.
        """
        path = self._store.local_path(f"{self._folder}/{part.name}")
        assert path is not None, "RemoteParts is for stores without files"
        try:
            buffer = map_file(path)
        except FileNotFoundError:
            raise _missing(self._store, self._folder, part) from None
        if buffer.size != part.num_bytes:
            what = f"it has {buffer.size} bytes instead of {part.num_bytes}"
            raise EntryError(str(path), what, "run raysvc cache verify on the entry")
        return buffer

    def prefetch(self, parts: Sequence[PartInfo]) -> None:
        """Nothing: the kernel reads ahead."""


class RemoteParts:
    """Parts of an object store, through copies on this node's disk."""

    are_checked = True

    def __init__(self, store: Store, folder: str, copies: PartCopies) -> None:
        self._store, self._folder, self._copies = store, folder, copies
        self._lock = threading.Lock()  # guards _pool and _pending
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[str, tuple[PartInfo, Future[pa.Buffer]]] = {}  # announced and not yet asked for

    @property
    def max_mapped_bytes(self) -> int:
        """A quarter of what the copies may take; what was announced and not read yet may take another one."""
        return self._copies.max_bytes // 4

    def buffer(self, part: PartInfo) -> pa.Buffer:
        """Wait for the copy."""
        with self._lock:
            pending = self._pending.pop(part.name, None)
        return self._fetch(part) if pending is None else pending[1].result()

    def prefetch(self, parts: Sequence[PartInfo]) -> None:
        """Begin the downloads, as many as fit."""
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="raysvc-parts")
            for part in parts:
                if part.name in self._pending:
                    continue
                if not self._has_room(part):
                    return
                self._pending[part.name] = (part, self._pool.submit(self._fetch, part))

    def _has_room(self, part: PartInfo) -> bool:
        """Let go of parts that were announced and never read, until there is room for another one."""
        held = sum(other.num_bytes for other, _ in self._pending.values())
        for name, (other, future) in list(self._pending.items()):
            if held + part.num_bytes <= self.max_mapped_bytes:
                return True
            if future.done():
                del self._pending[name]
                held -= other.num_bytes
        return not self._pending or held + part.num_bytes <= self.max_mapped_bytes

    def _fetch(self, part: PartInfo) -> pa.Buffer:
        path = f"{self._folder}/{part.name}"
        try:
            where = f"{self._store.url}/{self._folder}"
            return self._copies.buffer(part, where, lambda file: self._store.download(path, file))
        except FileNotFoundError:
            raise _missing(self._store, self._folder, part) from None


def _missing(store: Store, folder: str, part: PartInfo) -> EntryError:
    where = f"{store.url}/{folder}/{part.name}"
    return EntryError(
        where, "it is missing", "run raysvc cache verify on the entry, then raysvc tokenize again"
    )
