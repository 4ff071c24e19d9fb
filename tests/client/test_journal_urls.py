"""The run folder lies on an object store: what is promised for a disk holds there."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
Served = Callable[..., Any]


@pytest.fixture
def bucket(s3_server: Any) -> dict[str, Any]:
    """Fields of a spec whose journal is in a folder of its own on S3."""
    return {"journal": f"s3://raysvc-tests/{uuid.uuid4().hex}/server", "storage_options": s3_server.options}


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


def kill(server: Any) -> None:
    os.kill(stats(server)["pid"], signal.SIGKILL)


def flushed(server: Any, frontier: int) -> None:
    """Wait until the last commit has come to the server, which is not asked for it, and is in the journal."""
    begin = time.monotonic()
    while (facts := stats(server))["frontier"] != frontier or not facts["flushed"]:
        assert time.monotonic() - begin < 100
        time.sleep(0.05)


def test_commits_leases_and_fences_outlive_kills_and_servers_on_s3(
    serve: Served, entry: Callable[..., str], streams: Any, bucket: dict[str, Any]
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.actors.server.journal import Journal
    from raysvc.errors import LeaseHeld

    uri = entry(50)
    server = serve("s3", sources=[uri], **bucket)
    with raysvc.attach("s3") as client:
        streams.take(client, stop=5)
        flushed(server, 5)
        kill(server)
        with pytest.raises(LeaseHeld):
            raysvc.attach("s3")  # the lease came back with the process
        assert stats(server)["frontier"] == 5
        streams.take(client, stop=7)
        client.commit(7, skipped=True)
    record = Journal(bucket["journal"], bucket["storage_options"]).load()
    assert record is not None
    lease = record["leases"][""]
    assert (lease["frontier"], lease["skipped"], lease["holder"]) == (8, [7], None), "detach flushed it"
    stop_server("s3")
    serve("s3", sources=[uri], **bucket)
    with raysvc.attach("s3") as client:
        assert (client.next_step, client.lease.fence) == (8, 2)


def test_no_acknowledged_group_and_no_membership_is_lost_on_s3(
    ray_session: None, streams: Any, bucket: dict[str, Any]
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    def group(number: int) -> raysvc.Group:
        return raysvc.Group(f"g{number}", [[number, 5, 6], [number, 7]], [[0, 1, 1], [0, 1]])

    run_dir = bucket["journal"].removesuffix("/server")
    handle = raysvc.serve_rollouts(
        "s3-rl", run_dir=run_dir, pad_token_id=0, plan={"batch_size": 2}, max_staleness=None, num_cpus=0,
        storage_options=bucket["storage_options"],
    )  # fmt: skip
    producer = raysvc.rollouts("s3-rl")
    producer.put_groups([group(0), group(1), group(2)])
    producer.put_groups([group(3), group(4)])
    try:
        with raysvc.attach("s3-rl") as client:
            first = streams.opened(client.fetch(0))
            kill(handle.actor)
            assert streams.opened(client.fetch(0)) == first
            assert producer.put_groups([group(2), group(5)])[:2] == (1, 1)
            assert sorted(streams.take(client, stop=3)) == [0, 1, 2]
            assert client.rollouts.delete_before(3) == 3 + 3
            kill(handle.actor)
            assert producer.put_groups([group(0), group(6)])[:2] == (1, 1)
            assert producer.stats()["sequences"] == 14
    finally:
        stop_server("s3-rl")
