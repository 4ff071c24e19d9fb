"""Dashboard, alerts and what Prometheus scrapes: of metrics that are exported, as their tools take them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from raysvc.metrics import TABLE


def test_alerts_are_the_same_for_both_ways_to_load_them_and_have_a_severity(deploy: Path) -> None:
    plain = yaml.safe_load((deploy / "alerts.yml").read_text())
    rule = yaml.safe_load(
        (deploy / "kuberay" / "components" / "monitoring" / "prometheus-rule.yaml").read_text()
    )
    assert rule["spec"] == plain
    severities = {
        each["alert"]: each["labels"]["severity"] for group in plain["groups"] for each in group["rules"]
    }
    assert set(severities.values()) == {"warning", "critical"}


def test_the_dashboard_can_be_narrowed_to_a_cluster(deploy: Path) -> None:
    board = json.loads((deploy / "grafana" / "raysvc.json").read_text())
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["cluster"]["allValue"] == ".*", "a series without the label is shown too"
    assert variables["team"]["allValue"] == ".*", "servers of nobody's team are shown too"
    assert list(variables).index("cluster") < list(variables).index("team") < list(variables).index("server")
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(r"\bray_(?!io_cluster)\w+", target["expr"])
            assert target["expr"].count('{ray_io_cluster=~"$cluster"') == len(names) > 0, target["expr"]
            ours = target["expr"].count('server=~"$server"')
            assert target["expr"].count('team=~"$team", server=~"$server"') == ours, target["expr"]
            assert target["expr"].count("team, server") >= (ours > 0), "teams may use the same server name"
    monitor = yaml.safe_load(
        (deploy / "kuberay" / "components" / "monitoring" / "pod-monitor.yaml").read_text()
    )
    assert monitor["spec"]["podTargetLabels"] == ["ray.io/cluster"]


@pytest.mark.parametrize(
    ("file", "kind", "wrong"),
    [("pod-monitor.yaml", "PodMonitor", "interval"), ("prometheus-rule.yaml", "PrometheusRule", "for")],
)
def test_the_prometheus_operator_knows_every_field(deploy: Path, file: str, kind: str, wrong: str) -> None:
    schema = json.loads(Path(__file__).with_name("prometheus_operator.json").read_text())[kind]
    check = jsonschema.Draft202012Validator(schema).validate
    text = (deploy / "kuberay" / "components" / "monitoring" / file).read_text()
    check(yaml.safe_load(text))
    with pytest.raises(jsonschema.ValidationError, match=f"{wrong}s"):
        check(yaml.safe_load(text.replace(f"{wrong}: ", f"{wrong}s: ")))
    with pytest.raises(jsonschema.ValidationError, match="10 minutes"):
        check(yaml.safe_load(re.sub(rf"{wrong}: \w+", f"{wrong}: 10 minutes", text)))


def expressions(deploy: Path) -> list[str]:
    board = json.loads((deploy / "grafana" / "raysvc.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    rules = yaml.safe_load((deploy / "alerts.yml").read_text())
    return [*found, *(rule["expr"] for group in rules["groups"] for rule in group["rules"])]


def test_dashboard_and_alerts_ask_only_for_metrics_that_are_exported(deploy: Path) -> None:
    exported = {metric.exported for metric in TABLE if metric.kind != "histogram"}
    for metric in TABLE:
        if metric.kind == "histogram":
            exported |= {f"{metric.exported}{end}" for end in ("_bucket", "_sum", "_count")}
    asked = {name for text in expressions(deploy) for name in re.findall(r"\bray_raysvc_\w+", text)}
    assert asked <= exported
    shown = {name for metric in TABLE for name in asked if name.startswith(metric.exported)}
    assert shown == asked
    missing = [metric.name for metric in TABLE if not any(name.startswith(metric.exported) for name in asked)]
    assert missing == [], "a metric that no panel shows"


def test_tags_in_queries_are_tags_of_the_metric(deploy: Path) -> None:
    tags = {metric.exported: set(metric.all_tags) for metric in TABLE}
    for text in expressions(deploy):
        for name, selector in re.findall(r"\b(ray_raysvc_\w+)\{([^}]*)\}", text):
            known = next(tags[base] for base in tags if name.startswith(base))
            assert set(re.findall(r"(\w+)=", selector)) <= known | {"ray_io_cluster"}, text
        for listed in re.findall(r"by \(([^)]*)\)", text):
            assert set(listed.split(", ")) <= {
                "le",
                "team",
                "server",
                "role",
                "source",
                "NodeAddress",
                "ray_io_cluster",
            }, text


def test_panels_do_not_overlap(deploy: Path) -> None:
    board = json.loads((deploy / "grafana" / "raysvc.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_its_files_and_every_query(deploy: Path, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        done = subprocess.run(
            ["promtool", "check", *arguments], cwd=deploy, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    check("config", "prometheus.yml")
    plain = [
        text.replace("$__rate_interval", "1m")
        .replace("$server", ".*")
        .replace("$cluster", ".*")
        .replace("$team", ".*")
        for text in expressions(deploy)
    ]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(plain)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    check("rules", str(tmp_path / "rules.yml"))
