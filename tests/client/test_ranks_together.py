"""Ranks that drift apart or die are named; a step is collated once; another world size goes on exactly."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.ray
Served = Callable[..., Any]


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


def attach_ranks(name: str, num_ranks: int, **options: Any) -> list[Any]:
    import raysvc

    return [
        raysvc.attach_rank(name, dp_size=num_ranks, rank=rank, **{"group": "g", **options})
        for rank in range(num_ranks)
    ]


def eventually(true: Callable[[], bool], timeout_s: float = 100.0) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.02)


def test_a_rank_that_is_ahead_of_another_by_more_than_its_look_ahead_says_who_is_behind(
    serve: Served, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("apart", lease_ttl_s=600.0)  # no heartbeat comes by itself: the answers to commits tell

    def said() -> list[str]:
        return [each.message for each in caplog.records if "is behind" in each.message]

    ranks = attach_ranks("apart", 3, look_ahead_steps=1)
    streams = [rank.steps() for rank in ranks]
    for rank, steps in zip(ranks[:2], streams[:2], strict=True):
        for _ in range(2):
            rank.commit(next(steps).index)
    ranks[2].commit(next(streams[2]).index)
    eventually(lambda: not any(rank._noted or rank._connection.commits for rank in ranks))
    eventually(lambda: stats(server)["frontier"] == 1)
    ranks[0].commit(next(streams[0]).index)
    assert not said(), "two steps ahead of rank 2: that is the look-ahead and the step it trains"
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            ranks[0].commit(next(streams[0]).index)
        eventually(lambda: len(said()) >= 2)
    text = " ".join(said())
    assert "rank 1 is behind name=apart at_step=2, told by rank 0" in text
    assert "rank 2 is behind name=apart at_step=1, told by rank 0" in text
    for rank in ranks:
        rank.detach()


@pytest.mark.parametrize("share_bytes", [1, 256 << 20])
def test_a_step_is_collated_once_for_all_ranks_however_little_memory_there_is(
    share_bytes: int, serve: Served
) -> None:
    server = serve(f"once-{share_bytes}", share_bytes=share_bytes)
    ranks = attach_ranks(f"once-{share_bytes}", 3, look_ahead_steps=2)
    for steps in zip(*(rank.steps() for rank in ranks), strict=True):
        for rank in ranks:
            rank.commit(steps[0].index)
    assert stats(server)["made"] == 21
    for rank in ranks:
        rank.detach()


DYING_RANK = """
import os, signal, sys
import raysvc
rank = raysvc.attach_rank(sys.argv[2], dp_size=2, rank=1, group="g", address=sys.argv[1])
steps = rank.steps()
for _ in range(3):
    rank.commit(next(steps).index)
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_dead_rank_is_named_and_another_world_size_goes_on_exactly(
    serve: Served, caplog: pytest.LogCaptureFixture, streams: Any
) -> None:
    import ray

    import raysvc
    from raysvc.errors import RankLost

    server = serve("elastic", lease_ttl_s=4.0)
    with raysvc.attach("elastic") as client:
        expected = [
            sorted(row for mini in client.outline(step).mini_batches for row in mini.row_ids.tolist())
            for step in range(21)
        ]
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DYING_RANK, address, "elastic"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        survivor = raysvc.attach_rank("elastic", dp_size=2, rank=0, group="g")
        own = survivor.steps()
        for _ in range(5):
            survivor.commit(next(own).index)
        assert other.stdout.readline() == "ready\n"
        eventually(lambda: stats(server)["frontier"] == 3)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(100) == -signal.SIGKILL
    eventually(lambda: any("rank 1 is silent" in each.message for each in caplog.records))

    def is_refused() -> bool:
        try:
            survivor.outline(0)
        except RankLost as error:
            return error.rank == 1 and str(other.pid) in str(error)
        return False

    eventually(is_refused)
    with pytest.raises(RankLost, match="rank 1"):
        survivor.detach()
    ranks = attach_ranks("elastic", 3, group="g2", takeover=True)
    assert {rank.next_step for rank in ranks} == {3}, "what both ranks had committed"
    for steps in zip(*(rank.steps() for rank in ranks), strict=True):
        rows = [row for step in steps for shard in step.shards for row in shard.row_ids.tolist() if row >= 0]
        assert sorted(rows) == expected[steps[0].index]
        for rank in ranks:
            rank.commit(steps[0].index)
    for rank in ranks:
        rank.detach()
    assert stats(server)["frontier"] == 21
