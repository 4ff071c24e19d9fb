"""The store of leases without Ray: clocks, restarts, and how often the journal is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysvc.actors.mesh import Mesh
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.lease_store import LeaseStore
from raysvc.actors.server.leases import Leases
from raysvc.errors import FencedError, LeaseHeld


class Hooked:
    """A store whose `create` does something first."""

    def __init__(self, journal: Journal, before: Callable[[str], None]) -> None:
        self._inner, self._before = journal._store, before
        journal._store = self  # type: ignore[assignment]

    def create(self, name: str, data: bytes) -> bool:
        self._before(name)
        return bool(self._inner.create(name, data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def store(folder: Path, incarnation_id: str = "one", ttl_s: float = 30.0) -> LeaseStore:
    return LeaseStore(Leases("s"), ttl_s, incarnation_id, Journal(str(folder)))


def later(monkeypatch: pytest.MonkeyPatch, leases: LeaseStore, until_s: float) -> None:
    """Let the clock come to a value, while the server looks at its leases every second."""
    while time.monotonic() < until_s:
        now_s = min(time.monotonic() + 1.0, until_s)
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
        leases.lives()


def attach(leases: LeaseStore, holder: str, plan_hash: str = "rows", takeover: bool = False) -> int:
    return leases.attach("", plan_hash, holder, holder, 0, Mesh(1), takeover, 1).fence


def test_a_jump_of_the_wall_clock_lets_no_second_trainer_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, wall = store(tmp_path), time.time()
    attach(leases, "a")
    for jump_s in (61.0, 1e6, -1e6):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: wall + jump_s)
        with pytest.raises(LeaseHeld):
            attach(leases, "b")
        assert leases.lives()


def test_a_lease_runs_out_on_the_monotonic_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, begin = store(tmp_path), time.monotonic()
    attach(leases, "a")
    later(monkeypatch, leases, begin + 29.0)
    with pytest.raises(LeaseHeld):
        attach(leases, "b")
    later(monkeypatch, leases, begin + 31.0)
    assert attach(leases, "b") == 2


def test_a_restarted_process_keeps_the_lease_on_a_clock_that_begins_again_and_another_incarnation_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store(tmp_path)
    fence = attach(first, "a")
    first.commit(fence, 6, 0, moves=0, skipped=False)
    first.flush()
    monkeypatch.setattr(time, "monotonic", lambda: 3.0)  # another boot
    restarted = store(tmp_path)
    with pytest.raises(LeaseHeld):
        attach(restarted, "b")
    assert restarted.commit(fence, 9, 0, moves=0, skipped=False).frontier == 10
    later(monkeypatch, restarted, 34.0)
    assert not restarted.lives()
    other = store(tmp_path, "two")
    with pytest.raises(FencedError):
        other.check(fence)
    assert other.leases.of_reader("").frontier == 7, "what was flushed"
    assert attach(other, "c") == fence + 1
    rows = store(tmp_path, "three").serving("other rows")
    assert (rows.of_reader("").frontier, rows.next_fence) == (0, fence + 2)


def test_a_commit_is_durable_within_a_second_and_a_journal_that_failed_is_tried_again(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    failures = [OSError("the disk is full")]

    def failing(name: str) -> None:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()

    Hooked(journal, failing)
    leases = LeaseStore(Leases("s"), 30.0, "one", journal)
    fence = attach(leases, "a")
    leases.commit(fence, 3, 0, moves=0, skipped=False)
    assert not leases.is_flushed
    until = time.monotonic() + 60
    while not leases.is_flushed or failures:
        assert time.monotonic() < until
        time.sleep(0.01)
    record = Journal(str(tmp_path)).load()
    assert record is not None
    assert record["leases"][""]["frontier"] == 4


def test_ranks_that_attach_together_share_writes_of_the_journal(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    writes = []

    def slow(name: str) -> None:
        writes.append(name)
        until = time.monotonic() + 60  # the first write takes until all ranks wait for one
        while sum(bool(seat.holder) for seat in leases.leases.of_reader("").seats) < 32:
            assert time.monotonic() < until
            time.sleep(0.005)

    Hooked(journal, slow)
    leases = LeaseStore(Leases("s"), 30.0, "one", journal)

    def attach_rank(rank: int) -> None:
        leases.attach("", "rows", "g", f"p{rank}", rank, Mesh(32), False, 3)
        record = Journal(str(tmp_path)).load()
        assert record is not None
        seen[rank] = record["leases"][""]["seats"][rank][0]

    seen: dict[int, str] = {}
    ranks = [threading.Thread(target=attach_rank, args=(rank,)) for rank in range(32)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert seen == {rank: f"p{rank}" for rank in range(32)}, "durable when attach returned"
    assert len(writes) <= 6


def test_a_server_that_slept_takes_no_lease_from_a_holder_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, slept = time.monotonic(), [0.0]
    monkeypatch.setattr("raysvc.actors.server.lease_store.time.monotonic", lambda: begin + slept[0])
    leases = store(tmp_path, ttl_s=4.0)
    fence = attach(leases, "a")
    for _ in range(3):  # the watch of the server looks every second
        slept[0] += 1
        assert leases.lives()
    slept[0] += 60  # SIGSTOP, and SIGCONT: who comes first is not the holder
    with pytest.raises(LeaseHeld):
        attach(leases, "b")
    leases.beat(fence, 0)
    for _ in range(5):
        slept[0] += 1
        leases.lives()
    assert attach(leases, "b") == fence + 1, (
        "the holder said nothing for five seconds in which the server was awake"
    )
