"""Where workers go: decided without Ray, and once on a cluster of three nodes with GPUs that do not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.placement import GroupNeed, place_groups
from raysvc.errors import ConfigError
from raysvc.nodes.room import what_is_missing

HALF = GroupNeed(2, num_cpus=1, num_gpus=0.5)


def test_colocated_groups_share_a_bundle_of_one_gpu_rank_by_rank() -> None:
    needs = {"policy": HALF, "ref": HALF, "critic": GroupNeed(1, num_cpus=2, num_gpus=1)}
    placed = place_groups(needs, [{"policy", "ref"}])
    assert placed.bundle_of == {"policy": [0, 1], "ref": [0, 1], "critic": [2]}
    assert placed.bundles == [{"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}]


@pytest.mark.parametrize(
    ("needs", "colocated", "said"),
    [
        ({"a": HALF, "b": GroupNeed(3, 1, 0.5)}, [{"a", "b"}], "same number"),
        ({"a": GroupNeed(2, 1, 1), "b": HALF}, [{"a", "b"}], "need 1.5 GPUs in one place"),
        ({"a": HALF}, [{"a", "b"}], "'b' is not a group"),
        ({"a": HALF, "b": HALF, "c": HALF}, [{"a", "b"}, {"b", "c"}], "'b' is in two sets"),
        ({"a": GroupNeed(1, 1, 1.5)}, [], "whole number"),
    ],
)
def test_what_cannot_share_a_device_is_refused(needs: Any, colocated: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_groups(needs, colocated)


@pytest.mark.parametrize(
    ("bundles", "said"),
    [
        ([{"GPU": 1, "CPU": 1}] * 4, None),
        ([{"GPU": 1, "CPU": 1}] * 5, "needs 5 GPU, the cluster has 4"),
        ([{"GPU": 3, "CPU": 1}], r"needs a place of 3 GPU, 1 CPU on one node \(most on a node: 2 GPU, 8 CPU\)"),
        ([{"GPU": 1, "CPU": 5}] * 3, "needs 3 places"),
        ([{"CPU": 17}], "needs 17 CPU, the cluster has 16"),
        ([{"TPU": 1}], "needs 1 TPU, the cluster has 0"),
        ([{"CPU": 1, "TPU": 0}], None),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(bundles: Any, said: str | None) -> None:
    found = what_is_missing(bundles, [{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 2}])
    if said is None:
        assert found is None
    else:
        assert found is not None
        with pytest.raises(ValueError, match=said):
            raise ValueError(found)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 8), st.integers(1, 4))
def test_whole_gpus_fit_exactly_when_there_are_enough(sizes: list[int], gpus: int, num_nodes: int) -> None:
    needs = {f"g{i}": GroupNeed(size, num_cpus=0, num_gpus=1) for i, size in enumerate(sizes)}
    placed = place_groups(needs)
    assert sorted(bundle for own in placed.bundle_of.values() for bundle in own) == list(range(sum(sizes)))
    nodes = [{"GPU": float(gpus), "CPU": 1.0}] * num_nodes
    assert (what_is_missing(placed.bundles, nodes) is None) == (sum(sizes) <= gpus * num_nodes)


class Place:
    """A worker that only says where it is."""

    def __init__(self, rank: int, dp_size: int, device: str, spec_json: str) -> None:
        self.rank = rank

    def where(self) -> tuple[str, list[int]]:
        import ray

        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


CLUSTER = """
import json, ray
from ray.cluster_utils import Cluster
from tests.patience import wait_longer_for_nodes
from raysvc.actors.dispatch.worker_places import start_groups
from raysvc.actors.placement import GroupNeed
from raysvc.errors import ConfigError
from tests.actors.ranks import tiny_spec
from tests.actors.test_placement import Place

store = {"object_store_memory": 80 * 2**20}
wait_longer_for_nodes()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, **store})
for _ in range(2):
    cluster.add_node(num_cpus=4, num_gpus=2, **store)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
