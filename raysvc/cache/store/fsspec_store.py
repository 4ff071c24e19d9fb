"""A store behind fsspec: S3, GCS, `memory://` and whatever else fsspec opens.

Always true:
- `create` is one single request with the store's own condition, never a multipart upload;
- neither listings nor reads are answered from fsspec's cache of listings;
- a request that may work on another attempt is tried again with growing pauses; a refusal of credentials
  or bucket becomes a StoreError at once;
- a listing that may leave out names that begin alike has every other name, and costs one request more for each beginning.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from inspect import signature
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from raysvc.cache.store.retry import first_answer, retried
from raysvc.cache.store.signed_url import download_signed
from raysvc.cache.store.store import Data, Found, buffers_of, probe_create
from raysvc.errors import StoreError

T = TypeVar("T")
_probed: set[str] = set()
_answered: set[str] = set()  # roots that answered this process once
_memory = threading.Lock()  # memory:// lists, removes and creates in several steps; it lives in one process


@dataclass(frozen=True)
class FsspecStore:
    """See `raysvc.cache.store.store`.

    Attributes:
        url: root URL without a slash at the end.
        options: storage options for fsspec.
        unsafe_store: look and write in two steps where the store knows no condition.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    unsafe_store: bool = False

    def scan(self, folder: str = "", few_of: tuple[str, ...] = ()) -> Sequence[Found]:
        """Returns what lies directly in a folder."""
        fs = self._fs()
        base = fs._strip_protocol(self._path(folder)).rstrip("/")
        if few_of and self._is_s3():
            return self._retried("list", lambda: tuple(few_names(fs, base, few_of)))
        try:
            with self._alone():
                infos = self._retried("list", lambda: fs.ls(base, detail=True, refresh=True))
        except FileNotFoundError:
            return ()
        return tuple(_found(info, base) for info in infos if info["name"].rstrip("/") != base)

    def list(self, folder: str = "") -> Sequence[str]:
        """The names in a folder."""
        return tuple(item.name for item in self.scan(folder))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of a file."""
        whole = start is None and end is None

        def attempt() -> bytes:
            fs = self._fs()
            single = _in_one_request(fs) if whole and self._is_s3() else {}
            return bytes(fs.cat_file(self._path(name), start=start, end=end, **single))

        return self._retried("read", attempt)

    def download(self, name: str, target: BinaryIO) -> None:
        """Copy a whole file, over a signed URL where the store gives one, which is several times faster."""

        def attempt() -> None:
            target.seek(0)
            target.truncate()
            fs, path = self._fs(), self._path(name)
            if not download_signed(fs, path, target):
                target.seek(0)
                target.truncate()
                target.write(fs.cat_file(path))

        self._retried("read", attempt)

    def write(self, name: str, data: Data) -> None:
        """Make a file under a name of its own."""
        whole = b"".join(buffers_of(data))
        self._retried("write", lambda: self._fs().pipe_file(self._path(name), whole))

    def create(self, name: str, data: bytes) -> bool:
        """Make a file unless the name is taken.

        A request whose answer was lost may find its own file on the next attempt, so a refusal counts as a
        win when the file holds exactly these bytes.
        """
        if self.unsafe_store and name.rpartition("/")[2] in self.list(name.rpartition("/")[0]):
            return False
        try:
            self._retried("create", lambda: self._put_if_absent(name, data))
        except FileExistsError:
            try:
                return self.read(name) == data
            except FileNotFoundError:  # it was removed meanwhile, by who had made it
                return False
        return True

    def delete(self, name: str) -> None:
        """Remove a file; folders of object stores vanish with their last file."""
        try:
            with self._alone():
                self._retried("delete", lambda: self._fs().rm_file(self._path(name)))
        except (FileNotFoundError, IsADirectoryError):
            return

    def local_path(self, name: str) -> Path | None:
        """None: bytes come over the network."""
        return None

    def probe(self) -> None:
        """Check that the root can be written and knows create-if-absent."""
        if self.unsafe_store or self.url in _probed:
            return
        probe_create(self)
        _probed.add(self.url)

    def _fs(self) -> Any:
        import fsspec

        protocol = self.url.partition("://")[0]
        try:
            # s3fs would take a file that appeared after a listing for missing, even in a read
            return fsspec.filesystem(protocol, **{**self.options, "use_listings_cache": False})
        except (ImportError, ValueError) as error:
            raise StoreError(
                self.url, f"cannot be opened ({error})", "install the package, or fix the URL"
            ) from error

    def _alone(self) -> AbstractContextManager[object]:
        return _memory if self.url.startswith("memory://") else nullcontext()

    def _is_s3(self) -> bool:
        return self.url.partition("://")[0] in ("s3", "s3a")

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _retried(self, what: str, action: Callable[[], T]) -> T:
        if self.url not in _answered and "://" in self.url and not self.url.startswith("memory://"):
            first_answer(self.url, lambda: self._fs().ls(self.url, detail=False, refresh=True))
            _answered.add(self.url)
        return retried(self.url, what, action)

    def _put_if_absent(self, name: str, data: bytes) -> None:
        fs = self._fs()
        protocol = self.url.partition("://")[0]
        single = {"chunksize": len(data) + 1} if protocol in ("s3", "s3a", "gs", "gcs") else {}
        if self.unsafe_store:
            fs.pipe_file(self._path(name), data, **single)
        elif protocol == "memory":
            with _memory:
                fs.pipe_file(self._path(name), data, mode="create")
        else:
            try:
                fs.pipe_file(self._path(name), data, mode="create", **single)
            except Exception as error:  # gcsfs: not even an OSError
                if _says_taken(error):
                    raise FileExistsError(errno.EEXIST, "the name is taken", name) from error
                raise


def _in_one_request(fs: Any) -> dict[str, int]:
    """Returns how s3fs reads without asking for the size first; before 2026.3 it never asks."""
    return {"max_concurrency": 1} if "max_concurrency" in signature(fs._cat_file).parameters else {}


def _says_taken(error: Exception) -> bool:
    """s3fs says FileExistsError, or EINVAL from a response 412; gcsfs an HttpError with the code 412."""
    if isinstance(error, FileExistsError):
        return True
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = response.get("Error", {}).get("Code")
    return (
        status == 412 or code in ("PreconditionFailed", "412") or getattr(error, "code", None) in (412, "412")
    )


def _found(info: Mapping[str, Any], base: str) -> Found:
    name = info["name"].rstrip("/")[len(base) :].lstrip("/")
    return Found(name, int(info.get("size") or 0), _modified_s(info), info.get("type") == "directory")


def _modified_s(info: Mapping[str, Any]) -> float:
    for field_name in ("LastModified", "mtime", "updated", "created", "last_modified"):
        value = info.get(field_name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    return 0.0


def few_names(fs: Any, base: str, few_of: tuple[str, ...]) -> Iterator[Found]:
    """Returns what lies directly in a folder.

    Args:
        fs: s3fs.
        base: bucket and folder.
        few_of: beginnings of names that may be left out.
    """
    bucket, key, _ = fs.split_path(base)
    folder = f"{key}/" if key else ""
    after = folder
    while True:
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=folder, Delimiter="/", StartAfter=after)
        for item in page.get("Contents", ()):
            if name := item["Key"][len(folder) :]:
                yield Found(name, item["Size"], item["LastModified"].timestamp(), False)
        if not page["IsTruncated"]:
            return
        last = page["Contents"][-1]["Key"][len(folder) :]
        many = next((start for start in few_of if last.startswith(start)), None)
        after = folder + (last if many is None else f"{many}\x7f")
