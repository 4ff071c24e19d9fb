"""An RL run on a cluster whose nodes die, besides its trainer, server and producers, trains the rows of a calm run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

KILLS = 18
NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
STORE = {"object_store_memory": 80 * 2**20}


class Run:
    """A cluster of a head without actors and three nodes, and what lives there.

    Args:
        folder: of the run; all nodes see it.
    """

    def __init__(self, folder: str) -> None:
        import ray
        from ray.cluster_utils import Cluster

        import raysvc
        from tests.patience import wait_longer_for_nodes
        from tests.rl.test_resume import PLAN

        wait_longer_for_nodes()
        self.folder, self.name, self.killed = folder, "nodes-die", dict[str, int]()
        head = {"num_cpus": 0, "_system_config": NOTICE, **STORE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=2, **STORE) for _ in range(3)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        self.server = raysvc.serve_rollouts(
            self.name, run_dir=f"{folder}/run", pad_token_id=0, plan=PLAN, max_staleness=1000, num_cpus=0.5
        ).actor
        self.living = {what: self.started(what) for what in ("trainer", "producer-0", "producer-1")}

    def started(self, what: str) -> tuple[int, Any, Any]:
        """Process, handle and running call of a trainer or producer."""
        import ray

        from tests.rl.test_resume import Producer, Trainer

        cls = ray.remote(Trainer if what == "trainer" else Producer)
        while True:
            actor = cls.options(num_cpus=0.25, scheduling_strategy="SPREAD").remote()
            try:
                pid = ray.get(actor.pid.remote(), timeout=200)
            except ray.exceptions.RayActorError:
                continue  # it was put on the node that just died
            if what == "trainer":
                return pid, actor, actor.train.remote(self.name, self.folder, None)
            return pid, actor, actor.produce.remote(self.name, self.folder, int(what[-1]))

    def kill(self, what: str, rng: random.Random) -> None:
        """One death."""
        import ray

        self.killed[what] = self.killed.get(what, 0) + 1
        if what == "node":
            self.cluster.remove_node(self.nodes.pop(rng.randrange(3)), allow_graceful=False)
            self.nodes.append(self.cluster.add_node(num_cpus=2, **STORE))
        elif what == "server":
            stats = ray.get(self.server.stats.options(concurrency_group="control").remote(), timeout=200)
            os.kill(stats["pid"], signal.SIGKILL)
        else:
            with suppress(ProcessLookupError):  # it died with its node, and Ray has not said so yet
                os.kill(self.living[what][0], signal.SIGKILL)

    def revive(self) -> None:
        """Start again what died; whatever else a call raises is a failure."""
        import ray

        for what, (_, _, running) in self.living.items():
            if ray.wait([running], timeout=0)[0]:
                try:
                    ray.get(running)
                except ray.exceptions.RayActorError:
                    self.living[what] = self.started(what)

    def end(self) -> dict[str, Any]:
        """Let the last trainer train all that was put; what was put, trained and killed."""
        import ray

        from tests.rl.test_resume import Trainer, spooled, undisturbed

        Path(self.folder, "done").touch()
        for what in ("producer-0", "producer-1"):
            while what in self.living:
                try:
                    ray.get(self.living[what][2], timeout=280)
                    del self.living[what]
                except ray.exceptions.RayActorError:
                    self.living[what] = self.started(what)
        ray.kill(self.living.pop("trainer")[1])
        puts = spooled(Path(self.folder, "run"))
        expected = undisturbed(Path(self.folder, "calm"), puts)
        last = ray.remote(Trainer).options(num_cpus=0.25).remote()
        ray.get(last.train.remote(self.name, self.folder, len(expected)), timeout=200)
        trained = json.loads(Path(self.folder, "checkpoint.json").read_text())["rows"]
        uids = [uid for table in puts for uid in dict.fromkeys(table.column("uid").to_pylist())]
        ray.shutdown()
        self.cluster.shutdown()
        facts = {"groups": len(uids), "twice": len(uids) - len(set(uids)), "steps": len(trained)}
        return {**facts, "same": trained == expected, "killed": self.killed}


def main(folder: str) -> None:
    """Kill and revive, then compare."""
    rng, run = random.Random(KILLS), Run(folder)
    for number in range(KILLS):
        time.sleep(rng.uniform(0.05, 1.0))
        run.revive()
        kinds = ("node", "server", "trainer", "producer-0", "producer-1")
        run.kill(kinds[number % 5] if number < 15 else rng.choice(kinds), rng)
    run.revive()
    print(json.dumps(run.end()))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_kills_of_nodes_trainer_server_and_producers_change_no_trained_row(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rl.test_node_kills", str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=980,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(found)
    assert sum(found["killed"].values()) == KILLS
    assert found["killed"]["node"] >= 3
    assert found["twice"] == 0, "no group is there twice"
    assert found["steps"] > 20
    assert found["same"], "the trained rows are those of a run that nobody disturbed"


if __name__ == "__main__":
    main(sys.argv[1])