half, whole = GroupNeed(2, 0.5, 0.5), GroupNeed(1, 0.5, 1)
needs = {"policy": half, "ref": half, "critic": whole}
specs = {name: tiny_spec() for name in needs}
placed = start_groups(specs, needs, [{"policy", "ref"}], worker=Place)
where = {name: ray.get([w.where.remote() for w in own], timeout=280) for name, own in placed.workers.items()}
try:
    start_groups(specs, {**needs, "critic": GroupNeed(3, 0.5, 1)}, [{"policy", "ref"}], worker=Place)
except ConfigError as error:
    refused = str(error)
print(json.dumps({"where": where, "refused": refused}))
ray.shutdown()
cluster.shutdown()
"""


TRAIN = """
import json, sys, ray
from ray.cluster_utils import Cluster
from tests.patience import wait_longer_for_nodes

import raysvc
from raysvc.actors.launch import stop_server
from raysvc.errors import ConfigError

job, folder = json.loads(sys.argv[1]), sys.argv[2]
store = {"object_store_memory": 80 * 2**20}
wait_longer_for_nodes()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, **store})
for _ in range(2):
    cluster.add_node(num_cpus=2, num_gpus=2, **store)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
here, found = ray.get_runtime_context().get_node_id(), {}


def with_keys(**more):
    return {**job, **{name: {**job.get(name, {}), **keys} for name, keys in more.items()}}


def refusal(call, job):
    try:
        call(job)
    except ConfigError as error:
        return str(error)


def look(tick):
    if tick.phase == "train" and not found:
        living = [each for each in ray._private.state.actors().values() if each["State"] == "ALIVE"]
        for name in ("CausalLMWorker", "BatchServer"):
            found[name] = [each["Address"]["NodeID"] for each in living if each["ActorClassName"] == name]


trainer = {"gpus_per_worker": 0.5, "dp_size": 2, "run_dir": folder + "/half"}
raysvc.train(with_keys(trainer=trainer, server={"placement": "trainer"}), progress=look)
told = {"trained": found, "here": here}
for where in ("data", "trainer"):
    handle = raysvc.serve(with_keys(server={"name": where, "placement": where}, trainer={"run_dir": folder + "/" + where}))
    again = raysvc.serve(with_keys(server={"name": where, "placement": where}, trainer={"run_dir": folder + "/" + where}))
    told[where] = ray.get(again.actor.stats.remote())["node"]
    if where == "trainer":
        told["full"] = refusal(raysvc.serve, with_keys(server={"name": "full", "placement": "data", "num_cpus": 0.75}))
    stop_server(where)
told["large"] = refusal(raysvc.serve, with_keys(server={"name": "large", "placement": "data", "num_cpus": 2}))
told["gpus"] = refusal(raysvc.train, with_keys(trainer={**trainer, "gpus_per_worker": 1, "dp_size": 5, "run_dir": folder + "/5"}))
told["both"] = refusal(raysvc.train, with_keys(trainer={**trainer, "dp_size": 4, "cpus_per_worker": 1, "run_dir": folder + "/4"}, server={"num_cpus": 1.5}))
told["cuda"] = refusal(raysvc.train, with_keys(trainer={**trainer, "device": "cuda", "run_dir": folder + "/cuda"}))
groups = ray.util.placement_group_table().values()
told["left"] = [each["state"] for each in groups if each["state"] != "REMOVED"] + raysvc.actors.launch.server_names()
print(json.dumps(told))
ray.shutdown()
cluster.shutdown()
"""


SERVERS = """
import json, sys, time, ray
from concurrent.futures import ThreadPoolExecutor
from ray.cluster_utils import Cluster
from tests.patience import wait_longer_for_nodes

import raysvc
from raysvc.errors import ConfigError

folder = sys.argv[1]
store = {"object_store_memory": 80 * 2**20}
wait_longer_for_nodes()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, **store})
cluster.add_node(num_cpus=2, **store)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
plan = {"batch_size": 2}


def serve(name, **more):
    return raysvc.serve_rollouts(name, run_dir=f"{folder}/{name}", pad_token_id=0, plan=plan, **more)


