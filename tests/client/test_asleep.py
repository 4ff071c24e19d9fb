"""Processes that are stopped for longer than their lease, and woken when a successor is at work.

The histories of `tests/actors/test_asleep.py`, with real signals and real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.streams import actor_pids

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
Served = Callable[..., Any]
HERE = Path(__file__).parent
LEASE_S = 3.0


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


@pytest.fixture
def trainer() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `death_trainer.py`; ends all of them."""
    import ray

    started = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, str(HERE / "death_trainer.py"), address, *words]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has stopped itself."""
    begin = time.monotonic()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.poll() is None
        assert time.monotonic() - begin < 280
        time.sleep(0.05)


def settled_frontier(server: Any) -> int:
    """The frontier, once what was sent to the server has arrived: it is the same for a second."""
    seen, since_s = stats(server)["frontier"], time.monotonic()
    while time.monotonic() - since_s < 1.0:
        if (now := stats(server)["frontier"]) != seen:
            seen, since_s = now, time.monotonic()
        time.sleep(0.05)
    return int(seen)


@pytest.mark.parametrize(
    ("point", "where"),
    [("fetching", "posix"), ("fetched", "s3"), ("stepped", "posix"), ("saved", "posix"), ("saved", "s3")],
)
def test_a_trainer_that_wakes_after_its_successor_came_touches_nothing(
    point: str,
    where: str,
    serve: Served,
    trainer: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    request: Any,
) -> None:
    fields: dict[str, Any] = {}
    if where == "s3":
        options = request.getfixturevalue("s3_server").options
        fields = {"journal": f"s3://raysvc-tests/{uuid.uuid4().hex}/server", "storage_options": options}
    name = f"sleeper-{point}-{where}"
    server = serve(name, num_rows=64, lease_ttl_s=LEASE_S, **fields)
    sleeper = trainer(name, str(tmp_path / "saved"), f"{point}:5", "SIGSTOP")
    stopped(sleeper)
    loaded = json.loads((tmp_path / "saved").read_text())["data"]["frontier"]
    successor = trainer(name, str(tmp_path / "saved"), "fetched:9", "SIGSTOP")
    stopped(successor)
    before, frontier = (tmp_path / "saved").read_bytes(), settled_frontier(server)
    assert loaded <= frontier <= 9, "commits are sent beside the loop: the last ones sleep too"
    sleeper.send_signal(signal.SIGCONT)
    _, said = sleeper.communicate(timeout=200)
    assert sleeper.returncode != 0
    assert b"FencedError" in said, said[-2000:]
    assert (tmp_path / "saved").read_bytes() == before
    assert settled_frontier(server) == frontier
    successor.send_signal(signal.SIGCONT)
    _, said = successor.communicate(timeout=280)
    assert successor.returncode == 0, said[-2000:]
    saved = json.loads((tmp_path / "saved").read_text())
    steps = [step for step, _ in saved["applied"]]
    assert steps == sorted(steps)
    assert sorted(set(steps)) == list(range(24)), "each step once"
    assert len(steps) == 2 * 24, "two mini-batches a step"


def test_a_server_that_slept_beyond_the_lease_keeps_its_trainer(serve: Served, streams: Any) -> None:
    import raysvc
    from raysvc.errors import LeaseHeld

    server = serve("asleep", num_rows=64, lease_ttl_s=LEASE_S)
    with raysvc.attach("asleep", look_ahead_steps=1) as client:
        streams.take(client, stop=3)
        pid = stats(server)["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3 * LEASE_S)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(LeaseHeld):
            raysvc.attach("asleep")
        assert set(streams.take(client, stop=9)) == set(range(3, 9))
        assert client.state_dict()["frontier"] == 9


PRODUCER = """
import os, signal, sys, ray, raysvc
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
producer = raysvc.rollouts("rl-asleep")
print(producer.reserve(["p0", "p1"]), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
for n in range(2):
    print(producer.put_groups(raysvc.Group(f"p{n}", [[n, 5, 6], [n, 7]], [[0, 1, 1], [0, 1]])), flush=True)
"""


def test_a_producer_that_slept_through_its_reservations_puts_each_group_once(
    ray_session: None, tmp_path: Path
) -> None:
    import ray

    import raysvc
    from raysvc.actors.launch import stop_server

    raysvc.serve_rollouts(
        "rl-asleep", run_dir=str(tmp_path), pad_token_id=0, plan={"batch_size": 2}, max_staleness=None, num_cpus=0,
        producer_ttl_s=1.0,
    )  # fmt: skip
    address = ray.get_runtime_context().gcs_address
    sleeper = subprocess.Popen([sys.executable, "-c", PRODUCER, address], stdout=subprocess.PIPE)
    try:
        stopped(sleeper)
        time.sleep(3.0)
        other = raysvc.rollouts("rl-asleep")
        assert other.reserve(["p0", "p1"]) == ["p0", "p1"], "what it reserved came back"
        for number in range(2):
            group = raysvc.Group(f"p{number}", [[number, 5, 6], [number, 7]], [[0, 1, 1], [0, 1]])
            assert other.put_groups(group).new == 1
        sleeper.send_signal(signal.SIGCONT)
        out, _ = sleeper.communicate(timeout=200)
        assert sleeper.returncode == 0
        assert out.count(b"new=0") == 2, out
        assert other.stats()["sequences"] == 4
    finally:
        sleeper.kill()
        sleeper.wait()
        stop_server("rl-asleep")


def test_a_second_rollout_server_on_a_run_folder_is_refused_by_name_and_changes_nothing(
    ray_session: None, tmp_path: Path
) -> None:
    import raysvc
    from raysvc.actors.launch import server_names, stop_server
    from raysvc.errors import FolderHeld

    fields: dict[str, Any] = {
        "run_dir": str(tmp_path), "pad_token_id": 0, "plan": {"batch_size": 2}, "max_staleness": None, "num_cpus": 0
    }  # fmt: skip
    raysvc.serve_rollouts("first", **fields)
    group = raysvc.Group("a", [[1, 5, 6], [1, 7]], [[0, 1, 1], [0, 1]])
    assert raysvc.rollouts("first").put_groups(group).new == 1
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json") if "owners" not in path.parts}
    with pytest.raises(
        FolderHeld, match=r"belongs to server 'first' \(process \d+ on .*namespace 'raysvc'.*raysvc stop"
    ):
        raysvc.serve_rollouts("second", **fields)
    assert server_names().count("second") == 0
    assert {path: path.read_bytes() for path in before} == before
    assert raysvc.rollouts("first").put_groups(raysvc.Group("b", [[2, 5]], [[0, 1]])).new == 1
    stop_server("first")
    signs = [path.name for path in (tmp_path / "server" / "owners").iterdir() if path.suffix != ".json"]
    assert signs == [], "a server that was stopped gave its folder back, and the next one need not wait"
    raysvc.serve_rollouts("second", **fields)
    assert raysvc.rollouts("second").stats()["sequences"] == 3
    stop_server("second")


RANK = """
import os, signal, sys, ray, raysvc
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
client = raysvc.attach_rank("ranks-asleep", dp_size=2, rank=1, group="g", look_ahead_steps=1)
steps = client.steps()
for _ in range(3):
    client.commit(next(steps).index)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
for call in (lambda: client.state_dict(), lambda: [client.commit(step.index) for step in steps], client.detach):
    try:
        call()
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def test_a_rank_that_slept_is_lost_to_its_group_and_touches_nothing_of_the_next_group(serve: Served) -> None:
    import ray

    import raysvc
    from raysvc.errors import RankLost

    server = serve("ranks-asleep", num_rows=64, lease_ttl_s=LEASE_S)
    address = ray.get_runtime_context().gcs_address
    sleeper = subprocess.Popen([sys.executable, "-c", RANK, address], stdout=subprocess.PIPE, text=True)
    try:
        first = raysvc.attach_rank("ranks-asleep", dp_size=2, rank=0, group="g", look_ahead_steps=1)
        steps = first.steps()
        for _ in range(3):
            first.commit(next(steps).index)
        stopped(sleeper)  # type: ignore[arg-type]
        begin = time.monotonic()

        def ask_until_it_is_told() -> None:
            while time.monotonic() - begin < 100:
                first.outline(0)
                time.sleep(0.05)

        with pytest.raises(RankLost, match="rank 1"):
            ask_until_it_is_told()
        with pytest.raises(RankLost):
            first.detach()
        second = [
            raysvc.attach_rank(
                "ranks-asleep", dp_size=2, rank=rank, group="g2", takeover=True, look_ahead_steps=1
            )
            for rank in range(2)
        ]
        start = second[0].next_step
        both = zip(*(rank.steps() for rank in second), strict=True)
        for _ in range(3):
            for rank, step in zip(second, next(both), strict=True):
                rank.commit(step.index)
        sleeper.send_signal(signal.SIGCONT)
        out, _ = sleeper.communicate(timeout=200)
        assert out.split() == ["ready", "FencedError", "FencedError", "FencedError"]
        for rank in second:
            rank.detach()
        assert stats(server)["frontier"] == start + 3
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_collator_that_slept_keeps_its_trainer_waiting_and_no_byte_changes(
    serve: Served, entry: Callable[..., str], streams: Any
) -> None:
    import psutil

    import raysvc

    uri = entry(64)
    serve("calm-collators", sources=[uri])
    with raysvc.attach("calm-collators") as client:
        expected = streams.take(client, stop=12)
    known = actor_pids("Collator")
    serve("asleep-collators", sources=[uri], collators=2, lease_ttl_s=LEASE_S)
    with raysvc.attach("asleep-collators", look_ahead_steps=2) as client:
        got = streams.take(client, stop=4)
        collators = [psutil.Process(pid) for pid in actor_pids("Collator") - known]
        assert len(collators) == 2, "both have made steps"
        waking = threading.Timer(
            3 * LEASE_S, lambda: [each.send_signal(signal.SIGCONT) for each in collators]
        )
        for each in collators:
            each.send_signal(signal.SIGSTOP)
        waking.start()
        got |= streams.take(client, stop=12)
        waking.join()
    assert got == expected
