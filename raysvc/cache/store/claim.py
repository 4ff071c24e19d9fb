"""Gives a folder one owner at a time, who alone may write into it, on every store.

    owners/000000000007.json                the seventh owner, and who that is
    owners/000000000007.<nonce>.<beat>      its sign of life: a new one every BEAT_S, and then the old one goes

1. A newcomer lists `owners`. The record with the highest number says who owns the folder now.
2. An owner that lives stays, and the newcomer is refused. An owner is gone if it left no sign, if Ray started the newcomer in its
   place, if Ray of the same cluster does not serve it any more, if its process on this machine has ended, or, where none of this can be
   known, if its sign did not change for GONE_AFTER_S.
3. The newcomer leaves a sign, creates the record with the next number if it is absent, and reads the folder only after that.
4. A write looks at `owners` before and after, and is acknowledged only if the writer's record is still the highest and its sign is there.
   Else the writer stops with FolderLost. What it wrote in that moment stays: its successor may have read it already, and a removal that
   the network repeats could take what the successor wrote. Nobody acknowledged it, and who reads bears with that.

Always true:
- of several that want a folder at once exactly one gets it;
- what was acknowledged was written before the next owner read the folder, so the next owner has seen it;
- an owner that slept for however long changes nothing that its successor wrote, and learns at its next write that it is replaced;
- an owner whose folder was moved or deleted learns it at its next write too: its sign is not at the path any more;
- no clock is compared with another machine's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from raysvc.cache.local.sealed import opened_if_sealed, sealed
from raysvc.cache.store.store import Data, Found, Store
from raysvc.errors import FolderHeld, FolderLost, StoreError

FOLDER = "owners"
BEAT_S = 5.0
GONE_AFTER_S = 30.0
LOOK_EVERY_S = 0.5
ENDING_S = 3.0  # a process that was killed just now may take so long to end
log = logging.getLogger(__name__)


def _place() -> str:
    """Two processes with the same place see each other's process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown:{uuid.uuid4().hex}"


