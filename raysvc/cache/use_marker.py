"""Signs of use in an entry's folder, for `collect_garbage`.

`use-<uid>.json` says that somebody uses the entry now: a server, a reader, a build. It counts for `USE_TTL_S`, so
a holder renews it. `used-<uid>.json` says when the entry was used last: a hit, or a hold that ended.

`shared-<folder>.json` says that the entry in another folder adds columns to the rows of this one. It counts as long as that
entry, or a build of it, is there.

Whoever holds or shares writes the marker first and then looks whether a deletion has begun. gc marks the deletion first and
then looks for markers. So at least one of the two sees the other.

Always true:
- a marker is never changed: renewing writes a new one and then removes the old one;
- ages are by the store's clock, so a marker left by a killed process ends by itself;
- one thread of a process renews all its holds of a store, so that no store waits for another one that hangs; a hold that nobody
  refers to any more is released by it;
- the newest sign of use is never removed before the entry itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from raysvc.cache import names
from raysvc.cache.store.store import Found, Store
from raysvc.errors import EntryError, StoreError

USE_TTL_S = 3600.0
RENEWALS = 4  # in USE_TTL_S
_BUILDER = "builder "
_LOCAL = ""  # all stores on this machine's disks
logger = logging.getLogger(__name__)


class Hold:
    """Keeps one entry, or one build, from being removed until `release`."""

    def __init__(self, store: Store, folder: str, owner: str) -> None:
        """Write the first marker; it is renewed from now on.

        Args:
            store: of the entry.
            folder: of the entry.
            owner: who uses it, for display.

        Raises:
            EntryError: a deletion has begun.
        """
        self._marker = _Marker(store, folder, owner)
        self._marker.renew()
        if names.DELETING in _controls(store, folder):
            self._marker.end()
            raise EntryError(f"{store.url}/{folder}", "it is being removed by gc", "build it again")
        keeper = _keeper_of(store, folder)
        keeper.add(self._marker)
        self._dropped = weakref.finalize(self, keeper.drop, self._marker)
        self._dropped.atexit = False  # `_end_local` ends local ones; a network may hang

    def renew(self) -> None:
        """Write a new marker now."""
        self._marker.renew()

    def release(self) -> None:
        """Remove the marker, and leave a sign of when the entry was used last."""
        if self._dropped.detach():
            _keeper_of(self._marker.store, self._marker.folder).remove(self._marker)
            self._marker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Marker:
    """The file of one hold."""

    def __init__(self, store: Store, folder: str, owner: str) -> None:
        self.store, self.folder, self.owner = store, folder, owner
        self.name: str | None = None  # None: not written, or removed
        self.pid = os.getpid()  # a forked child neither renews nor removes what its parent holds
        self._lock = threading.Lock()  # guards `name` and `_ended`
        self._ended = False

    def renew(self) -> None:
        """A store that cannot be written leaves the entry without a marker, and the log says so."""
        with self._lock:
            if self._ended:
                return
            fresh = names.new_use()
            try:
                self.store.write(f"{self.folder}/{fresh}", _who(self.owner))
            except (StoreError, OSError) as error:
                where = f"{self.store.url}/{self.folder}"
                logger.warning("entry not marked as used uri=%s error=%s", where, error)
                return
            self._remove()
            self.name = fresh

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self.name is not None:
                found = self.store.scan(self.folder, names.MANY)
                mark_used(self.store, self.folder, found, self.owner)
                self._remove()

    def _remove(self) -> None:
        if self.name is not None:
            with contextlib.suppress(StoreError, OSError):  # it ends by time
                self.store.delete(f"{self.folder}/{self.name}")
            self.name = None


class _Keeper:
    """Renews the markers of this process in one store, and ends those whose `Hold` is gone, in one daemon thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two sets and the thread
        self._held: set[_Marker] = set()
        self._dropped: set[_Marker] = set()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, marker: _Marker) -> None:
        with self._lock:
            self._held.add(marker)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raysvc-holds", daemon=True)
                self._thread.start()

    def remove(self, marker: _Marker) -> None:
        with self._lock:
            self._held.discard(marker)

    def drop(self, marker: _Marker) -> None:
        """Called while objects are collected: no waiting, no input or output here."""
        if marker.pid == os.getpid():
            self._dropped.add(marker)
            self._wake.set()

    def end(self) -> None:
        """Removes the markers of this process when it exits."""
        for marker in list(self._held):
            if marker.pid == os.getpid():
                with contextlib.suppress(StoreError, OSError):
                    marker.end()

    def _run(self) -> None:
        while self._is_needed():
            woken = self._wake.wait(USE_TTL_S / RENEWALS)
            self._wake.clear()
            try:
                self._round(renew=not woken)
            except Exception:  # the next round tries again; without this thread no hold would live
                logger.exception("renewing holds failed")

    def _is_needed(self) -> bool:
        with self._lock:
            if not self._held:
                self._thread = None  # the next hold starts another
            return bool(self._held)

    def _round(self, renew: bool) -> None:
        while self._dropped:
            marker = self._dropped.pop()
            try:
                with contextlib.suppress(StoreError, OSError):
                    marker.end()
            finally:
                self.remove(marker)  # only now: at an exit in between `end` has to find it
        if renew:
            with self._lock:
                held = list(self._held)
            for marker in held:
                marker.renew()


