"""The first hour on a cluster that has no worker yet, by one job.yaml: prints what a terminal shows of it.

    python tests/deploy/first_hour.py [ROWS]

1. A head without CPUs starts, with Ray's autoscaler and a cloud of machines (`machines.py`) that share one folder.
2. `ray job submit … -- raysvc train job.yaml` tokenizes and trains. The autoscaler brings machines.
3. The first machine that has tokenized is powered off when a part of the rows is done.
4. When the run has ended, the machines go.

Needs the right to make namespaces. The last line is one JSON object, for the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import yaml  # noqa: E402
from autoscaling_lab import EMPTY  # noqa: E402
from machines import HEAD, LAY, NAMESPACES  # noqa: E402

STORE = 80 << 20
WORKERS, STEPS = 3, 10
GONE_S = 90.0
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
FAKE_HEAD = "f" * 51 + "00000"  # the id by which Ray's provider of stand-in nodes knows the head
BEGAN = time.monotonic()
OUT, sys.stdout = (
    sys.stdout,
    sys.stderr,
)  # what Ray says to this process, which watches, is no part of the text


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=OUT, flush=True)


def cluster_config(folder: Path) -> dict[str, Any]:
    """What `ray up` would read."""
    resources = {"CPU": 1, "object_store_memory": STORE}
    data = {
        "resources": resources,
        "labels": {"raysvc-pool": "data", "ray.io/market-type": "spot"},
        "node_config": {},
        "min_workers": 0,
        "max_workers": WORKERS,
    }
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    provider = {
        "type": "external",
        "module": "machines.Machines",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD,
        "folder": str(folder),
    }
    return {
        **EMPTY,
        "cluster_name": "first-hour",
        "max_workers": WORKERS,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.1,
        "file_mounts_sync_continuously": False,
        "provider": provider,
        "head_node_type": "ray.head.default",
        "available_node_types": {"data": data, "ray.head.default": head},
    }


def start_head(folder: Path) -> None:
    """A head without CPUs, whose monitor brings machines."""
    (folder / "cluster.json").write_text(json.dumps(cluster_config(folder)))
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=0", f"--node-ip-address={HEAD}",
        "--port=6379", f"--dashboard-host={HEAD}", f"--autoscaling-config={folder}/cluster.json",
        f"--object-store-memory={STORE}", "--disable-usage-stats", f"--system-config={json.dumps(HEALTH)}",
    ]  # fmt: skip
    own = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD,
    }
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def write_job(folder: Path, num_rows: int) -> None:
    from raysvc.cli.sample_data import chat_rows, row_texts, write_rows, write_tokenizer

    tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
    rows = write_rows(folder / "rows.jsonl", num_rows)
    job = {
        "source": {"path": str(rows), "format": "chat"},
        "tokenizer": str(tokenizer),
        "cache": {"root": f"{folder}/cache"},
        "workers": {"min": 2, "slice_mb": os.path.getsize(rows) / 1e6 / 60},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": "first"},
        "trainer": {
            "dp_size": 2,
            "device": "cpu",
            "max_steps": STEPS,
            "run_dir": f"{folder}/run",
            "wait_for_nodes": True,
        },
    }
    (folder / "job").mkdir()
    (folder / "job" / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))


class Watch(threading.Thread):
    """Which machines Ray knows, as it changed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._machines = folder / "machines"
        self.seen: list[list[str]] = []

    def run(self) -> None:
        while True:
            now = self.alive()
            if not self.seen or self.seen[-1] != now:
                self.seen.append(now)
                say(f"# nodes: head {' '.join(now)}")
            time.sleep(0.25)

    def alive(self) -> list[str]:
        import ray

        nodes = (node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        return sorted(address for address in nodes if address != HEAD)

    def power_off(self, address: str) -> None:
        machine = json.loads((self._machines / address).read_text())
        os.kill(machine["pid"], signal.SIGKILL)
        say(f"# {machine['name']} ({address}) is powered off")


def submit(folder: Path, watch: Watch) -> dict[str, Any]:
    """What the terminal shows, and the machine that was powered off meanwhile."""
    command = ["-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://{HEAD}:8265"]
    words = ["--working-dir", ".", "--", "python", "-m", "raysvc.cli", "train", "job.yaml", "--json"]
    say(f"$ ray job submit {' '.join(words)}")
    job = subprocess.Popen(
        [sys.executable, *command, *words],
        cwd=folder / "job", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    killed = ""
    assert job.stdout is not None
    for line in job.stdout:
        lines.append(re.sub(r"\x1b\[\d+m", "", line.rstrip()))
        say(lines[-1])
        rows = re.search(r"\[tokenize\] (\d+)/(\d+) rows", line)
        if rows and not killed and 0 < int(rows[1]) < int(rows[2]) and len(watch.alive()) >= 2:
            killed = watch.alive()[0]
            watch.power_off(killed)
    return {"code": job.wait(), "lines": lines, "killed": killed}


def main(folder: Path, num_rows: int) -> dict[str, Any]:
    import ray

    for name in ("machines", "ray", "own"):
        (folder / name).mkdir()
    write_job(folder, num_rows)
    start_head(folder)
    say("# the head is there")
    ray.init(f"{HEAD}:6379", log_to_driver=False, logging_level="ERROR")
    watch = Watch(folder)
    watch.start()
    found = submit(folder, watch)
    ended = time.monotonic()
    while watch.alive() and time.monotonic() - ended < GONE_S:
        time.sleep(0.25)
    time.sleep(0.5)  # the watch sees it too
    say(f"# the machines were gone {time.monotonic() - ended:.0f} s after the run")
    return {**found, "seen": watch.seen, "source_rows": source_rows(folder)}


def source_rows(folder: Path) -> list[int]:
    """The numbers of the rows that were tokenized, as pyarrow reads them."""
    import pyarrow as pa

    [manifest] = folder.glob("cache/*/manifest.json")
    names = [part["name"] for part in json.loads(manifest.read_text())["parts"]]
    tables = [pa.ipc.open_stream((manifest.parent / name).read_bytes()).read_all() for name in names]
    return sorted(row for table in tables for row in table["source_row"].to_pylist())


def in_namespaces() -> int:
    """Run this script again, in namespaces of its own; the whole cluster ends with it."""
    folder = tempfile.mkdtemp(prefix="fh", dir="/tmp")  # not /dev/shm, of which every machine has its own
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
        "RAY_TMPDIR": f"{folder}/ray",
        "HOME": f"{folder}/own",
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--inside", folder, *sys.argv[1:]]
    try:
        return subprocess.run(
            [*NAMESPACES, "bash", "-ec", f'{LAY} exec "$@"', "_", *command], env=env, check=False
        ).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--inside"]:
        sys.exit(in_namespaces())
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else 60_000
    print(json.dumps(main(Path(sys.argv[2]), rows)), file=OUT, flush=True)
    os._exit(0)
