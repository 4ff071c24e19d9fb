"""What a server keeps when its disk is full or read-only, when no file can be opened, and when its store is slow or loses answers."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from raysvc.actors.mesh import Mesh
from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.group_pool import Pool
from raysvc.actors.rollouts.group_store import GroupStore
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.lease_store import LeaseStore
from raysvc.actors.server.leases import Leases
from raysvc.actors.server.spec import ServeSpec
from raysvc.cache.store.claim import Claim, OwnedStore, Owner
from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Data
from raysvc.errors import StoreError
from raysvc.feedback.decision import Decision
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import table_of
from raysvc.rl.schema import Schema


@dataclass(frozen=True)
class Broken(PosixStore):
    """A disk that refuses every write, or every file that is opened, while `error` holds a number."""

    error: list[int] = field(default_factory=list)

    def _stage(self, staged: str, data: Data) -> None:
        if self.error:
            raise OSError(self.error[0], os.strerror(self.error[0]), staged)
        super()._stage(staged, data)

    def _open(self, path: str) -> BinaryIO:
        if self.error and self.error[0] in (errno.EMFILE, errno.EIO):
            raise OSError(self.error[0], os.strerror(self.error[0]), path)
        return super()._open(path)


@dataclass(frozen=True)
class Slow(PosixStore):
    """A store whose requests take a while, by a scaled clock: 3 to 30 s are 30 to 300 ms."""

    def _stage(self, staged: str, data: Data) -> None:
        time.sleep(0.03 + 0.27 * (hash(staged) % 10) / 10)
        super()._stage(staged, data)


def groups(*uids: str) -> Any:
    return table_of([Group(uid, [[1, 7], [2, 8, 9]], [[0, 1], [0, 1, 1]]) for uid in uids])


class Kept:
    """All that a server keeps, on one store."""

    def __init__(self, store: PosixStore) -> None:
        self.claim = Claim(store, Owner("server", "s"))
        url = store.root
        self.journal = self._on(Journal(url, {}, self.claim), store, "")
        self.leases = LeaseStore(Leases("s"), 30.0, "one", self.journal)
        self.feedback = self._on(FeedbackLog(f"{url}/feedback", {}, self.claim), store, "/feedback")
        self.spool = self._on(Spool(f"{url}/rollouts", {}, self.claim), store, "/rollouts")
        self.served = self._on(ServedRecords(url, {}, self.claim), store, "/served")
        self.groups = GroupStore(Pool(2), Schema(), self.spool)
        self.number = 0

    def _on(self, kept: Any, store: PosixStore, below: str) -> Any:
        more = {"error": store.error} if isinstance(store, Broken) else {}
        kept._store = OwnedStore(type(store)(store.root + below, **more), self.claim)
        return kept

    def changes(self) -> dict[str, Callable[[], object]]:
        """Name -> a write of each kind."""
        self.number += 1
        number, spec = (
            self.number,
            ServeSpec(name="s", sources=(), plan=PlanConfig(), pad_token_id=self.number, journal="x"),
        )
        return {
            "lease": lambda: self.leases.attach("", "rows", f"h{number}", f"h{number}", 0, Mesh(1), True, 1),
            "decision": lambda: self.feedback.add(
                len(self.feedback.decisions()), Decision(str(number), number, None, (), (1,), {})
            ),
            "put": lambda: self.groups.put(groups(f"g{number}")),
            "close": lambda: self.groups.drop([f"never-{number}"]) or self.groups.release([f"g{number}"]),
            "step": lambda: self.groups.form(0, 0),
            "served": lambda: self.served.keep(number, spec),
        }


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE]
)
def test_a_write_that_the_system_refuses_is_said_and_the_next_one_goes_on(error: int, tmp_path: Path) -> None:
    broken = Broken(str(tmp_path / "server"))
    kept = Kept(broken)
    for change in kept.changes().values():
        change()
    for name in kept.changes():
        if name == "step":
            continue  # it is formed only when groups are there
        change = kept.changes()[name]
        broken.error.append(error)
        with pytest.raises((StoreError, OSError), match=os.strerror(error)) as said:
            change()
        assert isinstance(said.value, StoreError) or error in (errno.EMFILE, errno.EIO), (
            "reads are told as they are"
        )
        broken.error.clear()
        kept.changes()[name]()
    assert kept.groups.form(0, 0)
    fence = kept.leases.leases.next_fence - 1
    kept.claim.release()
    again = Kept(Broken(str(tmp_path / "server")))
    assert again.leases.leases.next_fence == fence + 1
    assert again.groups.pool.steps[0] == kept.groups.pool.steps[0]
    assert set(again.groups.pool.versions) == set(kept.groups.pool.versions)
    assert again.groups.num_rows == kept.groups.num_rows
    again.claim.release()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "raysvc-test", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full_or_read_only_loses_nothing_that_was_acknowledged(disk: Path) -> None:
    kept, acknowledged = Kept(PosixStore(str(disk / "server"))), []

    def put_until_full() -> None:
        while len(acknowledged) < 1000:
            uid = f"g{len(acknowledged)}"
            kept.groups.put(groups(uid))
            acknowledged.append(uid)

    with pytest.raises(StoreError, match=r"No space left on device.*make room"):
        put_until_full()
    assert len(acknowledged) > 5
    with pytest.raises(StoreError, match="No space left"):
        kept.leases.attach("", "rows", "a" * 30_000, "a", 0, Mesh(1), False, 1)
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    kept.groups.put(groups("after"))
    kept.leases.flush()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises((StoreError, OSError), match="Read-only file system"):
        kept.groups.put(groups("read-only"))
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    kept.claim.release()
    again = Kept(PosixStore(str(disk / "server")))
    assert {uid for uid, _ in again.groups.pool.versions} >= {*acknowledged, "after"}
    again.claim.release()


def test_a_slow_store_keeps_its_owner_and_its_order(tmp_path: Path) -> None:
    kept = Kept(Slow(str(tmp_path / "server")))
    fences: list[int] = []

    def attach(number: int) -> None:
        fences.append(kept.leases.attach("", "rows", f"h{number}", f"h{number}", 0, Mesh(1), True, 1).fence)

    threads = [threading.Thread(target=attach, args=(number,)) for number in range(6)]
    puts = [threading.Thread(target=kept.groups.put, args=(groups(f"g{number}"),)) for number in range(6)]
    for thread in (*threads, *puts):
        thread.start()
    for thread in (*threads, *puts):
        thread.join()
    assert sorted(fences) == [1, 2, 3, 4, 5, 6]
    kept.claim.release()
    again = Kept(PosixStore(str(tmp_path / "server")))
    assert again.leases.leases.next_fence == 7
    assert len(again.groups.pool.versions) == 6
    again.claim.release()


def test_a_put_that_was_applied_and_whose_answer_is_lost_is_acknowledged_once(s3_server: Any) -> None:
    from raysvc.cache.store import retry

    servers = __import__("sys").modules["s3_servers"]
    with servers.proxy(s3_server) as flaky, pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "FIRST_PAUSE_S", 0.001)
        url = f"s3://raysvc-tests/lost-{os.getpid()}/server"
        claim = Claim(open_store(url, flaky.options), Owner("server", "s"))
        journal = Journal(url, flaky.options, claim)
        for number in range(6):
            flaky.proxy.method, flaky.proxy.only = "PUT", "server"
            setattr(flaky.proxy, ("lose", "fail")[number % 2], 1)
            journal.save(lambda number=number: {"n": number})
            assert Journal(url, s3_server.options).load() == {"n": number}
        assert (
            len([name for name in open_store(url, s3_server.options).list() if name.endswith(".json")]) == 1
        )
        claim.release()