def _started(pid: int) -> str:
    """Returns when a process started, in ticks since boot; "" for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Owner:
    """A process that wants to write into a folder, or did.

    Attributes:
        role: `server` or `trainer`.
        name: of the server, or of the run's folder.
        namespace: of Ray, where it is an actor.
        incarnation: the same after Ray started the actor again.
        cluster: of Ray; "" outside of one.
    """

    role: str
    name: str
    namespace: str = ""
    incarnation: str = ""
    cluster: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    place: str = field(default_factory=_place)
    started: str = field(default_factory=lambda: _started(os.getpid()))

    def __str__(self) -> str:
        where = (
            f", Ray namespace {self.namespace!r}, incarnation {self.incarnation[:8]}"
            if self.namespace
            else ""
        )
        return f"{self.role} {self.name!r} (process {self.pid} on {self.host}{where})"

    def same_actor(self, other: Owner) -> bool:
        """Returns whether both bear the same name in the same namespace."""
        return bool(self.namespace) and (self.role, self.name, self.namespace) == (
            other.role,
            other.name,
            other.namespace,
        )


class Claim:
    """The right of one process to write into a folder; taken at its first use.

    Args:
        store: in the folder.
        owner: this process.
        is_served: whether Ray still serves an owner of this process's cluster.
        remedy: what a user may do about an owner that lives.
    """

    def __init__(
        self,
        store: Store,
        owner: Owner,
        is_served: Callable[[Owner], bool] = lambda owner: True,
        remedy: str = "stop it, or give another run_dir",
    ) -> None:
        self.owner, self._store, self._is_served, self._remedy = owner, store, is_served, remedy
        self._nonce = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()  # guards what follows, and the signs in the folder
        self._number: int | None = None  # None: not taken
        self._beats = 0
        self._lost: FolderLost | None = None
        self._moved = False  # lost because the folder went, and not to somebody else
        self._end = threading.Event()

    def take(self) -> int:
        """Own the folder; returns the number of this owner. A second call changes nothing.

        Raises:
            FolderHeld: another owner lives.
            FolderLost: it was owned, and is not any more.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._number is None:
                self._number = self._created()
                _beat_beside(self)
            return self._number

    def check(self) -> None:
        """Raise unless this process owns the folder now.

        Raises:
            FolderLost: it does not any more; nothing will make it so again.
        """
        self.take()
        with self._lock:
            if self._lost is None:
                self._lost = self._why_lost(_Signs(self._store.list(FOLDER)))
            if self._lost is not None:
                self._end.set()
                raise self._lost

    def beat(self) -> bool:
        """Leave a new sign of life; False when the folder is lost or given back."""
        try:
            self.check()
            with self._lock:
                if self._end.is_set():
                    return False
                self._sign()
        except FolderLost as error:
            log.error("%s", error)
            return False
        except (StoreError, OSError) as error:
            log.warning("no sign of life url=%s error=%s: trying again", self._store.url, error)
        return True

    def renew(self) -> None:
        """Own the folder at the path once more, if it was moved or deleted; for an owner that needs nothing of what was in it.

        Raises:
            FolderHeld, FolderLost: somebody else owns it now.
        """
        with contextlib.suppress(FolderLost):
            self.check()
        with self._lock:
            if self._moved:
                self._number = self._lost = None
                self._nonce, self._beats, self._moved = uuid.uuid4().hex[:12], 0, False
                self._end = threading.Event()
        self.take()

    def rise_above(self, number: int) -> int:
        """Own the folder under a higher number than an earlier owner had, whose record is gone; returns this owner's number.

        Raises:
            FolderLost: somebody else owns it now.
        """
        self.check()
        with self._lock:
            assert self._number is not None, "it was taken"
            if self._number <= number:
                before, self._number = self._sign_name(), number + 1
                if not self._create(self._number):
                    self._lost = FolderLost(self._store.url, "another process took it", str(self.owner))
                self._store.delete(before)
        return self.take()

    def release(self) -> None:
        """Give the folder back: the next one need not wait."""
        with self._lock:
            self._end.set()
            if self._number is None or self._lost is not None:
                return
            self._lost = FolderLost(self._store.url, "it was given back", str(self.owner))
            with contextlib.suppress(StoreError, OSError):  # the next one finds out by itself
                self._store.delete(self._sign_name())

    def _created(self) -> int:
        """Create the next record, once nobody lives who has the newest."""
        while True:
            signs = _Signs(self._store.list(FOLDER))
            self._await_end_of(signs)
            number = signs.newest + 1
            if self._create(number):
                self._forget(signs, number)
                return number

    def _create(self, number: int) -> bool:
        """Leave a sign and the record of a number; False, and no sign: somebody else has it."""
        record, sign = sealed({**asdict(self.owner), "nonce": self._nonce}), self._sign_name(number)
        self._store.write(sign, b"")
        made = self._store.create(f"{FOLDER}/{number:012d}.json", record)
        if not made:
            self._store.delete(sign)
        return made

    def _await_end_of(self, signs: _Signs) -> None:
        """Return when the owner with the newest record is gone for good, or another one came.

        Raises:
            FolderHeld: it lives.
        """
        theirs, nonce = self._read(signs.newest)
        seen, begin = signs.of(signs.newest, nonce), time.monotonic()
        while seen:
            gone, patience_s = self._judge(theirs)
            if gone:
                break
            now, waited_s = _Signs(self._store.list(FOLDER)), time.monotonic() - begin
            left = now.of(signs.newest, nonce)
            if now.newest != signs.newest or not left:
                break
            if left != seen or (patience_s is not None and waited_s > patience_s):
                what = f"belongs to {theirs or 'another process'}, which lives"
                raise FolderHeld(self._store.url, what, self._remedy)
            if waited_s > GONE_AFTER_S:
                break
            time.sleep(LOOK_EVERY_S)
        if seen:
            log.warning("takes over url=%s from=%s", self._store.url, theirs)

    def _judge(self, theirs: Owner | None) -> tuple[bool, float | None]:
        """Returns whether an owner is gone for good, and after how long it is believed that it is not; None: nobody can tell."""
        mine = self.owner
        if theirs is None:
            return False, None
        if mine.same_actor(theirs) and theirs.incarnation == mine.incarnation:
            return True, 0.0
        if theirs.cluster and theirs.cluster == mine.cluster and theirs.namespace:
            return mine.same_actor(theirs) or not self._is_served(theirs), ENDING_S
        if theirs.place == mine.place:
            return _started(theirs.pid) != theirs.started, ENDING_S
        return False, None

    def _read(self, number: int) -> tuple[Owner | None, str]:
        """An owner and what its signs bear; (None, "") for a record that is not there, damaged, or of another version."""
        try:
            found = opened_if_sealed(self._store.read(f"{FOLDER}/{number:012d}.json"))
            return Owner(**{name: found[name] for name in Owner.__dataclass_fields__}), found["nonce"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, ""

    def _why_lost(self, signs: _Signs) -> FolderLost | None:
        assert self._number is not None, "it was taken"
        if signs.newest > self._number:
            return FolderLost(
                self._store.url, f"it belongs to {self._read(signs.newest)[0]} now", str(self.owner)
            )
        if not signs.of(self._number, self._nonce):
            self._moved = True
            what = "it was moved or deleted, or another one lies at its path"
            return FolderLost(self._store.url, what, str(self.owner))
        return None

    def _sign(self) -> None:
        """Called under `_lock`."""
        before, self._beats = self._sign_name(), self._beats + 1
        self._store.write(self._sign_name(), b"")
        self._store.delete(before)

    def _sign_name(self, number: int | None = None) -> str:
        number = self._number if number is None else number
        return f"{FOLDER}/{number:012d}.{self._nonce}.{self._beats:012d}"

    def _forget(self, signs: _Signs, mine: int) -> None:
        """Remove what earlier owners left, but the record of the last one; one whose record is gone may have had the number of mine."""
        for name in signs.names:
            if name != f"{signs.newest:012d}.json" and int(name.split(".")[0]) <= mine:
                with contextlib.suppress(StoreError, OSError):
                    self._store.delete(f"{FOLDER}/{name}")


class _Signs:
    """Holds what a listing of `owners` says."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [name for name in names if name.split(".")[0].isdigit()]
        records = [int(name.split(".")[0]) for name in self.names if name.endswith(".json")]
        self.newest = max(records, default=0)

    def of(self, number: int, nonce: str) -> set[str]:
        """Signs of an owner; of any of that number, where its record does not say what they bear."""
        start = f"{number:012d}.{nonce}."
        return {name for name in self.names if name.startswith(start if nonce else start[:-1])} - {
            f"{number:012d}.json"
        }


def _beat_beside(claim: Claim) -> None:
    """Leave signs of life until the claim ends, or nobody refers to it any more."""
    end, there = claim._end, weakref.ref(claim, lambda _: end.set())

    def work() -> None:
        while not end.wait(BEAT_S):
            mine = there()
            if mine is None or not mine.beat():
                return
            del mine

    threading.Thread(target=work, name="raysvc-owner", daemon=True).start()


@dataclass(frozen=True)
class OwnedStore:
    """A store that only the owner of a folder may write into.

    Reading takes the claim too: who goes on from what is there reads it after the claim.
    """

    store: Store
    claim: Claim

    @property
    def url(self) -> str:
        """The root."""
        return self.store.url

    def scan(self, folder: str = "", few_of: tuple[str, ...] = ()) -> Sequence[Found]:
        """Returns what lies directly in a folder."""
        self.claim.take()
        return self.store.scan(folder, few_of)

    def list(self, folder: str = "") -> Sequence[str]:
        """The names that `scan` shows."""
        self.claim.take()
        return self.store.list(folder)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of a file."""
        self.claim.take()
        return self.store.read(name, start, end)

    def download(self, name: str, target: BinaryIO) -> None:
        """Copy a whole file."""
        self.claim.take()
        self.store.download(name, target)

    def write(self, name: str, data: Data) -> None:
        """Make a file under a name that nobody else uses.

        Raises:
            FolderLost: another process owns the folder; if that came about during this call, the file may be there.
        """
        self.claim.check()
        self.store.write(name, data)
        self.claim.check()

    def create(self, name: str, data: bytes) -> bool:
        """Make a file unless the name is taken.

        Raises:
            FolderLost: another process owns the folder; if that came about during this call, the file may be there.
        """
        self.claim.check()
        made = self.store.create(name, data)
        self.claim.check()
        return made

    def delete(self, name: str) -> None:
        """Remove a file."""
        self.claim.take()
        self.store.delete(name)

    def local_path(self, name: str) -> Path | None:
        """Returns where this process can memory-map the file."""
        return self.store.local_path(name)

    def probe(self) -> None:
        """Check that the root can be written."""
        self.store.probe()


def open_owned(url: str, storage_options: Mapping[str, Any] | None, claim: Claim | None) -> Store:
    """The store of a path or URL, for the owner of a folder above it; without a claim for who reads only."""
    from raysvc.cache.store.open import open_store

    store = open_store(url, storage_options)
    return store if claim is None else OwnedStore(store, claim)
