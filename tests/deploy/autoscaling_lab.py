"""Run by test_autoscaling.py in namespaces of its own: Ray's autoscaling cluster under a build and a server.

Usage: autoscaling_lab.py ROWS TOKENIZER FOLDER; prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray import cluster_utils

STORE = 80 << 20
WAIT_S = 150.0
NODE = {"node_config": {}, "min_workers": 0, "max_workers": 2}
PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
    "launch_multiple": True,
    "head_node_id": cluster_utils.FAKE_HEAD_NODE_ID,
}
EMPTY: dict[str, Any] = {key: {} for key in ("auth", "docker", "file_mounts")} | {key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")}  # fmt: skip


class Cluster(cluster_utils.AutoscalingCluster):  # type: ignore[misc]
    """Ray's, with the base config that the wheel does not have."""

    def _generate_config(
        self, head_resources: dict[str, Any], worker_node_types: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        options.pop("autoscaler_v2")
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {
            **EMPTY,
            "cluster_name": "fake_multinode",
            "max_workers": 8,
            "upscaling_speed": 1.0,
            "provider": PROVIDER,
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {**worker_node_types, "ray.head.default": head},
            **options,
        }


def slow_slices() -> None:
    """Runs in every worker process: a slice takes a second, so that nodes have time to come and go."""
    from raysvc.pipelines import tokenize

    build = tokenize.build_slice

    def slow(*args: Any) -> Any:
        time.sleep(1.0)
        return build(*args)

    tokenize.build_slice = slow


class Watch(threading.Thread):
    """Which pools had nodes, as it changed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[list[str]] = []

    def run(self) -> None:
        while True:
            now = pools()
            if not self.seen or self.seen[-1] != now:
                self.seen.append(now)
            time.sleep(0.25)


def pools() -> list[str]:
    return sorted(node["Labels"]["raysvc-pool"] for node in workers())


def workers() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and "raysvc-pool" in (node.get("Labels") or {})]


def wait_until(true: Any, what: str) -> float:
    begin = time.monotonic()
    while not true():
        if time.monotonic() - begin > WAIT_S:
            raise TimeoutError(f"{what}: {pools()}")
        time.sleep(0.1)
    return time.monotonic() - begin


def kill_a_node() -> str:
    """Power off one data node: its raylet dies, and its workers with it."""
    node = workers()[0]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "raylet/raylet" in command and node["RayletSocketName"] in command:
            os.kill(int(folder.name), signal.SIGKILL)
            return str(node["NodeID"])
    raise LookupError(f"no raylet of {node['NodeID']}")


def main(rows: str, tokenizer: str, folder: str) -> dict[str, Any]:
    import raysvc

    types = {
        "gpu": {**NODE, "resources": {"CPU": 4, "GPU": 1, "object_store_memory": STORE}, "labels": {"raysvc-pool": "gpu"}},
        "data": {**NODE, "resources": {"CPU": 1, "object_store_memory": STORE}, "labels": {"raysvc-pool": "data"}},
    }  # fmt: skip
    head = {"CPU": 0, "object_store_memory": STORE}
    cluster = Cluster(head, types, autoscaler_v2=True, idle_timeout_minutes=0.1)
    quick = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
    }
    cluster.start(_system_config=quick)
    ray.init("auto", log_to_driver=False, runtime_env={"worker_process_setup_hook": slow_slices})
    watch = Watch()
    watch.start()
    job = {
        "source": {"path": rows, "format": "chat"},
        "tokenizer": tokenizer,
        "cache": {"root": f"{folder}/cache"},
        "workers": {
            "slice_mb": os.path.getsize(rows) / 1e6 / 24,
            "min": 2,
        },  # so small a source needs no cluster otherwise
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": "scaled", "orphan_ttl_s": 10.0, "reap": True, "lease_ttl_s": 10.0},
        "trainer": {"run_dir": f"{folder}/run", "wait_for_nodes": True},
    }
    killed: list[str] = []

    def progress(tick: Any) -> None:
        if tick.phase == "tokenize" and tick.done > 0 and len(workers()) == 2 and not killed:
            killed.append(kill_a_node())

    begin = time.monotonic()
    entry = raysvc.tokenize(job, progress=progress)
    built_s = time.monotonic() - begin
    parts = len(list(Path(entry.uri).glob("part-*.arrow")))
    down_s = wait_until(lambda: not pools(), "nodes of the build to leave")
    built = [*watch.seen, pools()]

    raysvc.serve(job)
    with raysvc.attach("scaled") as client:
        step = next(iter(client))
        client.commit(step.index)
    del step, client
    while_serving = pools()
    served_down_s = wait_until(lambda: not pools(), "the server's node to leave")
    return {
        "rows": entry.num_rows,
        "parts": parts,
        "slices": sum(entry.report["encoders"].values()),
        "killed": killed,
        "built_s": built_s,
        "down_s": down_s,
        "pools": built,
        "while_serving": while_serving,
        "served_down_s": served_down_s,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)  # the namespace ends with this process, and the whole cluster with it
