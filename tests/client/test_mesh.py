"""Every process of a mesh attaches: peers share a dp rank's rows, and what one does wrong is named with its coordinates."""

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


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


def attach_mesh(name: str, mesh: Any, **options: Any) -> list[Any]:
    """A client for every process of a mesh."""
    import raysvc

    coords = [mesh.rank(number)._asdict() for number in range(mesh.size)]
    return [raysvc.attach_rank(name, mesh=mesh, coords=own, **{"group": "g", **options}) for own in coords]


def eventually(true: Callable[[], bool], timeout_s: float = 100.0) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.02)


def is_lost(ref: Any) -> bool:
    """Whether Ray no longer gives an object; it does for a moment after the death of the process that owned it."""
    import ray

    try:
        ray.get(ref)
    except ray.exceptions.ObjectLostError:
        return True
    return False


def train(server: Any, clients: list[Any], stop: int) -> list[list[int]]:
    """Rows of each step, of one process of each dp rank; all processes take and commit all steps to `stop`."""
    rows = []
    for steps in zip(*(client.steps(stop=stop) for client in clients), strict=True):
        of_dp = {client.rank: step for client, step in zip(clients, steps, strict=True)}
        shards = [shard for step in of_dp.values() for shard in step.shards]
        rows.append(sorted(row for shard in shards for row in shard.row_ids.tolist() if row >= 0))
        for client in clients:
            client.commit(steps[0].index)
    eventually(lambda: stats(server)["frontier"] == stop)
    for client in clients:
        client.detach()
    return rows


def test_peers_get_the_bytes_of_their_dp_rank_and_a_step_is_committed_when_all_seats_did(
    plain: Any, streams: Any
) -> None:
    import raysvc

    with raysvc.attach("plain", dp_size=2) as client:
        expected = streams.take(client)
        client.rewind(0)
    made = stats(plain)["made"]
    clients = attach_mesh("plain", raysvc.Mesh(dp=2, tp=2, pp=2), look_ahead_steps=2)
    for steps in zip(*(client.steps() for client in clients), strict=True):
        index = steps[0].index
        for client, step in zip(clients, steps, strict=True):
            own = [mini[client.coords.dp] for mini in expected[index]]
            assert [streams.digest(shard) for shard in step.shards] == own
            assert stats(plain)["frontier"] == index
            client.commit(index)
        eventually(lambda frontier=index + 1: stats(plain)["frontier"] == frontier)  # type: ignore[misc]
    assert stats(plain)["made"] - made == len(expected), "collated once for all of them"
    assert stats(plain)["shared_bytes"] == 0, "every process took every step, nothing is kept"
    for client in clients:
        client.detach()
    assert stats(plain)["holder"] is None


def cut_server(serve: Any, name: str, **fields: Any) -> Any:
    plan = {"layout": "packed", "micro_batch_tokens": 96, "cp_split": "zigzag", "epochs": 1}
    return serve(name, plan=plan, **fields)


@pytest.mark.parametrize(("dp", "tp", "collators"), [(2, 2, 0), (1, 1, 1)])
def test_context_parallel_ranks_get_parts_that_make_up_the_rows_and_tensor_parallel_ones_the_same(
    dp: int, tp: int, collators: int, serve: Any, streams: Any
) -> None:
    import raysvc
    from raysvc.actors.launch import wait_for

    mesh = raysvc.Mesh(dp=dp, cp=2, tp=tp)
    server = cut_server(serve, f"cut-{collators}", collators=collators)
    with raysvc.attach(f"cut-{collators}", dp_size=dp) as client:
        planned = [client.outline(step) for step in range(len(client))]
    spec = wait_for(server.spec_json.remote(), "spec")[0]
    clients = attach_mesh(f"cut-{collators}", mesh)
    assert {client.loss_ranks for client in clients} == {2 * dp}
    expected = parts_of(spec, dp, 2)
    for steps in zip(*(client.steps() for client in clients), strict=True):
        rows, tokens = set(), 0
        for client, step in zip(clients, steps, strict=True):
            for mini, shard in enumerate(step.shards):
                number = client.coords.dp * 2 + client.coords.cp
                assert streams.digest(shard) == streams.digest(expected[step.index][mini * 2 * dp + number])
                tokens += 0 if client.coords.tp else int((shard.arrays["labels"] != -100).sum())
                rows |= set(shard.row_ids.tolist()) - {-1}
            client.commit(step.index)
        assert rows == {row for mini in planned[steps[0].index].mini_batches for row in mini.row_ids.tolist()}
        assert tokens == sum(info.denominators.tokens for info in steps[0].infos), "every label once"
    for client in clients:
        client.detach()


