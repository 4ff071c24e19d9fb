"""Shards made by a trainer's collators instead of the server: the same bytes, whoever dies.

Every death is a SIGKILL; the bytes expected are those of a server that makes its steps itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raysvc.errors import FencedError, StepFailed
from tests.client.streams import actor_pids

pytestmark = pytest.mark.ray
Served = Callable[..., Any]
HERE = Path(__file__).parent
PLANS = {
    "padded": {"tail": "pad"},
    "packed": {"tail": "wrap", "layout": "packed", "micro_batch_tokens": 64, "mini_batch_size": 8},
}


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


def collator_pids() -> set[int]:
    """Processes of this machine that are collators of this session's Ray."""
    return actor_pids("Collator")


def kill_one_but(known: set[int]) -> None:
    """Kill one of the collators; one that ends just now, or is not up again, is no target."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for pid in sorted(collator_pids() - known):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.01)
    raise AssertionError("there is no collator to kill")


def have_ended(pids: set[int], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while pids & collator_pids() and time.monotonic() < until:
        time.sleep(0.05)
    return not pids & collator_pids()


@pytest.mark.parametrize("plan", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
def test_collators_give_the_bytes_of_the_server_to_roles_ranks_and_evals(
    plan: str, serve: Served, entry: Callable[..., str], streams: Any
) -> None:
    import ray

    import raysvc
    from raysvc.actors.server.spec import EvalSpec

    uri, valid = entry(50), entry(13, seed=5)
    evals = {"valid": EvalSpec(sources=(valid,), batch_size=4)}
    roles = {"actor": 2, "critic": raysvc.Role(3, ("input_ids", "labels"))}

    def everything(name: str) -> list[Any]:
        got: list[Any] = []
        with raysvc.attach(name, roles=roles, look_ahead_steps=3) as client:
            for step in client.steps(stop=9):
                for mini in step.mini_batches:
                    for refs in mini.by_role.values():
                        got.append([streams.digest(shard) for shard in ray.get(list(refs))])
                    got.append((mini.info.row_ids.tolist(), mini.info.rank_bytes, str(mini.rows)))
            got.append([streams.opened(step) for step in client.eval("valid")])
        ranks = [raysvc.attach_rank(name, dp_size=2, rank=rank, group="g") for rank in range(2)]
        for steps in zip(*(rank.steps(stop=9) for rank in ranks), strict=True):
            for step in steps:
                got.append([streams.digest(shard) for shard in step.shards])
                got.append([info.row_ids.tolist() for info in step.infos])
        for rank in ranks:
            rank.detach()
        return got

    serve(f"alone-{plan}", sources=[uri], plan=PLANS[plan], evals=evals)
    expected = everything(f"alone-{plan}")
    server = serve(f"beside-{plan}", sources=[uri], plan=PLANS[plan], evals=evals, collators=2)
    refs, before, threads = streams.num_refs(), collator_pids(), streams.threads()
    assert everything(f"beside-{plan}") == expected
    assert stats(server)["made"] == 0, "the server made nothing itself"
    assert have_ended(collator_pids() - before), "collators end with their trainer's lease"
    assert streams.falls_to(refs, streams.num_refs)
    assert streams.threads() <= threads


class _Batch(dict[str, Any]):
    """Takes what SkyRL's `TrainingInputBatch` takes; SkyRL is not installed with the tests."""

    metadata: dict[str, Any]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded_left", "packed"])
