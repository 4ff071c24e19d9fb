"""A cloud on this machine, for Ray's autoscaler: a machine is a set of namespaces with a network, processes and disks of its own.

A machine has its own `/dev/shm`, its own folder for Ray, and its own disk at `own` of the cluster's folder; all other files
are shared. Killing the process whose number lies in `machines/ADDRESS` of that folder powers it off.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

# Ray's tools end every Ray that they can see, so they must see their own alone
NAMESPACES = ["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child"]
NETWORK = "10.99.0"
HEAD = f"{NETWORK}.1"
# the head's network is the one that the script was started in
LAY = f"""
ip link set lo up
ip link add br0 type bridge; ip addr add {HEAD}/24 dev br0; ip link set br0 up
mount -t tmpfs raysvc-test /run
"""
PLUG = f"""
ip netns add $0; ip link add v$0 type veth peer name eth0 netns $0; ip link set v$0 master br0 up
ip -n $0 link set lo up; ip -n $0 addr add $1/24 dev eth0; ip -n $0 link set eth0 up
ip -n $0 route add default via {HEAD}
"""
BOOT = """
hostname $0; for disk in /dev/shm "$1/ray" "$1/own"; do mount -t tmpfs raysvc-test "$disk" || exit 7; done
shift; "$@"
"""
SPACES = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]


class Machines(FakeMultiNodeProvider):  # type: ignore[misc]
    """Ray's provider of stand-in nodes, whose nodes are machines; one that was powered off is not there any more."""

    def _get_ip(self, node_id: str) -> str:
        return str(self._nodes[node_id].get("address", HEAD))

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self.lock:
            for node_id in [name for name, node in self._nodes.items() if "node" in node]:
                if self._nodes[node_id]["node"].poll() is not None:
                    self._unplug(self._nodes.pop(node_id))
            return list(super().non_terminated_nodes(tag_filters))

    def _create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, Any],
        labels: dict[str, str],
    ) -> None:
        with self.lock:
            node_id, kind = self._next_hex_node_id(), tags[TAG_RAY_USER_NODE_TYPE]
            number = self._next_node_id
            name, address = f"{kind}{number}", f"{NETWORK}.{1 + number}"
            subprocess.run(["bash", "-ec", PLUG, name, address], check=True)
            own = {
                TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
                TAG_RAY_USER_NODE_TYPE: kind,
                TAG_RAY_NODE_NAME: node_id,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
            node = self._boot(name, address, node_id, kind, resources, labels)
            self._nodes[node_id] = {"tags": {**own, **tags}, "node": node, "name": name, "address": address}

    def _boot(
        self,
        name: str,
        address: str,
        node_id: str,
        kind: str,
        resources: dict[str, Any],
        labels: dict[str, str],
    ) -> subprocess.Popen[bytes]:
        """Start a machine and Ray on it; the process that it lives as long as."""
        folder = self.provider_config["folder"]
        start = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
            f"--address={HEAD}:6379", f"--node-ip-address={address}", f"--num-cpus={resources['CPU']}",
            f"--object-store-memory={resources['object_store_memory']}",
            "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
        ]  # fmt: skip
        # of the monitor's own environment, which is the head's, the id would make every node the head
        names = {
            "CLOUD_INSTANCE_ID": node_id,
            "OVERRIDE_NODE_ID_FOR_TESTING": node_id,
            "NODE_TYPE_NAME": kind,
        }
        instance = [f"RAY_{name}={value}" for name, value in names.items()]
        command = [
            "env",
            *instance,
            "ip",
            "netns",
            "exec",
            name,
            *SPACES,
            "bash",
            "-c",
            BOOT,
            name,
            folder,
            *start,
        ]
        with Path(folder, f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        Path(folder, "machines", address).write_text(json.dumps({"name": name, "pid": process.pid}))
        return process

    def _terminate_node(self, node: dict[str, Any]) -> None:
        node["node"].kill()
        node["node"].wait()
        self._unplug(node)

    def _unplug(self, node: dict[str, Any]) -> None:
        Path(self.provider_config["folder"], "machines", node["address"]).unlink()
        subprocess.run(["ip", "netns", "del", node["name"]], check=False)
