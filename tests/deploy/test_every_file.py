"""No file in deploy/ is unchecked: each has a check here that takes it, and refuses it with one word of it wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import yaml

from raysvc.errors import UserMistake
from raysvc.job.job_file import load_job
from raysvc.metrics import TABLE

from .kuberay_pods import pods_of, refusals
from .kustomize import all_components, rendered

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file())
REFUSALS = (AssertionError, jsonschema.ValidationError, kubernetes_validate.ValidationError, UserMistake)


def operator_schema(kind: str) -> jsonschema.Draft202012Validator:
    """Of the Prometheus operator."""
    schemas = json.loads(Path(__file__).with_name("prometheus_operator.json").read_text())
    return jsonschema.Draft202012Validator(schemas[kind])


def by_the_launcher(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load(path.read_text())))


def by_kubernetes(path: Path) -> None:
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), "1.33", strict=True)


def by_kuberay(path: Path) -> None:
    """Its pods are pods, and locked ones; its own fields are held against the CRDs in test_files.py."""
    for name, pod in pods_of(yaml.safe_load(path.read_text())):
        assert refusals(pod) == []
        bare = {
            key: value for key, value in pod.items() if key != "initContainers"
        }  # the operator's, without an image
        bare["containers"] = [each for each in pod["containers"] if each["name"] != "autoscaler"]
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": bare}
        kubernetes_validate.validate(document, "1.33", strict=True)


def by_the_prometheus_operator(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    operator_schema(document["kind"]).validate(document)


def by_prometheus_rules(path: Path) -> None:
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {}}
    operator_schema("PrometheusRule").validate({**head, "spec": yaml.safe_load(path.read_text())})


def by_prometheus(path: Path) -> None:
    """A job finds its targets in a way that Prometheus has."""
    (job,) = yaml.safe_load(path.read_text()).get("scrape_configs", [{}])
    ways = {"file_sd_configs", "kubernetes_sd_configs"}
    assert {"job_name"} < set(job) <= {"job_name", "relabel_configs", "metric_relabel_configs", *ways}
    assert len(ways & set(job)) == 1


def by_metrics(path: Path) -> None:
    """A dashboard asks for metrics that there are."""
    asked = set(re.findall(r"\bray_(raysvc\w*?)(?:_bucket|_sum|_count)?\b", path.read_text()))
    assert json.loads(path.read_text())["panels"]
    assert asked <= {metric.exported.removeprefix("ray_") for metric in TABLE}


def by_kubectl(path: Path) -> None:
    """The example with every component is rendered, and a job mounts the file that the example makes."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (deploy,) = [parent for parent in path.parents if (parent / "kuberay" / "base").is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        documents = rendered(all_components(deploy, Path(folder)))
    (made,) = [each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"]
    mounted = re.findall(r"'configMap': \{'name': '([^']+)'", str(documents))
    assert set(mounted) == {made}


def by_load_job(path: Path) -> None:
    load_job(path)


def by_shell(path: Path) -> None:
    """What an image is made of lies there, is let into its context, and its commands are shell."""
    text = (path.parent / "Dockerfile").read_text().replace("\\\n", " ")
    kept = (path.parent / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (DEPLOY.parent / source).exists(), source
            assert f"!{source}" in kept, source
    for run in re.findall(r"^RUN (.*)", text, re.MULTILINE):
        assert subprocess.run(["sh", "-n", "-c", run], capture_output=True, check=False).returncode == 0


class Check(NamedTuple):
    """Who takes files of that name, and a word of them that must be as it is."""

    takes: Callable[[Path], None]
    word: str


CHECKS = {
    "ray-*.yaml": Check(by_the_launcher, "idle_timeout_minutes:"),
    "Dockerfile": Check(by_shell, "constraints.txt /tmp"),
    "Dockerfile.dockerignore": Check(by_shell, "!actors"),
    "prometheus.yml": Check(by_prometheus, "scrape_configs:"),
    "alerts.yml": Check(by_prometheus_rules, "for:"),
    "grafana/*.json": Check(by_metrics, "stall_seconds"),
    "base/raycluster.yaml": Check(by_kuberay, "securityContext:"),
    "rayjob-*.yaml": Check(by_kuberay, "securityContext:"),
    "base/disruption.yaml": Check(by_kubernetes, "minAvailable:"),
    "network-policy.yaml": Check(by_kubernetes, "ingress:"),
    "monitoring/pod-monitor.yaml": Check(by_the_prometheus_operator, "interval:"),
    "monitoring/prometheus-rule.yaml": Check(by_the_prometheus_operator, "for:"),
    "kustomization.yaml": Check(by_kubectl, "kind:"),
    "base/references.yaml": Check(by_kubectl, "nameReference:"),
    "example/job.yaml": Check(by_load_job, "tokenizer:"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_taken_as_it_is_and_refused_with_a_word_of_it_wrong(name: str, tmp_path: Path) -> None:
    checks = [check for pattern, check in CHECKS.items() if PurePath(name).match(pattern)]
    assert len(checks) == 1, f"nobody checks deploy/{name}: add a check of it here"
    path = shutil.copytree(DEPLOY, tmp_path / "deploy") / name
    checks[0].takes(path)
    text = path.read_text()
    assert checks[0].word in text
    path.write_text(text.replace(checks[0].word, f"x{checks[0].word}"))
    with pytest.raises(REFUSALS):
        checks[0].takes(path)
