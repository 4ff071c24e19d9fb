"""Large shards that peers of a mesh share: in evals, of rollouts, and while another group takes over."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.client.test_mesh import attach_mesh, eventually, large, stats

pytestmark = [pytest.mark.ray, pytest.mark.slow]
WHOLE = 600


def of_rank(expected: dict[int, Any], index: int, rank: int) -> list[str]:
    return [mini[rank] for mini in expected[index]]


def test_a_group_that_takes_over_gets_the_same_bytes_while_the_first_still_fetches(
    serve: Any, entry: Any, streams: Any
) -> None:
    import raysvc
    from raysvc.errors import LeaseError

    server = large(serve, entry, "taken-over")
    with raysvc.attach("taken-over", dp_size=2) as client:
        expected = streams.take(client, stop=4)
        client.rewind(0)
    mesh = raysvc.Mesh(dp=2, tp=2)
    first = attach_mesh("taken-over", mesh)
    asked = [[client._reader.ask(index, 2) for index in range(4)] for client in first]
    second = attach_mesh("taken-over", mesh, group="h", takeover=True)
    for index in range(4):
        for client in second:
            step = client._reader.arrive(client._reader.ask(index, 2))
            assert [streams.digest(shard) for shard in step.shards] == of_rank(expected, index, client.rank)
    for client, fetches in zip(first, asked, strict=True):
        for fetch in fetches:
            try:
                step = client._reader.arrive(fetch)
            except LeaseError:
                continue
            assert [streams.digest(shard) for shard in step.shards] == of_rank(
                expected, fetch.index, client.rank
            )

    def is_fenced(client: Any) -> bool:
        try:
            client._connection.check()
        except LeaseError:
            return True
        return False

    for client in first:
        with suppress(LeaseError):
            client.commit(0)
        eventually(lambda client=client: is_fenced(client))  # type: ignore[misc]
    assert stats(server)["frontier"] == 0
    for client in second:
        client.detach()


def test_an_eval_s_large_shards_are_shared_by_peers_and_equal_those_of_one_process(
    serve: Any, entry: Any, streams: Any
) -> None:
    import raysvc
    from raysvc.actors.server.spec import EvalSpec

    plan = {"layout": "packed", "micro_batch_tokens": 4096, "batch_size": 32, "mini_batch_size": 16}
    evals = {"valid": EvalSpec(sources=(entry(70, seed=5, tokens=WHOLE),), batch_size=32)}
    serve("evals-of-peers", plan=plan, sources=[entry(64, tokens=WHOLE)], evals=evals)
    with raysvc.attach("evals-of-peers", dp_size=2) as client:
        expected = [[mini[0], mini[1]] for step in client.eval("valid") for mini in streams.opened(step)]
    clients = attach_mesh("evals-of-peers", raysvc.Mesh(dp=2, tp=2))
    for _ in range(2):
        for client in clients:
            steps = [streams.digest(shard) for step in client.eval("valid").steps() for shard in step.shards]
            assert steps == [ranks[client.rank] for ranks in expected]
    for client in clients:
        client.detach()


def test_rollouts_with_large_columns_come_to_all_peers_as_they_were_put(
    tmp_path: Any, ray_session: None, streams: Any
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.client.steps import micros_of
    from raysvc.rl.group import Group

    columns = ("input_ids", "labels", "attention_mask", "position_ids", "experts")
    plan = {"batch_size": 4, "micro_batch_size": 4, "columns": columns}
    raysvc.serve_rollouts(
        "rl-peers", run_dir=str(tmp_path / "run"), pad_token_id=0, plan=plan, num_cpus=0, max_staleness=9
    )
    try:
        producer, put = raysvc.rollouts("rl-peers"), {}
        clients = attach_mesh("rl-peers", raysvc.Mesh(dp=2, tp=2))
        streams_of = [client.steps(stop=3) for client in clients]
        for index in range(3):
            put.clear()
            for number in range(4):
                rng = np.random.default_rng(10 * index + number)
                ids = [rng.integers(3, 60, 200) for _ in range(2)]
                experts = [rng.integers(0, 200, (200, 32, 16)).astype(np.uint8) for _ in range(2)]
                put |= {row.tobytes(): values for row, values in zip(ids, experts, strict=True)}
                ones = [np.ones(200, np.uint8)] * 2
                producer.put_groups(Group(f"{index}-{number}", ids, ones, {"experts": experts}))
            got: dict[int, list[str]] = {}
            seen = Counter[bytes]()
            for client, steps in zip(clients, streams_of, strict=True):
                step = next(steps)
                assert step.nbytes > 100 << 10
                got.setdefault(client.rank, []).append(str([streams.digest(shard) for shard in step.shards]))
                for micro in micros_of([step], "cpu"):
                    for row, values in zip(micro.tensors["input_ids"], micro.tensors["experts"], strict=True):
                        key = row.numpy().astype(np.int64).tobytes()
                        if key in put:
                            seen[key] += 1
                            assert np.array_equal(values.numpy(), put[key])
                client.commit(index)
            assert all(one == other for one, other in got.values())
            assert seen == dict.fromkeys(put, 2), "each row of the step once for each of two peers"
        for client in clients:
            client.detach()
    finally:
        stop_server("rl-peers")
