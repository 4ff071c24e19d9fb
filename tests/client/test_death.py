"""What survives the death of what; `docs/guarantees.md` has the matrix.

Every death is a SIGKILL. After it the rows that were applied are those of a run that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.streams import actor_pids

pytestmark = pytest.mark.ray
Served = Callable[..., Any]
HERE = Path(__file__).parent


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


def kill_server(server: Any) -> int:
    """Kill the server's process; returns its pid."""
    pid = stats(server)["pid"]
    os.kill(pid, signal.SIGKILL)
    return int(pid)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["idle", "collating", "between_reply_and_commit"])
def test_a_killed_server_comes_back_and_the_stream_goes_on(
    point: str, serve: Served, entry: Callable[..., str], streams: Any
) -> None:
    import raysvc

    uri, plan = entry(400), {"batch_size": 100, "mini_batch_size": 50, "epochs": 10, "pad_to_multiple": 8192}
    deaths = 1 if point == "idle" else 2
    server = serve(f"killed-{point}", sources=[uri], plan=plan)
    threads, refs, got, pids = streams.threads(), streams.num_refs(), {}, set()
    with raysvc.attach(f"killed-{point}", look_ahead_steps=1) as client:
        if point == "idle":
            pids.add(kill_server(server))
        for step in client.steps(on_fetch=lambda step: kill_while_collating(server, step, pids, point)):
            got[step.index] = streams.opened(step)
            if point == "between_reply_and_commit" and step.index in (1, 4):
                pids.add(kill_server(server))
            client.commit(step.index)
            del step
            if len(got) >= 8 and len(pids) == deaths:
                break
        assert client.next_step == len(got)
    facts = stats(server)
    assert facts["pid"] not in pids
    assert len(pids) == deaths
    assert (facts["frontier"], facts["holder"], facts["fence"]) == (len(got), None, 1), (
        "the lease outlived the process"
    )
    assert streams.threads() <= threads
    assert streams.falls_to(refs, streams.num_refs)
    serve("calm", sources=[uri], plan=plan)
    with raysvc.attach("calm", look_ahead_steps=0) as client:
        assert got == streams.take(client, stop=len(got))


def kill_while_collating(server: Any, step: Any, pids: set[int], point: str) -> None:
    if point != "collating" or step.index < 2 or len(pids) == 2:
        return
    begin = time.monotonic()
    while not (facts := stats(server))["collating"]:
        if time.monotonic() - begin > 1:  # it was faster than we: one of the next 38 is caught
            return
    os.kill(facts["pid"], signal.SIGKILL)
    pids.add(facts["pid"])


