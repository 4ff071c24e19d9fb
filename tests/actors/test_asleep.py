"""Histories in which processes sleep at any call of the store, while others take their place, on a store that misbehaves.

A process that is asleep is a call that does not return: before, or after, any request the test lets other processes do whatever they do.
A process that dies in a request leaves it in the network, where it is applied much later or never. A request may be applied and its answer
lost: then it is sent again, as the real stores do.

The oracle is the list of what was acknowledged, and by which owner, in the test itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.server.journal import Journal
from raysvc.cache.store import claim as claims
from raysvc.cache.store.claim import Claim, OwnedStore, Owner
from raysvc.cache.store.store import Data, buffers_of
from raysvc.errors import FolderLost
from raysvc.feedback.decision import Decision
from raysvc.feedback.feedback_log import FeedbackLog

DEEP = 2  # processes that sleep at once


class Killed(BaseException):
    """The process ends in the middle of a request."""


class World:
    """A store of whole files, the network before it, and a clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files: dict[str, bytes] = {}
        self.in_flight: list[Callable[[], object]] = []
        self.depth = 0
        self.others: Callable[[], None] = lambda: None  # what other processes do while one sleeps
        self.now_s = 0.0

    def request(self, apply: Callable[[], Any]) -> Any:
        """One request of a process; what it answers."""
        self.pause()
        if self.rng.random() < 0.03:
            if self.rng.random() < 0.7:
                self.in_flight.append(apply)
            raise Killed
        answer = apply()
        self.pause()
        return answer

    def settle(self) -> None:
        """What is on its way arrives; from now on nobody sleeps, and no request fails."""
        self.depth = DEEP
        for apply in self.in_flight:
            apply()
        self.in_flight.clear()
        self.rng.random = lambda: 0.5  # type: ignore[method-assign]

    def pause(self) -> None:
        if self.in_flight and self.rng.random() < 0.1:
            self.in_flight.pop(self.rng.randrange(len(self.in_flight)))()
        if self.depth < DEEP and self.rng.random() < 0.04:
            self.depth += 1
            self.now_s += self.rng.choice([0.1, 5.0, 100.0])
            try:
                self.others()
            finally:
                self.depth -= 1