def parts_of(spec_json: str, dp: int, cp: int) -> list[Any]:
    """Shards of each step, made and cut here without a server."""
    from raysvc.actors.server.entry_stream import EntryStream
    from raysvc.actors.server.make_step import Recipe
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.collate.cp_cut import cp_cut

    spec = ServeSpec.model_validate_json(spec_json)
    assert spec.plan.cp_split is not None
    multiple = {"align": 2 * cp, "pad_to_multiple": 2 * cp, "cp_split": None}
    whole = EntryStream(spec.sources, {}, Recipe(spec.plan.model_copy(update=multiple), spec.pad_token_id))
    made = [whole.make(step, (dp,))[1] for step in range(whole.schedule.num_steps)]
    return [[part for shard in shards for part in cp_cut(shard, cp, spec.plan.cp_split)] for shards in made]


def test_another_mesh_goes_on_exactly(plain: Any) -> None:
    import raysvc

    with raysvc.attach("plain") as client:
        expected = [
            sorted(row for mini in client.outline(step).mini_batches for row in mini.row_ids.tolist())
            for step in range(12)
        ]
    meshes = [
        raysvc.Mesh(dp=2, cp=2),
        raysvc.Mesh(dp=1, tp=2, pp=2),
        raysvc.Mesh(dp=4),
        raysvc.Mesh(dp=3, cp=2),
    ]
    rows = []
    for number, mesh in enumerate(meshes):
        rows += train(plain, attach_mesh("plain", mesh, group=f"g{number}"), 3 * number + 3)
    assert rows == expected