def refusal(name, **more):
    begin = time.monotonic()
    try:
        serve(name, **more)
    except ConfigError as error:
        return str(error), time.monotonic() - begin


told = {where: refusal(where, placement=where, num_cpus=2.5) for where in ("any", "data", "trainer")}
told["all"] = refusal("all", num_cpus=4)
held = serve("held", placement="data", num_cpus=0.75)
told["again"] = serve("held", placement="data", num_cpus=0.75).actor._actor_id == held.actor._actor_id
told["names"] = raysvc.actors.launch.server_names()


with ThreadPoolExecutor(1) as pool:
    grown = pool.submit(serve, "grown", num_cpus=2.5, wait_for_nodes=True)
    while not any(each["State"] == "PENDING_CREATION" for each in ray._private.state.actors().values()):
        time.sleep(0.05)
    cluster.add_node(num_cpus=3, **store)
    told["grown"] = grown.result(280).name
for name in raysvc.actors.launch.server_names():
    raysvc.actors.launch.stop_server(name)
print(json.dumps(told))
ray.shutdown()
cluster.shutdown()
"""


def on_a_cluster(script: str, *arguments: str) -> dict[str, Any]:
    """What a script says that starts a cluster of its own."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_has_its_workers_packed_on_parts_of_gpus_and_its_server_where_it_was_asked_for(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = {
        "source": {"path": sample["rows"], "format": "chat"}, "tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16}, "server": {"name": "placed"}, "trainer": {"device": "cpu", "max_steps": 2},
    }  # fmt: skip
    told = on_a_cluster(TRAIN, json.dumps(job), str(tmp_path))
    workers, servers = told["trained"]["CausalLMWorker"], told["trained"]["BatchServer"]
    assert len(workers) == 2
    assert len(set(workers)) == 1, "ranks pack onto a node"
    assert servers == workers[:1], "the server is beside rank 0"
    assert workers[0] != told["here"], "the driver's node has no GPU"
    assert told["data"] == told["trainer"] == told["here"], "the entry is a folder of the asking node"
    assert "server.placement" in told["large"]
    assert "needs 2 CPU, that node has 1" in told["large"]
    assert "needs 0.75 CPU, and that node has less than that free" in told["full"]
    assert "needs 5 GPU, the cluster has 4" in told["gpus"]
    assert "needs 5.5 CPU, the cluster has 5" in told["both"], "workers and server together"
    assert "NCCL refuses two ranks on one device" in told["cuda"]
    assert told["left"] == [], "what was refused left nothing behind"


@pytest.mark.slow
def test_on_three_nodes_colocated_ranks_share_a_device_and_the_rest_has_its_own() -> None:
    found = on_a_cluster(CLUSTER)
    policy, ref, critic = (found["where"][name] for name in ("policy", "ref", "critic"))
    assert policy == ref, "the same node and the same device, rank by rank"
    devices = {(node, *gpus) for node, gpus in (*policy, *critic)}
    assert len(devices) == 3, "two shared devices, and one of the critic's own"
    assert len({node for node, _ in policy}) == 1, "ranks pack onto a node"
    assert "needs 5 GPU, the cluster has 4" in found["refused"]


@pytest.mark.slow
def test_a_server_that_no_node_can_ever_hold_is_refused_at_once_unless_nodes_come_on_demand(
    tmp_path: Path,
) -> None:
    told = on_a_cluster(SERVERS, str(tmp_path))
    assert "needs a place of 2.5 CPU on one node (most on a node: 2 CPU)" in told["any"][0]
    assert "wait_for_nodes" in told["any"][0]
    assert "needs 4 CPU, the cluster has 3" in told["all"][0]
    for where in ("data", "trainer"):
        assert "needs 2.5 CPU, that node has 1" in told[where][0]
    assert max(told[where][1] for where in ("any", "all", "data", "trainer")) < 60, "nobody waits"
    assert told["again"], "what is served already asks for no room"
    assert told["names"] == ["held"], "what was refused left nothing behind"
    assert told["grown"] == "grown", "a node that came was taken"