class FakeStore:
    """A process's way to the world."""

    def __init__(self, world: World, prefix: str = "") -> None:
        self._world, self._prefix, self.url = world, prefix, f"fake://{prefix}"

    def below(self, folder: str) -> FakeStore:
        return FakeStore(self._world, f"{self._prefix}{folder}/")

    def list(self, folder: str = "") -> list[str]:
        start = self._prefix + (f"{folder}/" if folder else "")

        def apply() -> list[str]:
            return sorted(
                {name[len(start) :].split("/")[0] for name in self._world.files if name.startswith(start)}
            )

        return list(self._world.request(apply))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        def apply() -> bytes | None:
            return self._world.files.get(self._prefix + name)

        data = self._world.request(apply)
        if data is None:
            raise FileNotFoundError(name)
        return bytes(data)

    def write(self, name: str, data: Data) -> None:
        whole = b"".join(buffers_of(data))
        for _ in range(1 + (self._world.rng.random() < 0.05)):  # applied, and its answer lost
            self._world.request(lambda: self._world.files.update({self._prefix + name: whole}))

    def create(self, name: str, data: bytes) -> bool:
        def apply() -> bool:
            return self._world.files.setdefault(self._prefix + name, data) is data

        made = False
        for _ in range(1 + (self._world.rng.random() < 0.05)):
            made = bool(self._world.request(apply))
        return made or self._world.request(lambda: self._world.files.get(self._prefix + name)) == data

    def delete(self, name: str) -> None:
        for _ in range(1 + (self._world.rng.random() < 0.1)):  # sent again when it was long applied
            self._world.request(lambda: self._world.files.pop(self._prefix + name, None))

    def local_path(self, name: str) -> None:
        return None


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come from the history itself."""
    monkeypatch.setattr(claims, "_beat_beside", lambda claim: None)
    monkeypatch.setattr(claims.log, "warning", lambda *args: None)


class Process:
    """One incarnation of a server: it goes on from what is there, and writes."""

    def __init__(self, world: World, name: int) -> None:
        self.world, self.name = world, name
        store = FakeStore(world)
        owner = Owner("server", "s", "raysvc", "one", "c", pid=name, place=str(name), started="")
        self.claim = Claim(store, owner)  # type: ignore[arg-type]
        self.store = OwnedStore(store, self.claim)  # type: ignore[arg-type]
        self.number: int | None = None


class Servers:
    """The history: processes that come, act, sleep and die; what each acknowledged."""

    def __init__(self, world: World, kind: type[Any]) -> None:
        self.world, self.kind = world, kind
        self.alive: list[Any] = []
        self.born = 0
        world.others = self.act

    def act(self) -> None:
        for _ in range(self.world.rng.randint(1, 4)):
            if not self.alive or self.world.rng.random() < 0.15:
                self.born += 1
                process = self.kind(self.world, self.born, self)
                self._do(process, process.start)
            else:
                process = self.world.rng.choice(self.alive)
                self._do(process, process.work)

    def _do(self, process: Any, what: Callable[[], None]) -> None:
        if process.busy:
            return  # it sleeps in a call
        process.busy = True
        try:
            what()
            if process not in self.alive:
                self.alive.append(process)
        except (Killed, FolderLost):
            if process in self.alive:
                self.alive.remove(process)
            process.dead = True
            return
        finally:
            process.busy = False


class JournalServer(Process):
    def __init__(self, world: World, name: int, servers: JournalServers) -> None:
        super().__init__(world, name)
        self.servers, self.busy = servers, False
        self.journal = Journal("memory://unused")
        self.journal._store = self.store

    def start(self) -> None:
        number = self.claim.take()
        acked = self.servers.acked  # what was acknowledged before it read
        found = self.journal.load() or {"owner": 0, "attempt": 0}
        self.claim.check()
        assert found["attempt"] >= acked[1], (found, acked, "an acknowledged record is lost")
        assert found["owner"] >= acked[0], (found, acked, "a replaced server wrote over its successor")
        self.number = number
        self.servers.loaded[number] = found["attempt"]

    def work(self) -> None:
        if self.world.rng.random() < 0.3:
            self.claim.beat()
            return
        self.servers.attempts += 1
        mine = (self.number or 0, self.servers.attempts)
        self.journal.save(lambda: {"owner": mine[0], "attempt": mine[1]})
        self.servers.acked = max(self.servers.acked, mine)
        later = {number: found for number, found in self.servers.loaded.items() if number > mine[0]}
        assert all(found >= mine[1] for found in later.values()), (
            mine,
            later,
            "a successor went on without it",
        )


class JournalServers(Servers):
    """`acked`: owner and attempt of the newest record that was acknowledged; `loaded`: the attempt from which each owner went on."""

    def __init__(self, world: World, kind: type[Any]) -> None:
        super().__init__(world, kind)
        self.acked, self.attempts, self.loaded = (0, 0), 0, dict[int, int]()


@settings(max_examples=3000)
@given(seed=st.integers(0, 2**32))
def test_no_acknowledged_record_is_lost_or_written_over_however_servers_sleep_and_die(seed: int) -> None:
    world = World(seed)
    servers = JournalServers(world, JournalServer)
    for _ in range(8):
        servers.act()
    world.settle()
    names = sorted(name for name in world.files if name.count("/") == 0)
    newest = json.loads(world.files[names[-1]]) if names else {"owner": 0, "attempt": 0}
    assert newest["attempt"] >= servers.acked[1]
    assert newest["owner"] >= servers.acked[0]


class SpoolServer(Process):
    def __init__(self, world: World, name: int, servers: SpoolServers) -> None:
        super().__init__(world, name)
        self.servers, self.busy = servers, False
        store = FakeStore(world).below("rollouts")
        self.spool = Spool("memory://unused", None, self.claim)
        self.spool._store = OwnedStore(store, self.claim)  # type: ignore[arg-type]
        self.view: list[str] = []

    def start(self) -> None:
        self.number = self.claim.take()
        before = dict(self.servers.views)
        self.spool.begin()
        self.view = [name for _, name in self.spool.history()]
        self.claim.check()
        for owner, view in before.items():
            if owner < self.number:
                assert self.view[: len(view)] == view, (owner, view, self.number, self.view)

    def work(self) -> None:
        number = len(self.servers.views)
        name = self.spool.put(pa.table({"n": [number]}))
        self.view = [*self.view, name]
        self.servers.views[self.number or 0] = self.view


class SpoolServers(Servers):
    """`views`: of each owner the puts in their order, as far as one was acknowledged: its row ids count along them."""

    def __init__(self, world: World, kind: type[Any]) -> None:
        super().__init__(world, kind)
        self.views: dict[int, list[str]] = {}


@settings(max_examples=1200)
@given(seed=st.integers(0, 2**32))
def test_what_is_before_an_acknowledged_put_never_changes_however_servers_sleep_and_die(seed: int) -> None:
    world = World(seed)
    servers = SpoolServers(world, SpoolServer)
    for _ in range(7):
        servers.act()
    world.settle()
    last = SpoolServer(world, servers.born + 1, servers)
    last.start()


class FeedbackServer(Process):
    def __init__(self, world: World, name: int, servers: FeedbackServers) -> None:
        super().__init__(world, name)
        self.servers, self.busy = servers, False
        self.log = FeedbackLog("memory://unused")
        self.log._store = OwnedStore(FakeStore(world).below("feedback"), self.claim)  # type: ignore[arg-type]
        self.known: list[Decision] = []

    def start(self) -> None:
        self.number = self.claim.take()
        before = list(self.servers.acked)
        self.known = self.log.decisions()
        self.claim.check()
        assert self.known[: len(before)] == before, "a decision that was acknowledged is another one, or gone"

    def work(self) -> None:
        self.servers.made += 1
        decision = Decision(f"by {self.name}", self.servers.made, None, (), (1,), {})
        if not self.log.add(len(self.known), decision):
            raise Killed  # as its server: somebody else decided, so it reads all again
        self.known.append(decision)
        acked = self.servers.acked  # longer where it slept in its last look, and its successor went on
        both = min(len(acked), len(self.known))
        assert self.known[:both] == acked[:both], "two servers decided differently"
        self.servers.acked = max(acked, list(self.known), key=len)


class FeedbackServers(Servers):
    """`acked`: the decisions that were acknowledged, in their order."""

    def __init__(self, world: World, kind: type[Any]) -> None:
        super().__init__(world, kind)
        self.acked, self.made = list[Decision](), 0


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_decisions_that_were_acknowledged_stay_as_they_are_however_servers_sleep_and_die(seed: int) -> None:
    world = World(seed)
    servers = FeedbackServers(world, FeedbackServer)
    for _ in range(5):
        servers.act()
    world.settle()
    FeedbackServer(world, servers.born + 1, servers).start()


@settings(max_examples=500)
@given(seed=st.integers(0, 2**32))
def test_of_processes_that_want_a_folder_no_two_write_at_once(seed: int) -> None:
    """Who acknowledged a write had the highest number that anybody had before the write began."""
    world = World(seed)
    highest = 0

    class Writer(Process):
        def __init__(self, world: World, name: int, servers: Servers) -> None:
            super().__init__(world, name)
            self.busy = False

        def start(self) -> None:
            nonlocal highest
            self.number = self.claim.take()
            highest = max(highest, self.number)

        def work(self) -> None:
            before = highest
            self.store.write(f"files/{world.rng.random()}", b"")
            assert self.number is not None
            assert self.number >= before

    servers = Servers(world, Writer)
    for _ in range(8):
        servers.act()
