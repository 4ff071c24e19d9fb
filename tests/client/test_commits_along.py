"""A rank's commits go along with its fetches: a connection with a server of the test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raysvc.actors import launch
from raysvc.actors.mesh import Mesh, MeshSeat
from raysvc.actors.server.spec import Commit, Lease, Role
from raysvc.client.connection import Connection

LEASE = Lease("a", 1, 600.0, 0, "", {}, "key", {})


class Server:
    """A handle that keeps what it is called with; refs are numbers, answers frontiers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(fence: int, *args: Any, **named: Any) -> int:
            assert fence == LEASE.fence
            self.calls.append((name, args))
            return 0

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))

    def commits(self) -> list[Any]:
        """What was committed by calls of their own."""
        return [args for name, args in self.calls if name == "commit"]


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "wait_for", lambda ref, what: ref)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # no heartbeats


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    made = Connection(server, LEASE, MeshSeat(Mesh(3), 0))
    with made.commits.looked_for():
        yield made
    made.close()


def info(step: int, frontier: int = 9) -> Any:
    return SimpleNamespace(index=step, frontier=frontier)


def test_a_commit_goes_along_with_the_next_fetch_and_is_no_call_of_its_own(
    server: Server, connection: Connection
) -> None:
    for step in range(5):
        connection.commits.note(step, skipped=False)
        connection.send_commits()
        connection.fetch_rank(step + 3, Role(3), 1)
        connection.arrived(info(step + 3))
    assert server.calls == [
        ("fetch_rank", (step + 3, 0, 3, "", (Commit(step, False, 0),))) for step in range(5)
    ]


def test_a_commit_that_no_fetch_takes_along_is_sent_with_the_second_look(
    server: Server, connection: Connection
) -> None:
    connection.send_commits()
    connection.commits.note(0, skipped=False)
    connection.send_commits()
    assert not server.commits()
    connection.send_commits()
    assert server.commits() == [(0, False)]
    connection.send_commits()
    assert server.commits() == [(0, False)]


def test_what_went_along_with_a_fetch_that_is_not_answered_is_said_again_before_other_calls(
    server: Server, connection: Connection
) -> None:
    for step in range(3):
        connection.commits.note(step, skipped=step < 2)
        connection.fetch_rank(step + 3, Role(3), 1)
    connection.arrived(info(3))
    connection.move(7, None)
    assert server.calls[3:] == [("commit", (1, True)), ("commit", (2, False)), ("move", (7, None))]
    connection.move(8, None)
    assert len(server.commits()) == 2, "it was answered"


def test_an_eval_takes_none_along(server: Server, connection: Connection) -> None:
    connection.commits.note(0, skipped=False)
    connection.fetch_rank(3, Role(3), 1, "an eval")
    assert server.calls == [("fetch_rank", (3, 0, 3, "an eval", ()))]


def test_groups_of_rollouts_may_wait_for_a_commit_so_it_goes_alone_and_at_once(server: Server) -> None:
    connection = Connection(server, replace(LEASE, entry_key=""), MeshSeat(Mesh(3), 0))
    with connection.commits.looked_for():
        connection.commits.note(0, skipped=False)
        connection.send_commits()
        connection.fetch_rank(3, Role(3), 1)
    assert server.calls == [("commit", (0, False)), ("fetch_rank", (3, 0, 3, "", ()))]
    connection.close()


@pytest.mark.parametrize(
    ("rank", "frontier", "asks"), [(0, 3, True), (0, 4, False), (1, 3, True), (2, 3, False)]
)
def test_two_ranks_ask_at_once_who_is_behind(rank: int, frontier: int, asks: bool, server: Server) -> None:
    connection = Connection(server, LEASE, MeshSeat(Mesh(3), rank), window=3)
    with connection.commits.looked_for():
        connection.commits.note(6, skipped=False)
        connection.fetch_rank(9, Role(3), 1)
        set_now: list[bool] = []
        connection._beat_now = SimpleNamespace(set=lambda: set_now.append(True))  # type: ignore[assignment]
        connection.arrived(info(9, frontier))
    assert bool(set_now) == asks
    connection.close()
