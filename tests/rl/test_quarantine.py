"""A group that cannot be collated is quarantined through the server, and no policy keeps its trainer waiting."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysvc.collate.shard import read_shard
from raysvc.rl.group import Group

pytestmark = pytest.mark.ray


@pytest.fixture(params=["fill", "shrink"])
def served(request: pytest.FixtureRequest, tmp_path: Path, ray_session: None) -> Iterator[tuple[str, Any]]:
    import raysvc
    from raysvc.actors.launch import stop_server

    name, plan = (
        f"bad-{request.param}",
        {"batch_size": 4, "mini_batch_size": 2, "columns": ("input_ids", "labels")},
    )
    server = raysvc.serve_rollouts(
        name, run_dir=str(tmp_path), pad_token_id=0, plan=plan, on_bad_group=request.param, num_cpus=0
    )
    yield request.param, server
    stop_server(name)


def group(number: int) -> Group:
    return Group(f"g{number}", [[100 + number, 7, row] for row in range(2)], [[0, 1, 1]] * 2)


def groups_in(step: Any) -> list[list[int]]:
    """[mini-batch], which groups its shard has, by the tokens alone."""
    import ray

    out = []
    for mini in step.mini_batches:
        shard = read_shard(ray.get(mini.shards[0]))
        ids = shard.arrays["input_ids"].reshape(-1).tolist()
        out.append(sorted({token - 100 for token in ids if token >= 100}))
    return out


def test_a_group_that_is_gone_is_named_and_its_step_and_the_next_ones_are_trained(
    served: tuple[str, Any], tmp_path: Path
) -> None:
    import ray

    import raysvc

    policy, server = served
    producer = raysvc.rollouts(server.name)
    for number in range(4):
        producer.put_groups(group(number))
    with raysvc.attach(server.name, look_ahead_steps=0) as client:
        assert groups_in(next(client.steps())) == [[0, 1], [2, 3]]
        path = sorted((tmp_path / "server" / "rollouts" / "groups").iterdir())[1]
        path.unlink()  # it was damaged, and its error says that one may remove it
        stats = ray.get(server.actor.stats.options(concurrency_group="control").remote())
        os.kill(stats["pid"], signal.SIGKILL)
        client.rewind(0)
        late = threading.Timer(1.0, lambda: producer.put_groups([group(n) for n in range(4, 9)]))
        late.start()
        steps, kept = client.steps(), [[0], [2, 3]] if policy == "shrink" else [[0, 4], [2, 3]]
        rest = [[5, 6], [7, 8]] if policy == "fill" else [[4, 5], [6, 7]]
        for number, expected in enumerate((kept, rest)):
            step = next(steps)
            assert step.index == number
            assert groups_in(step) == expected
            client.commit(number)
        late.join()
        (named, reason), *others = producer.stats()["quarantined"].items()
        assert (named, others) == ("g1#0", [])
        assert "its rows are gone" in reason
        assert producer.put_groups(group(1)).known == 1, "what is quarantined does not come back"
