"""An RL run whose trainer, server and producers die trains the rows of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import RolloutSpec
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import table_of
from tests.patience import end_servers

pytestmark = pytest.mark.ray
BATCH = 3
PLAN = {"batch_size": BATCH, "mini_batch_size": 2, "columns": ("input_ids", "labels", "reward")}
SAVE_EVERY = 3


def group(number: int) -> Group:
    rows = 1 + number % 3
    ids = [[number, row, *range(number % 7)] for row in range(rows)]
    mask = [[0] + [1] * (len(each) - 1) for each in ids]
    return Group(f"prompt-{number}", ids, mask, rows={"reward": [float(number)] * rows})


def digests(shards: list[Any]) -> list[str]:
    return [shard.digest() for shard in shards]


class Trainer:
    """The documented loop. What it trained is in its checkpoint, as weights would be."""

    def pid(self) -> int:
        return os.getpid()

    def train(self, name: str, folder: str, stop: int | None) -> None:
        import ray

        import raysvc

        path = Path(folder) / "checkpoint.json"
        saved = json.loads(path.read_text()) if path.exists() else {"rows": [], "state": None}
        with raysvc.attach(name, takeover=True, look_ahead_steps=2) as client:
            if saved["state"] is None:
                client.rewind(0)
            else:
                client.load_state_dict(saved["state"])
            for step in client.steps(stop=stop):
                assert step.index == len(saved["rows"])
                refs = [ref for mini in step.mini_batches for ref in mini.shards]
                saved["rows"].append(digests([raysvc.read_shard(value) for value in ray.get(refs)]))
                client.commit(step.index)
                client.rollouts.set_weight_version(step.index + 1)
                if step.index % SAVE_EVERY == 0 or step.index + 1 == stop:
                    whole = json.dumps({**saved, "state": client.state_dict()})
                    path.with_suffix(".new").write_text(whole)
                    path.with_suffix(".new").rename(path)


class Producer:
    """Puts every second number, from its last progress on, some of them again."""

    def pid(self) -> int:
        return os.getpid()

    def produce(self, name: str, folder: str, first: int) -> None:
        import raysvc

        progress, producer = Path(folder) / f"progress-{first}", raysvc.rollouts(name)
        number = first
        if progress.exists():
            number = max(first, int(progress.read_text()) - 4)
        while not (Path(folder) / "done").exists():
            producer.reserve([f"prompt-{number}"])
            producer.put_groups(group(number))
            progress.with_suffix(".new").write_text(str(number))
            progress.with_suffix(".new").rename(progress)
            number += 2
            time.sleep(0.02)


@pytest.fixture
def served(tmp_path: Path, ray_session: None) -> Iterator[Callable[..., Any]]:
    import raysvc

    started = []

    def start(name: str) -> Any:
        started.append(name)
        return raysvc.serve_rollouts(
            name, run_dir=str(tmp_path / "run"), pad_token_id=0, plan=PLAN, max_staleness=1000, num_cpus=0
        )

    yield start
    end_servers(started)


def spooled(folder: Path) -> list[pa.Table]:
    """The puts as they lie on disk, in their order, read by Arrow alone."""
    files = sorted((folder / "server" / "rollouts" / "groups").glob("*.arrow"))
    return [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in files]


def undisturbed(folder: Path, puts: list[pa.Table]) -> list[list[str]]:
    """What a run that nobody disturbs makes of the same puts: digests of the shards of every step."""
    spec, recipe = RolloutSpec(max_staleness=None), Recipe(PlanConfig(**PLAN), 0)
    calm = RolloutStream("calm", spec, recipe, str(folder), {})
    for table in puts:
        calm.put(table)
    steps, out = len(calm.pool.ready) // BATCH, []
    for step in range(steps):
        assert calm.form(step, step)
        out.append(digests(list(calm.make(step, (1,))[1])))
    return out


def test_the_documented_loop_goes_on_from_any_checkpoint(
    served: Callable[..., Any], tmp_path: Path, streams: Any
) -> None:
    import raysvc

    served("resume")
    raysvc.rollouts("resume").put_groups([group(number) for number in range(10 * BATCH)])
    states, seen = {}, {}
    with raysvc.attach("resume") as client:
        for step in client.steps(stop=6):
            states[step.index] = client.state_dict()
            seen[step.index] = streams.opened(step)
            client.commit(step.index)
            client.rollouts.set_weight_version(step.index + 1)
    for number, back_to in enumerate((2, 0, 5), start=1):
        with raysvc.attach("resume") as client:
            client.load_state_dict(states[back_to])
            assert raysvc.rollouts("resume").stats()["weight_version"] == back_to
            assert raysvc.rollouts("resume").stats()["timeline"] == number
            for step in client.steps(stop=6):
                assert streams.opened(step) == seen[step.index]
                client.commit(step.index)
                client.rollouts.set_weight_version(step.index + 1)
    events = sorted((tmp_path / "run" / "server" / "rollouts" / "events").iterdir())
    marks = [
        event["timeline"] for path in events for event in json.loads(path.read_text()) if "timeline" in event
    ]
    assert marks == [[1, 2, 2, 6], [2, 0, 0, 6], [3, 5, 5, 6]], "number, from, version, void until"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4, 20])
def test_kills_of_trainer_server_and_producers_change_no_trained_row(
    served: Callable[..., Any], tmp_path: Path, kills: int
) -> None:
    import ray

    handle, rng = served(f"killed-{kills}"), random.Random(kills)
    name, trainers, producers = handle.name, ray.remote(Trainer), ray.remote(Producer)

    def started(what: str) -> tuple[Any, int, Any]:
        actor = (trainers if what == "trainer" else producers).options(num_cpus=0).remote()
        pid = ray.get(actor.pid.remote())
        if what == "trainer":
            return actor, pid, actor.train.remote(name, str(tmp_path), None)
        return actor, pid, actor.produce.remote(name, str(tmp_path), int(what[-1]))

    living = {what: started(what) for what in ("trainer", "producer-0", "producer-1")}
    killed: dict[str, int] = {}
    for number in range(kills):
        time.sleep(rng.uniform(0.05, 1.0))
        what = ("server", *living)[number % 4] if number < 4 else rng.choice(("server", *living))
        killed[what] = killed.get(what, 0) + 1
        if what == "server":
            stats = ray.get(handle.actor.stats.options(concurrency_group="control").remote(), timeout=200)
            os.kill(stats["pid"], signal.SIGKILL)
        else:
            os.kill(living[what][1], signal.SIGKILL)
            living[what] = started(what)
        failed = ray.wait([run for _, _, run in living.values()], timeout=0)[0]
        assert not failed, ray.get(failed)
    (tmp_path / "done").touch()
    ray.get([living[what][2] for what in ("producer-0", "producer-1")], timeout=280)
    os.kill(living["trainer"][1], signal.SIGKILL)

    puts = spooled(tmp_path / "run")
    expected = undisturbed(tmp_path / "calm", puts)
    last = trainers.options(num_cpus=0).remote()
    ray.get(last.train.remote(name, str(tmp_path), len(expected)), timeout=200)
    trained = json.loads((tmp_path / "checkpoint.json").read_text())["rows"]
    assert trained == expected
    uids = [uid for table in puts for uid in dict.fromkeys(table.column("uid").to_pylist())]
    assert len(uids) == len(set(uids)), "no group is there twice"
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(last)
    print(f"kills={killed} groups={len(uids)} steps={len(trained)}")
    assert table_of([group(0)]).num_rows == 1
