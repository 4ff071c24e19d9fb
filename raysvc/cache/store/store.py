"""Says where entries lie: a folder of folders of files that appear finished or not at all.

What a store promises, on a local disk, on NFS, on S3 and on anything that fsspec opens:

- `write`: the file is complete when it can be seen, and is durable when the call returns;
- `create`: as `write`, and of all that create one name exactly one gets True, in any process on any node
  (hard link of a synced temporary file on POSIX and NFS; PUT with `If-None-Match: *` on S3; generation
  match 0 on GCS); `probe` refuses a store that cannot;
- `scan` and `list` show every file whose `write` or `create` returned before, on any client: an NFS
  client that once looked a name up may miss it for 30 s in `open` and `stat`, and still sees it in a listing,
  so readers list first and open only what a listing showed;
- nothing is renamed over; `delete` is for garbage alone.

- a listing that may leave out most of a folder's parts costs a fixed number of requests on S3, and no `stat` of them on POSIX;

Names are `file`, `folder/file` or `folder/folder/file`, `/` between, relative to the root.

Always true:
- a store is its configuration alone and survives pickling;
- every failure that a user can fix is a StoreError that names the root; a missing file is FileNotFoundError.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from raysvc.errors import StoreError

Data = bytes | memoryview | list[memoryview]  # a list: one after another


@dataclass(frozen=True)
class Found:
    """One name that a listing showed.

    Attributes:
        name: without the folder.
        size: bytes, 0 for a folder.
        modified_s: seconds since 1970 by the store's own clock, 0.0 for a folder of an object store.
        is_folder: True for a folder.
    """

    name: str
    size: int
    modified_s: float
    is_folder: bool


class Store(Protocol):
    """See the module's contract."""

    @property
    def url(self) -> str:
        """The root, without a slash at the end."""
        ...

    def scan(self, folder: str = "", few_of: tuple[str, ...] = ()) -> Sequence[Found]:
        """Returns what lies directly in a folder; empty when there is no such folder.

        Of names that begin with one of `few_of` some may be left out, where there are very many.
        """
        ...

    def list(self, folder: str = "") -> Sequence[str]:
        """The names that `scan` shows."""
        ...

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes `start:end` of a file; FileNotFoundError when it is not there."""
        ...

    def download(self, name: str, target: BinaryIO) -> None:
        """Copy a whole file to an empty one; FileNotFoundError when it is not there."""
        ...

    def write(self, name: str, data: Data) -> None:
        """Make a file of these bytes, or buffers one after another, under a name that nobody else uses."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Make a file unless the name is taken; False when somebody else made it."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file, or a folder that holds nothing any more; nothing happens when it is not there."""
        ...

    def local_path(self, name: str) -> Path | None:
        """Returns where this process can memory-map the file; None for an object store."""
        ...

    def probe(self) -> None:
        """Check once per process that the root can be written and that `create` has one winner."""
        ...


def buffers_of(data: Data) -> list[memoryview]:
    """Returns what to write, one after another."""
    return data if isinstance(data, list) else [memoryview(data)]


def probe_create(store: Store, rivals: int = 4) -> None:
    """Raise StoreError unless `create` refuses a name that is taken, and has one winner among rivals."""
    name = f".probe-{uuid.uuid4().hex}"
    with ThreadPoolExecutor(rivals) as pool:
        racing = [pool.submit(store.create, name, b"rival %d" % index) for index in range(rivals)]
    try:
        wins = sum(rival.result() for rival in racing)
        if wins == 1 and not store.create(name, b"late"):
            return
        what = f"{wins} of {rivals} rivals were told they won"
    except OSError as error:
        what = str(error)
    finally:
        with contextlib.suppress(StoreError, OSError):  # a store may forbid it, or not be there at all
            store.delete(name)
    raise StoreError(
        store.url,
        f"it cannot create a file only if it is absent: {what}",
        "use another root, or set cache.unsafe_store: true and build from one place at a time",
    )