_keepers: dict[str, _Keeper] = {}


def _keeper_of(store: Store, folder: str) -> _Keeper:
    """All local stores have one."""
    return _keepers.setdefault(_LOCAL if store.local_path(folder) is not None else store.url, _Keeper())


def _end_local() -> None:
    """Ends holds at exit; what lies on a network ends by time, since a dead store must not delay the exit."""
    if _LOCAL in _keepers:
        _keepers[_LOCAL].end()


os.register_at_fork(after_in_child=_keepers.clear)
atexit.register(_end_local)


def this_process() -> str:
    """Names who uses an entry, for display."""
    return f"{socket.gethostname()}:{os.getpid()}"


def builder() -> str:
    """Names who builds an entry, for `is_being_built`."""
    return f"{_BUILDER}{this_process()}"


def is_being_built(store: Store, folder: str) -> bool:
    """Returns whether a builder holds the entry. One that was killed does for `USE_TTL_S` after it renewed its marker."""
    now_s = store_now(store)
    for item in store.scan(folder, names.MANY):
        if names.USE.fullmatch(item.name) and now_s - item.modified_s < USE_TTL_S:
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                if str(json.loads(store.read(f"{folder}/{item.name}"))["owner"]).startswith(_BUILDER):
                    return True
    return False


def mark_used(store: Store, folder: str, found: Sequence[Found], owner: str) -> None:
    """Leave a sign that the entry was used now; a store that cannot be written has none.

    Args:
        found: an earlier listing of the folder; older signs in it are removed.
    """
    try:
        store.write(f"{folder}/{names.new_used()}", _who(owner))
        for item in found:
            if names.USED.fullmatch(item.name):
                store.delete(f"{folder}/{item.name}")
    except (StoreError, OSError) as error:
        logger.info("use not noted uri=%s/%s error=%s", store.url, folder, error)


def share(store: Store, folder: str, by: str) -> None:
    """Keep an entry from being removed as long as the entry in folder `by` is there.

    Raises:
        EntryError: a deletion has begun.
        StoreError: the marker cannot be written.
    """
    store.create(f"{folder}/{names.shared_with(by)}", b"")
    if names.DELETING in _controls(store, folder):
        store.delete(f"{folder}/{names.shared_with(by)}")
        raise EntryError(f"{store.url}/{folder}", "it is being removed by gc", "build it again")


def store_now(store: Store) -> float:
    """Seconds since 1970 by the clock that the store's listings use; writes an empty file for it.

    Raises:
        StoreError: the store cannot be written.
    """
    name = f".clock-{uuid.uuid4().hex}"
    store.write(name, b"")
    try:
        for item in store.scan():
            if item.name == name:
                return item.modified_s
        raise StoreError(store.url, "a file that was just written is not listed", "see what deletes it")
    finally:
        store.delete(name)


def _controls(store: Store, folder: str) -> set[str]:
    return {item.name for item in store.scan(folder, names.MANY)}


def _who(owner: str) -> bytes:
    return json.dumps({"owner": owner}).encode()
