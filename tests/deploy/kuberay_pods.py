"""The pods that KubeRay makes of a custom resource, as far as Pod Security looks at them, and the rules of its restricted level.

Written from KubeRay's documented behaviour (1.5, checked against its source of August 2026):
- with the in-tree autoscaler the head's pod gets a second container, which has `autoscalerOptions` and nothing of the head's;
- head and autoscaler share the volume `ray-logs` at /tmp/ray, each unless it mounts something there itself;
- a worker's pod gets an init container with the securityContext and the mounts of its first container;
- a RayJob's submitter is `submitterPodTemplate`, or a bare container with the head's image;
- where the head's state is in Redis, what removes it from there in the end is the head's pod with its first container alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

LOGS = {"mountPath": "/tmp/ray", "name": "ray-logs"}
ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip

NEVER_SET = (
    "procMount",
    "seLinuxOptions",
    "windowsOptions",
    "appArmorProfile",
    "sysctls",
)  # some values are allowed


def pods_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and spec of every pod that comes into being for a RayCluster or RayJob."""
    spec = document["spec"]
    cluster = spec if document["kind"] == "RayCluster" else spec.get("rayClusterSpec")
    if document["kind"] == "RayJob" and spec.get("submissionMode", "K8sJobMode") == "K8sJobMode":
        yield (
            "submitter",
            spec.get("submitterPodTemplate", {"spec": {"containers": [{"name": "ray-job-submitter"}]}})[
                "spec"
            ],
        )
    if cluster:
        head = _head(cluster)
        yield "head", head
        if "gcsFaultToleranceOptions" in cluster:
            yield "redis-cleanup", {**head, "containers": head["containers"][:1]}
        for group in cluster.get("workerGroupSpecs", []):
            yield group["groupName"], _worker(group)


def _head(cluster: dict[str, Any]) -> dict[str, Any]:
    pod = copy.deepcopy(cluster["headGroupSpec"]["template"]["spec"])
    if cluster.get("enableInTreeAutoscaling"):
        options = cluster.get("autoscalerOptions", {})
        kept = {
            key: options[key] for key in ("securityContext", "volumeMounts", "resources") if key in options
        }
        pod["containers"].append(copy.deepcopy({"name": "autoscaler", **kept}))
        for container in (pod["containers"][0], pod["containers"][-1]):
            mounts = container.setdefault("volumeMounts", [])
            if all(mount["mountPath"] != LOGS["mountPath"] for mount in mounts):
                mounts.append(dict(LOGS))
                if all(volume["name"] != LOGS["name"] for volume in pod.setdefault("volumes", [])):
                    pod["volumes"].append({"name": LOGS["name"], "emptyDir": {}})
    return pod


def _worker(group: dict[str, Any]) -> dict[str, Any]:
    pod = copy.deepcopy(group["template"]["spec"])
    first = pod["containers"][0]
    kept = {key: copy.deepcopy(first[key]) for key in ("securityContext", "volumeMounts") if key in first}
    pod.setdefault("initContainers", []).append({"name": "wait-gcs-ready", **kept})
    return pod


def refusals(pod: dict[str, Any]) -> list[str]:
    """Why a namespace with the restricted Pod Security standard would refuse a pod; empty if it would not."""
    found = [f"{key} is on" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    for volume in pod.get("volumes", []):
        found += [f"volume {volume['name']} is a {kind}" for kind in set(volume) - {"name"} - ALLOWED_VOLUMES]
    outer = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        inner = container.get("securityContext", {})
        profile = inner.get("seccompProfile", outer.get("seccompProfile", {})).get("type")
        capabilities = inner.get("capabilities", {})
        broken = {
            "allowPrivilegeEscalation": inner.get("allowPrivilegeEscalation") is not False,
            "privileged": bool(inner.get("privileged")),
            "capabilities": "ALL" not in capabilities.get("drop", [])
            or not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": inner.get("runAsNonRoot", outer.get("runAsNonRoot")) is not True,
            "runAsUser": inner.get("runAsUser", outer.get("runAsUser")) == 0,
            "seccompProfile": profile not in ("RuntimeDefault", "Localhost"),
            "unusual": any(key in inner or key in outer for key in NEVER_SET),
            "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {rule}" for rule, is_broken in broken.items() if is_broken]
    return found


def folder_behind(pod: dict[str, Any], container: str, path: str) -> str | None:
    """Name of the volume that a container has at a path."""
    (one,) = [each for each in pod["containers"] if each["name"] == container]
    return next((mount["name"] for mount in one.get("volumeMounts", []) if mount["mountPath"] == path), None)
