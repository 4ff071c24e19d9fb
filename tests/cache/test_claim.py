"""Who owns a folder: the list in `raysvc.cache.store.claim`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysvc.cache.store import claim as claims
from raysvc.cache.store.claim import Claim, OwnedStore, Owner
from raysvc.cache.store.open import open_store
from raysvc.errors import FolderHeld, FolderLost

from .servers import S3

Open = Callable[[], Any]


@pytest.fixture(params=["posix", "memory", "s3"])
def open_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Gives a store of one folder, as another process would open it."""
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        store = s3.store()
        return lambda: replace(store)
    prefix = "memory://" if request.param == "memory" else ""
    return lambda: open_store(f"{prefix}{tmp_path}/folder")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life that are due ten times a second; who lives may be late with them on a busy machine."""
    monkeypatch.setattr(claims, "BEAT_S", 0.1)
    monkeypatch.setattr(claims, "GONE_AFTER_S", 60.0)
    monkeypatch.setattr(claims, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(claims, "ENDING_S", 0.2)


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nobody waits for an owner that lives."""
    monkeypatch.setattr(claims, "GONE_AFTER_S", 0.6)


@pytest.fixture
def owners(open_folder: Open) -> Iterator[Callable[..., OwnedStore]]:
    """Makes owners of the folder, each as if on a machine of its own."""
    with ExitStack() as stack:

        def make(name: str, **facts: str) -> OwnedStore:
            owner = Owner("server", name, **{"place": name, **facts})
            made = Claim(open_folder(), owner, is_served=lambda _: False)
            stack.callback(made.release)
            return OwnedStore(open_folder(), made)

        yield make


def sleep_on(owned: OwnedStore) -> None:
    """Stop its signs of life, as a stopped process does."""
    owned.claim._end.set()


def test_an_owner_that_lives_is_not_replaced_and_is_named(owners: Callable[..., OwnedStore]) -> None:
    first = owners("first")
    first.write("a", b"1")
    with pytest.raises(FolderHeld, match=r"server 'first' \(process \d+ on .*which lives; stop it"):
        owners("second").create("b", b"2")
    assert first.read("a") == b"1"
    first.write("c", b"3")


def test_an_owner_that_gave_the_folder_back_is_followed_at_once(owners: Callable[..., OwnedStore]) -> None:
    first = owners("first")
    first.write("a", b"1")
    first.claim.release()
    begin = time.monotonic()
    assert owners("second").create("b", b"2")
    assert time.monotonic() - begin < claims.GONE_AFTER_S / 2
    with pytest.raises(FolderLost, match="given back"):
        first.write("c", b"3")


def test_an_owner_that_slept_changes_nothing_and_learns_it_at_its_next_write(
    owners: Callable[..., OwnedStore], open_folder: Open, soon_gone: None
) -> None:
    first = owners("first")
    assert first.create("1", b"of the first")
    sleep_on(first)
    second = owners("second")
    assert second.create("2", b"of the second")
    for write in (first.create, first.write):
        with pytest.raises(FolderLost, match=r"server 'first'.*belongs to server 'second'.*stop it"):
            write("3", b"of the first")
    with pytest.raises(FolderLost):
        first.create("2", b"of the first")
    assert "3" not in open_folder().list()
    assert open_folder().read("2") == b"of the second"
    second.write("3", b"of the second")


def test_the_sleeper_that_wakes_in_the_middle_of_a_write_is_told_and_changes_no_file_of_its_successor(
    owners: Callable[..., OwnedStore], open_folder: Open, soon_gone: None
) -> None:
    first = owners("first")
    first.claim.take()
    second = owners("second")

    class Sleeps:
        """A store whose write takes as long as a successor needs to come."""

        def __getattr__(self, name: str) -> Any:
            return getattr(open_folder(), name)

        def write(self, name: str, data: bytes) -> None:
            sleep_on(first)
            second.create("1", b"of the second")
            open_folder().write(name, data)

        def create(self, name: str, data: bytes) -> bool:
            self.write("late", data)
            return bool(open_folder().create(name, data))

    for write in (OwnedStore(Sleeps(), first.claim).create, OwnedStore(Sleeps(), first.claim).write):  # type: ignore[arg-type]
        with pytest.raises(FolderLost):
            write("1", b"of the first")
    assert open_folder().read("1") == b"of the second"


