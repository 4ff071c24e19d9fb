"""Builders that die: the list in `raysvc.pipelines.shared_build`, with deaths as Ray tells them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from raysvc.cache.manifest import Receipt
from raysvc.job.config import PoolConfig
from raysvc.pipelines import shared_build
from raysvc.pipelines.shared_build import MAX_DEATHS, NewReceipts, SharedTask, shared_receipts
from raysvc.pipelines.slice_graph import WorkerPool, free_workers

WORK = SharedTask("/cache/key", 1, lambda: iter(()))


def told_by(calls: list[str | None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Calls of a builder end as told: by the death of the one that is named, or well. How many there were."""
    left = iter(calls)

    def follow(work: SharedTask, check: Callable[[], None]) -> Iterator[tuple[int, Receipt]]:
        if (dead := next(left)) is not None:
            raise RayActorError(dead, f"{dead} died")
        yield from ()

    monkeypatch.setattr(shared_build, "_follow", follow)
    monkeypatch.setattr(shared_build, "POLL_S", 0.0)
    return lambda: len(calls) - len(list(left))


def test_a_dead_builder_that_is_found_again_and_again_is_one_death(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = told_by(["first"] * 3 * MAX_DEATHS + ["second", None], monkeypatch)
    assert list(shared_receipts(WORK)) == []
    assert made() == 3 * MAX_DEATHS + 2
    assert [text.split(": ")[1] for text in caplog.messages] == ["first died", "second died"]


def test_builders_that_die_one_after_the_other_end_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    made = told_by([f"number {n}" for n in range(2 * MAX_DEATHS)], monkeypatch)
    with pytest.raises(RuntimeError, match=f"{MAX_DEATHS} builders of /cache/key died"):
        list(shared_receipts(WORK))
    assert made() == MAX_DEATHS


def test_a_cluster_that_never_forgets_a_dead_builder_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_build, "FORGET_S", 0.0)
    told_by(["first"] * 1000, monkeypatch)
    with pytest.raises(RuntimeError, match="1 builder of /cache/key died"):
        list(shared_receipts(WORK))


def answer_after(looks: float, news: NewReceipts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each call of a builder end after so many looks at it."""
    left = [looks]

    def are_made(ref: object, timeout_s: float) -> bool:
        left[0] -= 1
        return left[0] < 0

    monkeypatch.setattr(shared_build, "are_made", are_made)
    monkeypatch.setattr(ray, "get", lambda ref: news)


def test_a_late_answer_is_waited_for_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer_after(2, NewReceipts((), finished=True), monkeypatch)
    monkeypatch.setattr(shared_build, "REPORT_S", 0.0)
    assert shared_build._answer(None, "/cache/key", lambda: None).finished
    assert [text.split(" since=")[0] for text in caplog.messages] == [
        "waiting for the builder of /cache/key"
    ] * 2


def test_who_wants_to_leave_does_not_stay_in_a_call_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_after(math.inf, NewReceipts((), finished=True), monkeypatch)
    looks = iter([False, True])

    def check() -> None:
        if next(looks):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared_build._answer(None, "/cache/key", check)


def test_a_builder_that_answers_at_once_and_has_nothing_does_not_keep_the_caller_from_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = SimpleNamespace(remote=lambda *_: None)
    builder = SimpleNamespace(start=call, news=call)
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: builder))
    monkeypatch.setattr(ray, "remote", lambda _: options)
    answer_after(0, NewReceipts((), finished=False), monkeypatch)
    monkeypatch.setattr(shared_build, "POLL_S", 0.0)
    looks = iter([False] * 5 + [True])

    def check() -> None:
        if next(looks):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(shared_build._follow(WORK, check))


PLACED = """
import json, os, sys, threading, time
from ray.cluster_utils import Cluster
import ray
from raysvc.pipelines.shared_build import SharedTask, builds_in_progress, shared_receipts
from tests.patience import wait_longer_for_nodes

wait_longer_for_nodes()
seen = sys.argv[1]
store = {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "labels": {"raysvc-pool": "gpu"}, **store})
cluster.add_node(num_cpus=1, labels={"ray.io/market-type": "spot"}, **store)
cluster.add_node(num_cpus=1, labels={"raysvc-pool": "data", "here": "yes"}, **store)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

def node(uri):
    mark = seen + uri.replace("/", "-")
    def receipts():
        while not os.path.exists(mark):
            time.sleep(0.1)
        return iter(())
    follow = shared_receipts(SharedTask(uri, 1, receipts))
    thread = threading.Thread(target=lambda: list(follow))
    thread.start()
    while not (facts := builds_in_progress()):
        time.sleep(0.1)
    open(mark, "w").close()
    thread.join()
    (labels,) = [n["Labels"] for n in ray.nodes() if n["NodeID"] == facts[0]["node"]]
    return {k: v for k, v in labels.items() if k in ("raysvc-pool", "ray.io/market-type", "here")}

print(json.dumps([node("/cache/a"), node("/cache/b")]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_builder_keeps_off_nodes_that_go_and_nodes_of_trainers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLACED, str(tmp_path / "seen")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    placed = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert placed == [{"raysvc-pool": "data", "here": "yes"}] * 2


def test_a_worker_needs_what_the_job_reserves_for_it() -> None:
    pool = WorkerPool.of(PoolConfig(num_cpus=2, memory_gb=3, resources={"data_node": 0.5}))
    assert pool.needs() == {"CPU": 2, "memory": 3e9, "data_node": 0.5}
    node = {"Alive": True, "Labels": {}, "Resources": {"CPU": 16, "memory": 10e9, "data_node": 4}}
    assert free_workers([node], node["Resources"], pool) == 3, "memory is what is short"
