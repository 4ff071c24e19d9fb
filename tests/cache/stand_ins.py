"""Stores that behave badly in one way each."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Found

NEGATIVE_S = 30.0


@dataclass(frozen=True)
class NfsClient(PosixStore):
    """One client of an NFS export, as measured on a kernel client: a name that was looked up and not there stays
    missing for 30 s in `open`, `stat` and as a folder of a path, unless its folder is listed.

    Several clients of one root are several nodes.
    """

    clock: Callable[[], float] = time.monotonic
    missing: dict[str, float] = field(default_factory=dict)  # path -> when it was looked up in vain
    in_vain: list[str] = field(default_factory=list)  # every path that was looked up in vain

    def _look_up(self, path: str) -> None:
        """What the kernel does with every part of a path."""
        inside = os.path.relpath(path, os.path.dirname(self.root)).split("/")
        for depth in range(1, len(inside) + 1):
            name = os.path.join(os.path.dirname(self.root), *inside[:depth])
            if self.clock() - self.missing.get(name, -NEGATIVE_S) < NEGATIVE_S:
                raise FileNotFoundError(errno.ENOENT, "a negative dentry says so", name)
            if not os.path.lexists(name):
                self.missing[name] = self.clock()
                self.in_vain.append(name)
                raise FileNotFoundError(errno.ENOENT, "the server says so", name)

    def _refresh(self, folder: str) -> None:
        for name in [name for name in self.missing if os.path.dirname(name) == folder]:
            del self.missing[name]

    def _open(self, path: str) -> BinaryIO:
        self._look_up(path)
        return super()._open(path)

    def _listdir(self, path: str) -> tuple[str, ...]:
        if path.startswith(self.root):
            self._look_up(path)
        self._refresh(path)
        return super()._listdir(path)

    def _scandir(self, path: str, few_of: tuple[str, ...] = ()) -> tuple[Found, ...]:
        self._look_up(path)
        self._refresh(path)
        return super()._scandir(path, few_of)

    def _publish(self, staged: str, path: str) -> bool:
        self._refresh(os.path.dirname(path))
        return super()._publish(staged, path)

    def local_path(self, name: str) -> Path | None:
        try:
            self._look_up(self._path(name))
        except FileNotFoundError:
            return Path(self.root) / "a negative dentry"
        return super().local_path(name)


@dataclass(frozen=True)
class NoLinks(PosixStore):
    """A file system without hard links, such as some FUSE mounts."""

    def _publish(self, staged: str, path: str) -> bool:
        return self._publish_without_links(staged, path)


@dataclass(frozen=True)
class ForgetfulLink(PosixStore):
    """An NFS server that did the link, lost its answer, and refuses the repeated request."""

    def _publish(self, staged: str, path: str) -> bool:
        os.link(staged, path)
        return super()._publish(staged, path)


@dataclass(frozen=True)
class StaleHandles(PosixStore):
    """Every other open finds a stale handle, and the root's handle is stale until the folder above it is listed."""

    calls: list[str] = field(default_factory=list)

    def _listdir(self, path: str) -> tuple[str, ...]:
        before = self.calls[-1:]
        self.calls.append(path)
        if path == self.root and before != [os.path.dirname(self.root)]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return super()._listdir(path)

    def _open(self, path: str) -> BinaryIO:
        self.calls.append(path)
        if len(self.calls) % 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return super()._open(path)