def test_of_many_that_want_a_folder_at_once_exactly_one_gets_it(
    owners: Callable[..., OwnedStore], open_folder: Open
) -> None:
    def take(name: str) -> int:
        try:
            return owners(name).claim.take()
        except FolderHeld:
            return 0

    with ThreadPoolExecutor(6) as pool:
        numbers = sorted(pool.map(take, [f"n{index}" for index in range(6)]))
    assert numbers == [0, 0, 0, 0, 0, 1]


def test_ray_says_who_is_gone(owners: Callable[..., OwnedStore]) -> None:
    here = {"namespace": "raysvc", "cluster": "c"}
    owners("a", incarnation="1", **here).claim.take()
    again = owners("a", incarnation="1", **here)
    assert again.claim.take() == 2, "Ray started it again"
    successor = owners("a", incarnation="2", **here)
    assert successor.claim.take() == 3, "one name has one actor"
    other = owners("b", incarnation="3", **here)
    assert other.claim.take() == 4, "Ray does not serve `a` any more"
    held = Claim(
        other.store, Owner("server", "c", place="c", **here), is_served=lambda owner: owner.name == "b"
    )
    with pytest.raises(FolderHeld, match="server 'b'"):
        held.take()


def test_old_signs_do_not_pile_up(owners: Callable[..., OwnedStore], open_folder: Open) -> None:
    for number in range(5):
        owner = owners(f"owner {number}")
        assert owner.claim.take() == number + 1
        for _ in range(3):
            owner.claim.beat()
        if number < 4:
            owner.claim.release()
    names = open_folder().list(claims.FOLDER)
    assert sorted(name for name in names if name.endswith(".json")) == [
        f"00000000000{n}.json" for n in (4, 5)
    ]
    assert len(names) <= 4


def test_a_folder_that_is_moved_or_deleted_under_its_owner_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    monkeypatch.setattr(claims, "BEAT_S", 60.0)  # a sign that is on its way would make the old path again
    mine = OwnedStore(open_store(str(path)), Claim(open_store(str(path)), Owner("trainer", "a", place="a")))
    mine.write("x", b"")
    path.rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(FolderLost, match="moved or deleted"):
            mine.write("y", b"")
        assert not path.exists(), "nothing is written at the old path"
    monkeypatch.setattr(claims, "BEAT_S", 0.1)
    other = Claim(open_store(str(path)), Owner("trainer", "b", place="b"))
    assert other.take() == 1
    with pytest.raises(FolderLost, match="moved"):
        mine.write("y", b"")
    with pytest.raises(FolderHeld):
        mine.claim.renew()
    other.release()
    mine.claim.renew()
    mine.write("y", b"")
    assert sorted(path.iterdir()) == [path / "owners", path / "y"]
    mine.claim.release()


def test_an_owner_whose_record_is_removed_learns_it_and_does_not_write_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 60.0)  # a sign on its way would outlive those that are removed

    def owner(name: str) -> OwnedStore:
        return OwnedStore(
            open_store(str(tmp_path)), Claim(open_store(str(tmp_path)), Owner("server", name, place=name))
        )

    mine, other = owner("a"), owner("b")
    mine.write("x", b"")
    (tmp_path / "owners" / f"{1:012d}.json").unlink()
    other.write("y", b"")
    with pytest.raises(FolderLost, match="moved or deleted"):
        mine.write("z", b"")
    assert not (tmp_path / "z").exists()
    assert other.claim.rise_above(0) == 1
    assert other.claim.rise_above(7) == 8, "an earlier owner was the seventh"
    other.write("w", b"")
    other.claim.release()


HOLDER = """
import sys, time
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.open import open_store
claim = Claim(open_store(sys.argv[1]), Owner("trainer", "first"))
claim.take()
print("held", flush=True)
time.sleep(60)
"""


def test_a_process_of_this_machine_that_is_stopped_holds_its_folder_and_one_that_is_killed_does_not(
    tmp_path: Path,
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(FolderHeld, match=rf"trainer 'first' \(process {holder.pid}"):
            Claim(open_store(str(tmp_path)), Owner("trainer", "second")).take()
    finally:
        holder.kill()
        holder.wait()
    claim = Claim(open_store(str(tmp_path)), Owner("trainer", "second"))
    assert claim.take() == 2
    claim.release()


def test_a_claim_that_nobody_refers_to_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    claim = Claim(open_store(str(tmp_path)), Owner("trainer", "a"))
    claim.take()
    beating = set(threading.enumerate()) - before
    assert len(beating) == 1
    del claim
    for thread in beating:
        thread.join(60)
        assert not thread.is_alive()
