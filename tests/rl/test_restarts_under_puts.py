"""The server is killed while puts are in flight at full speed: what was acknowledged is there, and nothing twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raysvc.rl.group import Group
from tests.rl.test_resume import spooled

pytestmark = pytest.mark.ray
THREADS, PER_PUT = 4, 5


def group(uid: str, tokens: int) -> Group:
    return Group(uid, [[1] * tokens] * 2, [[1] * tokens] * 2, rows={"reward": [0.5, 1.0]})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_put_that_was_answered_is_kept_once(tmp_path: Path, ray_session: None) -> None:
    import ray

    import raysvc
    from raysvc.actors.launch import stop_server

    name, stop, errors = "puts", threading.Event(), list[BaseException]()
    plan = {"batch_size": 4, "columns": ("input_ids", "labels", "reward")}
    server = raysvc.serve_rollouts(
        name, run_dir=str(tmp_path), pad_token_id=0, plan=plan, max_staleness=None, num_cpus=0
    )
    answered: list[list[str]] = [[] for _ in range(THREADS)]
    twice: list[tuple[int, int]] = []

    def produce(number: int) -> None:
        producer, count, known = raysvc.rollouts(name), 0, 0
        tokens = 20 if number else 9000  # one of them puts through the object store
        try:
            while not stop.is_set():
                uids = [f"{number}-{count}-{part}" for part in range(PER_PUT)]
                groups = [group(uid, tokens) for uid in uids]
                assert sum(producer.put_groups(groups)[:2]) == PER_PUT
                answered[number] += uids
                if count % 3 == 0:
                    known += producer.put_groups(groups).known
                count += 1
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)
        twice.append((known, PER_PUT * len(range(0, count, 3))))

    each = [threading.Thread(target=produce, args=(number,)) for number in range(THREADS)]
    for thread in each:
        thread.start()
    control: dict[str, Any] = {"concurrency_group": "control"}
    for number in range(25):
        seen = sum(map(len, answered))
        while sum(map(len, answered)) < seen + 20 and not errors:
            time.sleep(0.002)
        pid = ray.get(server.actor.stats.options(**control).remote(), timeout=200)["pid"]
        time.sleep(0.004 * (number % 5))
        os.kill(pid, signal.SIGKILL)
    stop.set()
    for thread in each:
        thread.join(280)
    assert not errors
    assert all(known == repeated for known, repeated in twice), "a put that comes again is known"
    stop_server(name)
    rows = Counter(uid for table in spooled(tmp_path) for uid in table.column("uid").to_pylist())
    assert set(rows.values()) == {2}, "two sequences each, none doubled"
    missing = {uid for uids in answered for uid in uids} - set(rows)
    assert not missing, "all that was answered is on disk"