def test_what_a_process_of_the_group_does_wrong_is_refused_and_hurts_no_peer(plain: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError, SeatRefused, StepOutOfOrder

    mesh = raysvc.Mesh(dp=1, cp=2)
    first, second = attach_mesh("plain", mesh)
    with pytest.raises(SeatRefused, match="on rank dp=0 cp=1, held by ") as caught:
        raysvc.attach_rank("plain", mesh=mesh, coords={"cp": 1}, group="g")
    assert "takeover" not in str(caught.value)
    with pytest.raises(SeatRefused, match=r"of \(dp=2\) in a group of \(dp=1, cp=2\)"):
        raysvc.attach_rank("plain", dp_size=2, rank=1, group="g")
    with pytest.raises(ConfigError, match=r"attach_rank\(mesh\): is given together with rank"):
        raysvc.attach_rank("plain", mesh=mesh, rank=0)
    first.rewind(5)
    with pytest.raises(StepOutOfOrder, match="refused step 4: expected step 5, to which rank dp=0 cp=0"):
        second.rewind(4)
    assert next(second.steps()).index == 0, "a refused move moves nothing"

    def train_alone() -> None:
        for step in first.steps():
            first.commit(step.index)

    with pytest.raises(StepOutOfOrder, match=r"refused step \d+: expected rank dp=0 cp=1 to be there too"):
        train_alone()
    with pytest.raises(StepOutOfOrder):
        first.detach()
    second.detach()


DYING_PEER = """
import os, signal, sys
import raysvc
mesh = raysvc.Mesh(dp=1, tp=2)
peer = raysvc.attach_rank(sys.argv[2], mesh=mesh, coords={"tp": 1}, group="g", address=sys.argv[1])
peer.commit(next(peer.steps()).index)
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lost_peer_is_named_with_its_coordinates(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    import ray

    import raysvc
    from raysvc.errors import RankLost

    serve("peers", lease_ttl_s=3.0)
    command = [sys.executable, "-c", DYING_PEER, ray.get_runtime_context().gcs_address, "peers"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        survivor = raysvc.attach_rank("peers", mesh=raysvc.Mesh(dp=1, tp=2), coords={"tp": 0}, group="g")
        assert other.stdout.readline() == "ready\n"
        survivor.commit(next(survivor.steps()).index)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(100) == -signal.SIGKILL
    with caplog.at_level(logging.WARNING):
        eventually(lambda: any("rank dp=0 tp=1 is silent" in each.message for each in caplog.records))

    def is_refused() -> bool:
        try:
            survivor.outline(0)
        except RankLost as error:
            return str(error).startswith("rank dp=0 tp=1 of server 'peers' (") and "takeover" not in str(
                error
            )
        return False

    eventually(is_refused)
    with pytest.raises(RankLost):
        survivor.detach()


def large(serve: Any, entry: Any, name: str) -> Any:
    """A server of 12 steps whose shards are too large to travel with the call."""
    plan = {"layout": "packed", "micro_batch_tokens": 4096, "batch_size": 32, "mini_batch_size": 16}
    return serve(name, plan=plan, sources=[entry(128, tokens=600)])


def test_large_shards_come_once_a_node_for_all_peers_also_for_one_that_lags(
    serve: Any, entry: Any, streams: Any
) -> None:
    import ray
    from ray._private.internal_api import node_stats

    import raysvc

    def held() -> int:
        (node,) = ray.nodes()
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        return int(node_stats(*address, include_memory_info=False).store_stats.object_store_bytes_used)

    held_before = held()
    server = large(serve, entry, "large")
    with raysvc.attach("large", dp_size=2) as client:
        expected = streams.take(client)
        client.rewind(0)
    made = stats(server)["made"]
    clients = attach_mesh("large", raysvc.Mesh(dp=2, tp=3))
    brought: dict[tuple[int, int], list[int]] = {}

    def take(client: Any, step: Any) -> None:
        own = [mini[client.rank] for mini in expected[step.index]]
        assert [streams.digest(shard) for shard in step.shards] == own
        assert step.nbytes > 100 << 10
        brought.setdefault((step.index, client.rank), []).append(step.node_bytes / step.nbytes)
        client.commit(step.index)

    late = clients[-1].steps()
    for steps in zip(*(client.steps() for client in clients[:-1]), strict=True):
        for client, step in zip(clients, steps, strict=False):
            take(client, step)
        if steps[0].index >= 2:
            take(clients[-1], next(late))
    for step in late:
        take(clients[-1], step)
    assert {tuple(sorted(each)) for each in brought.values()} == {(0, 0, 1)}
    assert stats(server)["made"] - made == len(expected) == 12, "collated once for all of them"
    del step, steps
    assert streams.falls_to(held_before, held, within_s=60.0), "nothing is kept"
    for client in clients:
        client.detach()


@pytest.mark.slow
def test_peers_get_the_same_bytes_of_a_server_that_was_killed_with_their_shards(
    serve: Any, entry: Any, streams: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import os

    import ray

    import raysvc

    server = large(serve, entry, "mortal")
    with raysvc.attach("mortal") as client:
        expected = streams.take(client, stop=3)
        client.rewind(0)
    clients = attach_mesh("mortal", raysvc.Mesh(dp=1, tp=2))
    readers = [client._reader for client in clients]
    for index in range(3):
        fetches = [reader.ask(index, 2) for reader in readers]
        answers = ray.get([ref for fetch in fetches for ref in fetch.refs])
        if index == 1:
            pid = stats(server)["pid"]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: stats(server)["pid"] != pid)  # type: ignore[misc]
            for _, shards, _ in answers:
                eventually(lambda shards=shards: is_lost(shards))  # type: ignore[misc]
        for reader, fetch in zip(readers, fetches, strict=True):
            step = reader.arrive(fetch)
            assert [[streams.digest(shard)] for shard in step.shards] == expected[index]
        assert ("shards lost name=mortal step=1" in caplog.text) == (index >= 1)
    for client in clients:
        client.detach()


def test_lines_that_are_cut_need_a_mesh(serve: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    server = cut_server(serve, "cut-alone")
    with pytest.raises(
        ConfigError, match=r"attach_rank\(rank\): server 'cut-alone' cuts lines .* give mesh="
    ):
        raysvc.attach_rank("cut-alone", dp_size=2, rank=1)
    assert stats(server)["holder"] is None
    with pytest.raises(ConfigError, match=r"attach\(roles\['a'\]\): has cp=2"):
        raysvc.attach("cut-alone", roles={"a": raysvc.Role(2, cp=2)})


def test_a_pipeline_stage_gets_its_own_columns_and_a_step_is_collated_once(serve: Any) -> None:
    """2 x 2 x 2: bytes of cells on all ranks, with whole lines and all columns, and as they are needed."""
    import raysvc
    from raysvc.errors import ConfigError

    mesh, bytes_of = raysvc.Mesh(dp=2, cp=2, pp=2), dict[str, int]()
    columns = ("input_ids", "position_ids", "labels", "loss_mask")
    stages = (("input_ids", "position_ids"), ("labels", "loss_mask"))
    for name, cut in (("whole", None), ("needed", "zigzag")):
        plan = {
            "layout": "packed",
            "micro_batch_tokens": 512,
            "cp_split": cut,
            "epochs": 1,
            "columns": columns,
        }
        server = serve(f"stages-{name}", plan={**plan, "align": 4, "pad_to_multiple": 4})
        clients = []
        for number in range(mesh.size):
            own = mesh.rank(number)
            wanted = None if cut is None else stages[own.pp]
            clients.append(
                raysvc.attach_rank(
                    f"stages-{name}", mesh=mesh, coords=own._asdict(), columns=wanted, group="g"
                )
            )
        steps = [next(client.steps()) for client in clients]
        for client, step in zip(clients, steps, strict=True):
            there = set(columns) & {name for shard in step.shards for name in shard.arrays}
            assert there == set(columns if cut is None else stages[client.coords.pp])
        arrays = [array for step in steps for shard in step.shards for array in shard.arrays.values()]
        bytes_of[name] = sum(array.nbytes for array in arrays if array.ndim == 2)
        assert stats(server)["made"] <= 1 + 2, "once for all stages, and its look-ahead"
        for client in clients:
            client.detach()
    # a cell: ids, positions, labels, segments of 4 bytes and a mask of 1; whole: on 2 x 2 ranks all of it
    needed, whole = (4 + 4 + 4) + (4 + 1 + 4), 4 * (4 + 4 + 4 + 1 + 4)
    assert bytes_of["needed"] / bytes_of["whole"] == pytest.approx(needed / whole, rel=0.05)
    with pytest.raises(ConfigError, match=r"asks for rewards, and plan\.columns has"):
        raysvc.attach_rank("stages-whole", mesh=mesh, coords={"dp": 0, "cp": 0, "pp": 0}, columns=["rewards"])
