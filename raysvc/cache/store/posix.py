"""A store in a folder: local disk, NFS, or any other mounted file system.

Always true:
- a file appears under its name by `link(2)` of a temporary file that is already synced;
- a name is opened only after a listing showed it, or after its folder was listed again;
- a stale NFS handle is opened again, at most `ATTEMPTS` times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from raysvc.cache.store.store import Data, Found, buffers_of, probe_create
from raysvc.errors import StoreError

T = TypeVar("T")
ATTEMPTS = 4
SEEMS_MISSING = {errno.ENOENT, errno.ESTALE}  # until the folder above was listed
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_ROOM = "make room, or choose another cache.root"
_HANDLES = "raise the limit of open files (ulimit -n), and run again"
CANNOT_WRITE = {
    errno.EROFS: _ROOM,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EMFILE: _HANDLES,
    errno.ENFILE: _HANDLES,
}
FEW = 1000  # names of those that may be left out, as many as a page of S3 has
_probed: set[str] = set()


@dataclass(frozen=True)
class PosixStore:
    """See `raysvc.cache.store.store`.

    Attributes:
        root: absolute path.
        unsafe_store: rename into place where the file system has no hard links.
    """

    root: str
    unsafe_store: bool = False

    @property
    def url(self) -> str:
        """The absolute path."""
        return self.root

    def scan(self, folder: str = "", few_of: tuple[str, ...] = ()) -> Sequence[Found]:
        """Returns what lies directly in a folder, by listing the root first and the folder then."""
        if not self._is_listed(folder):
            return ()
        path = self._path(folder)
        return self._unless_missing(path, lambda: self._scandir(path, few_of)) or ()

    def list(self, folder: str = "") -> Sequence[str]:
        """The names in a folder."""
        if not self._is_listed(folder):
            return ()
        return self._names_in(self._path(folder))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of a file; an absence is believed only after a fresh listing.

        Raises:
            FileNotFoundError: it is not there.
        """
        path = self._path(name)

        def attempt() -> bytes:
            with self._open(path) as file:
                file.seek(start or 0)
                return file.read(-1 if end is None else end - (start or 0))

        try:
            data = self._unless_missing(path, attempt)
        except IsADirectoryError:
            data = None
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return data

    def download(self, name: str, target: BinaryIO) -> None:
        """Copy a whole file."""
        target.write(self.read(name))

    def write(self, name: str, data: Data) -> None:
        """Make a file; FileExistsError when the name is taken after all.

        Raises:
            FileExistsError: the name is taken.
        """
        if not self._appear(name, data):
            raise FileExistsError(errno.EEXIST, "a unique name was taken", self._path(name))

    def create(self, name: str, data: bytes) -> bool:
        """Make a file unless the name is taken."""
        return self._appear(name, data)

    def delete(self, name: str) -> None:
        """Remove a file or an empty folder; a folder that still holds something stays.

        Raises:
            StoreError: it cannot be removed.
        """
        path = self._path(name)
        try:
            _remove(path)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise StoreError(
                self.root, f"{name} cannot be removed ({error})", "check the permissions of that folder"
            ) from error

    def local_path(self, name: str) -> Path | None:
        """The file itself."""
        return Path(self._path(name))

    def probe(self) -> None:
        """Check that the root can be written and has hard links."""
        if self.root in _probed or self.unsafe_store:
            return
        probe_create(self)
        _probed.add(self.root)

    def _is_listed(self, folder: str) -> bool:
        """Returns whether the root shows a folder, and the folder above it where it lies deeper."""
        above, _, name = folder.rpartition("/")
        return not folder or (self._is_listed(above) and name in self._names_in(self._path(above)))

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def _appear(self, name: str, data: Data) -> bool:
        path = self._path(name)
        folder = os.path.dirname(path)
        try:
            for _ in range(ATTEMPTS):
                staged = os.path.join(folder, f".tmp-{uuid.uuid4().hex}")
                try:
                    self._stage_in(folder, staged, data)
                    return self._publish(staged, path)
                except FileNotFoundError:
                    continue  # gc removed the folder with what was staged there
                finally:
                    self._unstage(staged)
                    _sync_folder(folder)
        except (PermissionError, NotADirectoryError) as error:
            raise StoreError(
                self.root, f"cannot be written ({error})", "choose another cache.root"
            ) from error
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            raise StoreError(self.root, f"cannot be written ({error})", CANNOT_WRITE[error.errno]) from error
        raise StoreError(self.root, f"{folder} is deleted again and again", "find out what deletes it")

    def _stage_in(self, folder: str, staged: str, data: Data) -> None:
        for _ in range(ATTEMPTS):
            _make_folder(folder)
            try:
                return self._stage(staged, data)
            except FileNotFoundError:
                continue  # gc removed the folder while it was empty
        raise StoreError(self.root, f"{folder} is deleted again and again", "find out what deletes it")

    def _stage(self, staged: str, data: Data) -> None:
        with open(staged, "xb") as file:
            file.writelines(buffers_of(data))
            file.flush()
            os.fsync(file.fileno())

    def _publish(self, staged: str, path: str) -> bool:
        try:
            os.link(staged, path)
        except FileExistsError:
            return _num_links(staged) == 2  # a repeated NFS request may refuse what it did before
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return self._publish_without_links(staged, path)
        return True

    def _publish_without_links(self, staged: str, path: str) -> bool:
        if not self.unsafe_store:
            raise StoreError(
                self.root,
                "this file system has no hard links, so two builders could overwrite each other",
                "use another cache.root, or set cache.unsafe_store: true and build from one place at a time",
            )
        if os.path.basename(path) in self._names_in(os.path.dirname(path)):
            return False
        os.rename(staged, path)
        return True

    def _unstage(self, staged: str) -> None:
        with contextlib.suppress(OSError):  # renamed into place, or never made; gc removes it otherwise
            os.unlink(staged)

    def _open(self, path: str) -> BinaryIO:
        return open(path, "rb")

    def _listdir(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(os.listdir(path)))

    def _scandir(self, path: str, few_of: tuple[str, ...] = ()) -> tuple[Found, ...]:
        left = FEW
        with os.scandir(path) as items:
            found = []
            for item in items:
                if few_of and item.name.startswith(few_of):
                    left -= 1
                    if left < 0:
                        continue
                found.append(_found(item))
        return tuple(sorted((item for item in found if item is not None), key=lambda item: item.name))

    def _names_in(self, path: str) -> tuple[str, ...]:
        return self._unless_missing(path, lambda: self._listdir(path)) or ()

    def _unless_missing(self, path: str, action: Callable[[], T]) -> T | None:
        """The action's result; None when a fresh listing of the folder above does not show the path either."""
        try:
            return _reopening(action)
        except (PermissionError, NotADirectoryError) as error:
            raise StoreError(
                self.root, f"cannot be read ({error.strerror})", "name another folder"
            ) from error
        except OSError as error:
            if error.errno not in SEEMS_MISSING:
                raise
        if os.path.basename(path) in self._names_in(os.path.dirname(path)):
            with contextlib.suppress(FileNotFoundError):
                return _reopening(action)
        return None


def _found(item: os.DirEntry[str]) -> Found | None:
    """None when it was deleted since it was listed."""
    try:
        status, is_folder = item.stat(follow_symlinks=False), item.is_dir(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return Found(item.name, 0 if is_folder else status.st_size, status.st_mtime, is_folder)


def _remove(path: str) -> None:
    """A file, or a folder that is empty."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError) as error:
        if isinstance(error, PermissionError) and not os.path.isdir(path):
            raise
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def _reopening(action: Callable[[], T]) -> T:
    for _ in range(ATTEMPTS - 1):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return action()


def _num_links(path: str) -> int:
    with open(path, "rb") as file:  # opening asks an NFS server again
        return os.fstat(file.fileno()).st_nlink


def _make_folder(path: str) -> None:
    for _ in range(ATTEMPTS):  # gc may remove a folder above between its making and its use
        try:
            os.mkdir(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            _make_folder(os.path.dirname(path))
        else:
            return
    raise StoreError(path, "a folder cannot be created there", "choose another cache.root")


def _sync_folder(path: str) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # it could not be made
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
