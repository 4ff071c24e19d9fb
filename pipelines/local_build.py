"""A small build in the process that asks: the slices, parts and receipts of any build, without a cluster.

A cluster costs `CLUSTER_S` before its first row. Below the size at which its workers win that back, one process
makes the slices one after the other, with the class that a worker runs (`raysvc.pipelines.tokenize.SliceMaker`).

Always true:
- whether a build is small follows from its slices and the cores alone;
- on one host one process at a time builds an entry here; the next one goes on from its receipts;
- two hosts may make a slice twice: the commit names one of the two, and the other is garbage;
- a killed process holds no lock, and one that is stopped is not waited for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raysvc.job.config import PoolConfig

CLUSTER_S = 6.0  # measured on two cores: Ray's start, and a worker that has imported and loaded its tokenizer
ASLEEP_S = 10.0  # a builder that says nothing for so long is not waited for
BYTES_PER_S = 10e6  # of JSON lines on one core, with a tokenizer of 150,000 entries


def fits_one_process(num_bytes: float, num_slices: int, pool: PoolConfig, cores: int | None = None) -> bool:
    """Returns whether one process ends a build before the workers of a cluster would.

    Args:
        num_bytes: of the slices that are left.
        num_slices: as many.
        pool: a job that asks for several workers gets them.
        cores: as a guess of how many workers there would be; None: those of this machine.
    """
    cores = cores or os.cpu_count() or 1
    workers = min(num_slices, cores, pool.max or cores)
    alone_s = num_bytes / BYTES_PER_S
    return pool.min == 1 and alone_s < CLUSTER_S + alone_s / max(workers, 1)


@contextmanager
def only_builder_here(uri: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the right to build an entry in this process, on this host.

    The lock is a file of the host's own temporary folder, never of the cache, which may lie on NFS. It saves work and
    guards nothing: where it cannot be had, the build goes on without. So it does where the holder gives no sign of life for
    `ASLEEP_S` (it was stopped): both make the same parts, and one of them commits.

    Args:
        uri: of the entry.
        on_wait: called once when another process has it.
    """
    path = _lock_path(uri)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        held = _locked(path, on_wait)
    except OSError:
        held = None
    if held is None:
        yield
        return
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(held, ended), name="raysvc-builder-lives", daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        path.unlink(missing_ok=True)
        os.close(held)


def _beat(held: int, ended: threading.Event) -> None:
    while not ended.wait(ASLEEP_S / 10):
        os.utime(held)


def _lock_path(uri: str) -> Path:
    name = hashlib.sha256(uri.encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"raysvc-builds-{os.getuid()}" / f"{name}.lock"


def _locked(path: Path, on_wait: Callable[[], None]) -> int | None:
    """A descriptor that holds the lock of the file that now has this name: who had it before has removed his. None: who has it sleeps."""
    while True:
        held = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            if not _freed(held):
                os.close(held)
                return None
        try:
            if os.fstat(held).st_ino == path.stat().st_ino:
                return held
        except FileNotFoundError:
            pass
        os.close(held)


def _freed(held: int) -> bool:
    """Wait for the lock; whether it was had, before its holder gave no sign of life for `ASLEEP_S`."""
    seen, since_s = os.fstat(held).st_mtime_ns, time.monotonic()
    while time.monotonic() - since_s < ASLEEP_S:
        time.sleep(0.05)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (now := os.fstat(held).st_mtime_ns) != seen:
                seen, since_s = now, time.monotonic()
        else:
            return True
    return False
