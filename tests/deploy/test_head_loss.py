"""The head dies with SIGKILL: with its state in Redis, servers and trainers on other nodes go on, and a new head finds them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a head in namespaces of its own needs root"),
]

# a head in a pod of its own does not see the processes of other nodes; `ray start` would take them for itself
ALONE = ("unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child")
START = """
import json, sys
import ray, raysvc
job, told = json.loads(sys.argv[1]), sys.argv[2]
ray.init(address=sys.argv[3], log_to_driver=False)
raysvc.serve(job)

@ray.remote(num_cpus=0.1)
class Trainer:
    def train(self, told):
        import time, raysvc
        with raysvc.attach("head-loss") as client, open(told, "a", buffering=1) as file:
            for step in client:
                row_ids = [row for mini in step.mini_batches for row in mini.info.row_ids.tolist()]
                time.sleep(0.1)
                client.commit(step.index)
                file.write(json.dumps({"step": step.index, "row_ids": row_ids}) + "\\n")

Trainer.options(name="trainer", namespace="test", lifetime="detached", resources={"data": 0.1}).remote().train.remote(told)
import os, time
while not os.path.exists(told):  # a call that the trainer has not got yet would end with this process
    time.sleep(0.1)
"""
LOOK = """
import json, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from raysvc.inspect.servers import list_servers, stop
(facts,) = list_servers()
print(json.dumps({name: facts[name] for name in ("pid", "frontier", "state")}))
if "--stop" in sys.argv: stop("head-loss", force=True)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Lab:
    """Redis, a head without CPUs, and a node; each started by hand, each with a log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.redis_port, self.port = folder, free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.env = {
            **os.environ,
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{self.redis_port}",
            "RAY_AUTH_MODE": "disabled",
            "HOME": str(folder),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
        self.started.append(process)
        return process

    def start_redis(self) -> None:
        self.start("redis-server", "--port", str(self.redis_port), "--save", "", "--dir", str(self.folder))

    def start_head(self) -> subprocess.Popen[bytes]:
        head = (
            "--head",
            f"--port={self.port}",
            "--num-cpus=0",
            "--include-dashboard=false",
            "--disable-usage-stats",
        )
        return self.ray_start(*head, inside=ALONE)

    def start_node(self) -> subprocess.Popen[bytes]:
        return self.ray_start(f"--address={self.address}", "--num-cpus=2", '--resources={"data": 1}')

    def ray_start(self, *arguments: str, inside: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        fixed = ("--node-ip-address=127.0.0.1", "--object-store-memory=100000000", "--block")
        ray = str(Path(sys.executable).parent / "ray")
        return self.start(*inside, ray, "start", *arguments, *fixed)

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["timeout", "200", sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def listens(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0


def kill_tree(process: subprocess.Popen[bytes]) -> list[str]:
    """SIGKILL a process and all below it; returns their names."""
    import psutil

    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    names = []
    for each in tree:
        try:
            names.append(each.name())
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
    return names


def eventually(true: Callable[[], Any], what: str, timeout_s: float = 300.0) -> Any:
    begin = time.monotonic()
    while not (found := true()):
        assert time.monotonic() - begin < timeout_s, what
        time.sleep(0.2)
    return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    try:
        yield made
    finally:
        for process in reversed(made.started):
            if process.poll() is None:
                kill_tree(process)


def test_servers_and_trainers_outlive_the_head_and_a_new_head_finds_them(
    lab: Lab, tmp_path: Path, sample: dict[str, str]
) -> None:
    told = tmp_path / "told.jsonl"
    job = {
        "source": {"path": sample["rows"]},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 4, "epochs": 100},
        "server": {"name": "head-loss"},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }

    def steps() -> int:
        return len(told.read_text().splitlines()) if told.exists() else 0

    lab.start_redis()
    head = lab.start_head()
    eventually(lab.listens, "the head listens")
    lab.start_node()
    eventually(
        lambda: (
            "data"
            in lab.run(
                "import ray,sys; ray.init(address=sys.argv[1]); print(ray.cluster_resources())", lab.address
            ).stdout
        ),
        "the node joins",
    )
    started = lab.run(START, json.dumps(job), str(told), lab.address)
    assert started.returncode == 0, started.stderr[-3000:]
    eventually(lambda: steps() > 5, "the trainer trains")
    looked = lab.run(LOOK, lab.address)
    assert looked.returncode == 0, looked.stderr[-3000:]
    before = json.loads(looked.stdout.splitlines()[-1])

    names = kill_tree(head)
    assert {"gcs_server", "raylet"} <= set(names), names
    at_kill = steps()
    eventually(lambda: steps() > at_kill + 20, "training goes on without a head")
    lab.start_head()
    eventually(lab.listens, "the new head listens")
    after = json.loads(
        eventually(lambda: lab.run(LOOK, lab.address).stdout.splitlines()[-1:], "a new head answers")[0]
    )
    assert after["pid"] == before["pid"], "the same process serves"
    assert after["state"] == "held"
    assert after["frontier"] > before["frontier"]
    more = steps()
    eventually(lambda: steps() > more + 5, "training goes on under the new head")
    assert [json.loads(line)["step"] for line in told.read_text().splitlines()] == list(range(steps()))
    assert lab.run(LOOK, lab.address, "--stop").returncode == 0