def test_batches_of_a_role_are_the_same_from_collators_and_after_kills_of_the_server(
    layout: str, serve: Served, entry: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    import raysvc
    from raysvc.integrations.skyrl import BatchRules

    theirs: Any = ModuleType("skyrl.backends.skyrl_train.training_batch")
    theirs.TrainingInputBatch, theirs.TensorList = _Batch, list
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    plan = {"tail": "pad", "layout": layout} | ({"micro_batch_tokens": 64} if layout == "packed" else {})
    roles = {"policy": raysvc.Role(2, batches=BatchRules("token_mean")), "critic": 3}

    def everything(name: str, kill: bool = False) -> list[Any]:
        got: list[Any] = []
        with raysvc.attach(name, roles=roles, look_ahead_steps=2) as client:
            for step in client.steps(stop=8):
                if kill and step.index in (2, 5):
                    os.kill(stats(servers[name])["pid"], signal.SIGKILL)
                for mini in step.mini_batches:
                    for batch in ray.get(list(mini.by_role["policy"])):
                        assert type(batch) is _Batch
                        got.append(
                            {
                                key: str(getattr(one, "tolist", lambda one=one: one)())
                                for key, one in batch.items()
                            }
                        )
                        got.append(batch.metadata)
                client.commit(step.index)
        return got

    uri = entry(50)
    names = [f"{how}-{layout}" for how in ("one", "killed", "beside")]
    servers = {
        name: serve(name, sources=[uri], plan=plan, collators=2 * name.startswith("beside")) for name in names
    }
    expected = everything(names[0])
    assert len(expected) > 2 * 2 * 6
    assert everything(names[1], kill=True) == expected
    assert everything(names[2]) == expected
    assert stats(servers[names[2]])["made"] == 0


def test_collators_that_the_cluster_has_no_cpus_for_are_told(
    ray_session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    from raysvc.actors.launch import start_collators

    cpus = int(ray.cluster_resources()["CPU"])
    assert len(start_collators("no spec", 1, None)) == 1
    assert not [each for each in caplog.records if each.name == "raysvc.actors.launch"]
    start_collators("no spec", cpus + 3, None)
    assert f"for='server.collators': needs {cpus + 3} CPU, the cluster has {cpus}; lower it" in caplog.text


def test_a_fenced_trainer_gets_nothing_from_its_collators(serve: Served) -> None:
    import ray

    import raysvc

    serve("fenced", collators=1)
    old = raysvc.attach("fenced", look_ahead_steps=0)
    assert raysvc.read_shard(ray.get(old.fetch(0).mini_batches[0].shards[0])).step == 0
    with raysvc.attach("fenced", takeover=True) as new:
        refs = old._connection.fetch_step(1, old._roles, 2)
        for ref in refs:
            with pytest.raises(ray.exceptions.RayTaskError) as refused:
                ray.get(ref, timeout=100)
            assert isinstance(refused.value.cause, FencedError)
        assert new.fetch(1).index == 1
    with pytest.raises(FencedError):
        old.detach()


def test_a_step_that_a_collator_cannot_make_fails_by_name_and_is_made_when_it_can_be(
    serve: Served, entry: Callable[..., str]
) -> None:
    import raysvc

    uri = entry(48, per_part=8)
    serve("broken", sources=[uri], collators=1)
    part = sorted(Path(uri.removeprefix("file://")).glob("**/*.arrow"))[1]
    with raysvc.attach("broken", look_ahead_steps=1) as client:
        kept = part.rename(part.with_suffix(".away"))  # the server has it open
        with pytest.raises(StepFailed, match=r"step 0\b.*is missing"):
            next(client.steps())
        kept.rename(part)
        assert next(client.steps()).index == 0


@pytest.mark.slow
@pytest.mark.parametrize("who", ["collator", "server", "both", "few"])
def test_kills_under_collators_change_no_byte(
    who: str,
    serve: Served,
    entry: Callable[..., str],
    streams: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import ray

    import raysvc
    from raysvc.actors.server import collator_pool

    if who == "few":  # and one of them leaves, or comes back, every few steps
        monkeypatch.setattr(collator_pool, "PATIENCE_STEPS", 1)
        monkeypatch.setattr(collator_pool, "LEAVING_STEPS", 3)
        caplog.set_level("INFO", "raysvc.actors.server.collator_pool")
    uri, plan = entry(400), {"batch_size": 100, "mini_batch_size": 50, "epochs": 3, "pad_to_multiple": 4096}
    serve("calm", sources=[uri], plan=plan)
    with raysvc.attach("calm", dp_size=2, look_ahead_steps=0) as client:
        expected = streams.take(client)
    server = serve(f"killed-{who}", sources=[uri], plan=plan, collators=2)
    got, killed, known, asked = {}, 0, collator_pids(), dict[int, Any]()
    with raysvc.attach(f"killed-{who}", dp_size=2, look_ahead_steps=2) as client:
        for step in client.steps(on_fetch=lambda step: asked.update({step.index: step})):
            del asked[step.index]
            if step.index in (1, 4, 7):  # two steps are being made or unread
                if who != "server":
                    kill_one_but(known)
                if who != "collator":
                    os.kill(stats(server)["pid"], signal.SIGKILL)
                killed += 1
            elif who == "few":  # all earlier steps are made when the next one is asked for
                ahead = [ref for one in asked.values() for mini in one.mini_batches for ref in mini.shards]
                ray.wait(ahead, num_returns=len(ahead), timeout=100) if ahead else None
                del ahead
            got[step.index] = streams.opened(step)
            client.commit(step.index)
            del step
        assert client.next_step == 12
    assert (got, killed) == (expected, 3)
    assert ("collators=1 node=None: one had nothing to do" in caplog.text) == (who == "few")
    facts = stats(server)
    assert (facts["frontier"], facts["holder"], facts["fence"]) == (12, None, 1)


@pytest.mark.slow
def test_a_killed_trainer_takes_its_collators_with_it(serve: Served, tmp_path: Path) -> None:
    import ray

    server = serve("orphaned", collators=2, lease_ttl_s=1.0)
    before, address = collator_pids(), ray.get_runtime_context().gcs_address
    command = [sys.executable, str(HERE / "death_trainer.py"), address, "orphaned", str(tmp_path / "c.json")]
    done = subprocess.run([*command, "fetched:7"], check=False, timeout=280)
    assert done.returncode == -signal.SIGKILL
    assert have_ended(collator_pids() - before)
    assert subprocess.run(command, check=False, timeout=280).returncode == 0
    assert stats(server)["frontier"] == 21


CLUSTER = """
import json, sys, time
from ray.cluster_utils import Cluster
import ray
from tests.patience import wait_longer_for_nodes

quick = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500,
         "health_check_timeout_ms": 5000, "health_check_failure_threshold": 4}
store = {"object_store_memory": 80 * 2**20}
wait_longer_for_nodes()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick, **store})
first = cluster.add_node(num_cpus=2, **store)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

import raysvc
from raysvc.actors.launch import start_server
from raysvc.actors.server.spec import ServeSpec

sys.path.insert(0, sys.argv[2])
from streams import opened

start_server(ServeSpec.model_validate_json(sys.argv[1]), detached=True)
"""
NODE = (
    CLUSTER
    + """
got, lost = {}, {first.node_id}
with raysvc.attach("node", look_ahead_steps=4, locality_hints=[first.node_id]) as client:
    for step in client:
        if step.index == 2:  # four steps are being made or unread on the node that goes
            ray.wait([mini.shards[0] for mini in step.mini_batches], num_returns=2, fetch_local=False)
            places = ray.experimental.get_object_locations([step.mini_batches[0].shards[0]])
            on = {node for each in places.values() for node in each["node_ids"]}
            cluster.add_node(num_cpus=2, **store)
            cluster.remove_node(first, allow_graceful=False)
        got[step.index] = opened(step)
        client.commit(step.index)
        del step
print(json.dumps({"got": got, "were_there": on == lost}))
ray.shutdown()
cluster.shutdown()
"""
)
LEFT = (
    CLUSTER
    + """
from contextlib import suppress

import psutil
from raysvc.actors.server import collator_pool

# the first two steps are made by one each before either is let go of, so that both processes are up by then
collator_pool.PATIENCE_STEPS, collator_pool.LEAVING_STEPS = 3, 2
next_step = collator_pool.NodeCollators.next_step


def next_step_when_all_are_made(self):
    calls = [call for _, unfinished in self._working for call in unfinished]
    ray.wait(calls, num_returns=len(calls), fetch_local=False) if calls else None
    self._ahead = 2
    next_step(self)


collator_pool.NodeCollators.next_step = next_step_when_all_are_made


def collators():
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended just now
            found += [one.pid] * one.name().startswith("ray::Collator")
    return found


got, most = {}, 0
with raysvc.attach("node", look_ahead_steps=2, locality_hints=[first.node_id]) as client:
    held = []
    for step in client.steps(stop=10):
        refs = [shard for mini in step.mini_batches for shard in mini.shards]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
        if step.index < 4:
            held.append(step)
        most = max(most, len(collators()))
        client.commit(step.index)
        time.sleep(0.1)
    until = time.monotonic() + 60
    while len(collators()) == most and time.monotonic() < until:
        time.sleep(0.1)
    left = most - len(collators())
    cluster.add_node(num_cpus=2, **store)
    cluster.remove_node(first, allow_graceful=False)
    got = {step.index: opened(step) for step in held}
print(json.dumps({"got": got, "left": left}))
ray.shutdown()
cluster.shutdown()
"""
)


def run_on_nodes(program: str, entry: str, folder: Path, **plan: Any) -> tuple[dict[str, Any], Any]:
    """What a program on a cluster of its own says, and what it served."""
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    spec = ServeSpec(
        name="node", sources=[entry], pad_token_id=0, journal=str(folder / "j"), num_cpus=0, collators=2,
        plan=PlanConfig(batch_size=8, mini_batch_size=4, pad_to_multiple=2048, **plan),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, spec.model_dump_json(), str(HERE)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True, text=True, check=False, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))), spec


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_shard_is_made_again_after_the_collator_that_made_it_has_ended(
    entry: Callable[..., str], tmp_path: Path, streams: Any
) -> None:
    report, spec = run_on_nodes(LEFT, entry(50), tmp_path, epochs=6)
    assert report["left"] == 1, "one had nothing to do"
    expected = streams.made_of(spec)
    assert report["got"] == {step: expected[step] for step in map(str, range(4))}


@pytest.mark.slow
def test_a_lost_node_with_all_collators_and_their_shards_changes_no_byte(
    entry: Callable[..., str], tmp_path: Path, streams: Any
) -> None:
    report, spec = run_on_nodes(NODE, entry(50), tmp_path, epochs=2)
    assert report["were_there"], "the shards of the step lay on the node that was lost"
    assert report["got"] == streams.made_of(spec)