@pytest.mark.slow
def test_a_trainer_killed_at_four_points_ends_with_the_rows_of_one_that_was_not(
    serve: Served, entry: Callable[..., str], tmp_path: Path
) -> None:
    import ray

    uri = entry(50)
    server = serve("trainer", sources=[uri], lease_ttl_s=1.0)
    serve("undisturbed", sources=[uri])
    address = ray.get_runtime_context().gcs_address

    def run(name: str, checkpoint: str, *death: str) -> int:
        command = [sys.executable, str(HERE / "death_trainer.py"), address, name, str(tmp_path / checkpoint)]
        return subprocess.run([*command, *death], check=False, timeout=280).returncode

    assert run("undisturbed", "calm.json") == 0
    expected = json.loads((tmp_path / "calm.json").read_text())["applied"]
    assert len(expected) == 39
    for death in ("fetching:5", "fetched:7", "stepped:11", "saved:15"):
        assert run("trainer", "killed.json", death) == -signal.SIGKILL
        applied = json.loads((tmp_path / "killed.json").read_text())["applied"]
        assert applied == expected[: len(applied)]
    assert run("trainer", "killed.json") == 0
    assert json.loads((tmp_path / "killed.json").read_text())["applied"] == expected
    facts = stats(server)
    assert (facts["frontier"], facts["holder"], facts["fence"]) == (21, None, 5)


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on_from_its_checkpoint(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.actors.launch import server_names
    from raysvc.errors import WorkerFailed

    def job(name: str) -> dict[str, Any]:
        return {
            "source": {"path": sample["rows"]},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "plan": {"batch_size": 16, "epochs": 1, "micro_batch_tokens": 1024},
            "server": {"name": name, "num_cpus": 0},
            "trainer": {"dp_size": 2, "run_dir": str(tmp_path / name), "checkpoint_every_steps": 4},
        }

    raysvc.train(job("unharmed"))
    rows = tmp_path / "harmed" / "rows.jsonl"
    before = worker_pids()
    killed: list[int] = []

    def kill_a_worker_after_five_steps() -> bool:
        """Called by the run after each step; says that it is to go on."""
        if not killed and rows.exists() and rows.read_bytes().count(b"\n") >= 5:
            killed.append(min(worker_pids() - before))
            os.kill(killed[0], signal.SIGKILL)
        return False

    with pytest.raises(WorkerFailed):
        raysvc.train(job("harmed"), should_stop=kill_a_worker_after_five_steps)
    assert killed
    assert "harmed" not in server_names(), "what the run started ended with it"
    summary = raysvc.train(job("harmed")).metrics
    assert summary["resumed_from"] in (4, 8, 12)
    assert rows.read_bytes() == (tmp_path / "unharmed" / "rows.jsonl").read_bytes()


def worker_pids() -> set[int]:
    """Processes of this machine that are workers of ours."""
    return actor_pids("CausalLMWorker")


NODE = """
import json, sys
from ray.cluster_utils import Cluster
import ray
from tests.patience import wait_longer_for_nodes

quick = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500,
         "health_check_timeout_ms": 5000, "health_check_failure_threshold": 4}
store = {"object_store_memory": 80 * 2**20}
wait_longer_for_nodes()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick, **store})
first = cluster.add_node(num_cpus=1, labels={"ray.io/market-type": "spot"}, **store)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

import raysvc
from raysvc.actors.launch import start_server
from raysvc.actors.server.spec import ServeSpec

sys.path.insert(0, sys.argv[2])
from streams import num_refs, opened

server = start_server(ServeSpec.model_validate_json(sys.argv[1]), detached=True)
where = lambda: ray.get(server.stats.remote())["node"]
nodes, got = [where()], {}
with raysvc.attach("node", look_ahead_steps=4) as client:
    for step in client:
        if step.index == 2:  # four steps are outstanding or unread on the node that goes
            cluster.add_node(num_cpus=1, labels={"ray.io/market-type": "on-demand"}, **store)
            cluster.add_node(num_cpus=1, labels={"ray.io/market-type": "spot"}, **store)
            cluster.remove_node(first, allow_graceful=False)
        got[step.index] = opened(step)
        client.commit(step.index)
        del step
    nodes.append(where())
labels = {node["NodeID"]: node["Labels"].get("ray.io/market-type") for node in ray.nodes()}
print(json.dumps({"got": got, "markets": [labels[node] for node in nodes]}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_lost_node_takes_nothing_with_it_and_the_server_moves_to_one_that_stays(
    entry: Callable[..., str], tmp_path: Path, streams: Any
) -> None:
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    plan = PlanConfig(batch_size=8, mini_batch_size=4, epochs=2, pad_to_multiple=2048)
    spec = ServeSpec(
        name="node", sources=[entry(50)], plan=plan, pad_token_id=0, journal=str(tmp_path / "j"), num_cpus=1
    )
    done = subprocess.run(
        [sys.executable, "-c", NODE, spec.model_dump_json(), str(HERE)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["got"] == streams.made_of(spec)
    assert report["markets"] == ["spot", "on-demand"], "it takes what there is, and then what stays"


def test_an_attached_trainer_says_once_that_its_server_has_ended(
    serve: Served, entry: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    import raysvc

    server = serve("ended", sources=[entry(100)], lease_ttl_s=0.6)
    raysvc.attach("ended")
    (heart,) = (one for one in threading.enumerate() if one.name == "raysvc-lease-ended")
    kill_server(server)
    assert stats(server)["pid"]
    heart.join(1.0)
    assert heart.is_alive(), "a server that restarts is waited for"
    ray.kill(server, no_restart=True)
    heart.join(100.0)
    assert not heart.is_alive()
    ours = [said.getMessage() for said in caplog.records if said.name == "raysvc.client.connection"]
    assert ours[-1] == "server has ended name=ended fence=1"
    assert sum("has ended" in said for said in ours) == 1
