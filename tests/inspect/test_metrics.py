"""What is exported: the table, and a real endpoint during a real run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raysvc.metrics import BY_NAME, SPILLED, TABLE, record
from raysvc.trackers.stalls import PARTS

ROOT = Path(__file__).parents[2]
READ = """
def samples(text):
    import re
    lines = (re.fullmatch(r"(\\w+)\\{([^}]*)\\} (\\S+)", line) for line in text.splitlines())
    return [(hit[1], dict(re.findall(r'(\\w+)="([^"]*)"', hit[2])), float(hit[3])) for hit in lines if hit]
"""
UNITS = ("_seconds", "_bytes", "_share", "_ratio", "_steps", "_rows", "_tokens", "steps")
COUNTS = (
    "leases_granted",
    "leases_held",
    "groups_put",
    "groups_ready",
    "producers_seen",
    "leases_refused",
    "fenced_calls",
    "cache_hits",
    "cache_misses",
)


def test_names_end_in_their_unit_and_tags_are_few() -> None:
    assert len(BY_NAME) == len(TABLE)
    for metric in TABLE:
        assert metric.name.endswith(UNITS) or metric.name in COUNTS, metric.name
        assert set(metric.tags) <= {"server", "role", "source"}, metric.name
        assert ("team" in metric.all_tags) == ("server" in metric.tags), "teams may use the same server name"
        assert metric.help.endswith(".")


def test_recording_without_ray_neither_imports_it_nor_fails() -> None:
    code = (
        "import sys; from raysvc.metrics import record;"
        "[record('cache_hits', 1, source='x') for _ in range(1000)]; record('padding_share', 0.5, server='s');"
        "from raysvc import metrics; assert len(metrics._early) == metrics.KEPT; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_name_or_tag_is_found_at_once() -> None:
    with pytest.raises(KeyError):
        record("stall", 1.0, server="a")
    with pytest.raises(AssertionError, match="has the tags"):
        record("stall_seconds", 1.0, server="a")


def test_later_records_are_summed_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from raysvc import metrics

    written: list[tuple[str, float]] = []
    monkeypatch.setattr(metrics, "_early", [])  # what other tests recorded before they had a Ray
    monkeypatch.setattr(metrics, "_connected", lambda: True)
    monkeypatch.setattr(metrics, "_write", lambda metric, value, tags: written.append((metric.name, value)))
    later = metrics.LaterRecords()
    for number in (1.0, 2.0):
        later.record("steps", number, server="a")
        later.record("padding_share", number / 4, server="a")
        later.record("step_seconds", number, server="a")
    assert not written, "the loop gives nothing to Ray"
    later.write()
    later.write()
    assert written == [("steps", 3.0), ("padding_share", 0.5), ("step_seconds", 1.0), ("step_seconds", 2.0)]


def test_what_is_recorded_of_a_server_says_its_team(monkeypatch: pytest.MonkeyPatch) -> None:
    from raysvc import metrics

    written: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(metrics, "_early", [])
    monkeypatch.setattr(metrics, "_connected", lambda: True)
    monkeypatch.setattr(metrics, "_write", lambda metric, value, tags: written.append((metric.name, tags)))
    monkeypatch.setattr(metrics, "_server_team", None)
    monkeypatch.delenv("RAYSVC_TEAM", raising=False)
    record("leases_held", 1, server="a")
    monkeypatch.setenv("RAYSVC_TEAM", "search")
    record("leases_held", 1, server="a")
    record("cache_hits", 1, source="rows.jsonl")  # entries belong to everybody
    later = metrics.LaterRecords()
    later.record("steps", 1, server="a")
    later.write()
    monkeypatch.setattr(metrics, "_server_team", "ads")  # the process of a server, wherever it was started
    record("leases_held", 1, server="a")
    assert written == [
        ("leases_held", {"server": "a", "team": ""}),
        ("leases_held", {"server": "a", "team": "search"}),
        ("cache_hits", {"source": "rows.jsonl"}),
        ("steps", {"server": "a", "team": "search"}),
        ("leases_held", {"server": "a", "team": "ads"}),
    ]


def test_every_record_in_the_code_is_one_of_the_table() -> None:
    found = set()
    for room in ("raysvc", "actors", "pipelines"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                called = getattr(node, "func", None)
                is_record = "record" in (getattr(called, "id", ""), getattr(called, "attr", ""))
                if isinstance(node, ast.Call) and is_record and node.args and node.keywords:
                    name = getattr(node.args[0], "value", None)
                    assert name in BY_NAME, f"{path}: {name}"
                    assert {word.arg for word in node.keywords} == set(BY_NAME[str(name)].tags), (
                        f"{path}: {name}"
                    )
                    found.add(name)
    assert {"cache_hits", "stall_seconds", "build_rows"} <= found


RUN = (
    READ
    + """
import json, os, sys, time, urllib.request
import ray, raysvc
from tests.patience import wait_longer_for_nodes

wait_longer_for_nodes()
ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR",
         log_to_driver=False, _system_config={"metrics_report_interval_ms": 500})
(node,) = ray.nodes()
url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

wanted = set(json.loads(sys.argv[2]))
texts = []
seen = {}  # newest value of each series; those of a process that ended vanish after a while

def scrape():
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            texts.append(answer.read().decode())
    except OSError:
        return set()
    now = samples(texts[-1])
    seen.update({(name, json.dumps(labels, sort_keys=True)): [name, labels, value] for name, labels, value in now})
    return {name for name, _, _ in now}

during = set()
last_of_training = []
def progress(tick):
    if tick.phase == "train":
        late = time.monotonic() + 60  # the run waits until it is seen, however late the reports are
        during.update(scrape())
        while not any(name.startswith("ray_raysvc_build_rows") for name in during) and time.monotonic() < late:
            time.sleep(0.2)
            during.update(scrape())
        last_of_training[:] = samples(texts[-1]) if texts else []

summary = raysvc.train(sys.argv[1], progress=progress).metrics

def arrived():
    scrape()
    names, counts = {name for name, _ in seen}, {name: value for name, _, value in seen.values()}
    pairs = {"ray_raysvc_steps_total": summary["steps"], "ray_raysvc_trained_tokens_total": summary["tokens_trained"]}
    return wanted <= names and all(counts.get(name) == value for name, value in pairs.items())

import numpy as np
held = [ray.put(np.ones(30 << 20, np.uint8)) for _ in range(5)]  # more than the store holds: Ray spills

def spilled():
    labels = [(labels, value) for name, labels, value in seen.values() if name == "ray_spill_manager_objects_bytes"]
    return sum(value for label, value in labels if label["State"] == "Spilled")

until = time.monotonic() + 200  # reports come every half second
while not (arrived() and spilled()) and time.monotonic() < until:
    time.sleep(0.2)
entry = raysvc.tokenize(sys.argv[1])
row_counts = {**entry.report["row_counts"], "short": int((entry.rows.lengths() <= 80).sum())}
mine = [sample for sample in seen.values() if sample[0].startswith("ray_raysvc_")]
print(json.dumps({"mine": mine, "last": last_of_training, "during": sorted(during), "all": sorted({name for name, _ in seen}),
                  "summary": summary, "spilled": spilled(), "row_counts": row_counts}), flush=True)
"""
)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prometheus_endpoint_has_them_during_a_run(tmp_path: Path, sample: dict[str, str]) -> None:
    bad = tmp_path / "rows.jsonl"
    rows = Path(sample["rows"]).read_text()
    bad.write_text(rows + '{"messages": "not a conversation"}\n')
    job = {
        "source": {"path": str(bad), "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "max_quarantine": 0.1,
        "max_length": 100,  # the longest rows have more
        "truncation": "keep_start",
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "micro_batch_tokens": 80, "oversize": "truncate"},
        "server": {"name": "measured"},
        "trainer": {"dp_size": 2, "run_dir": str(tmp_path / "run")},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    # what every run has; hits, refusals, fenced calls and stalls by cause need their event
    seldom = {"cache_hits", "leases_refused", "fenced_calls", "dropped_rows"}
    seldom |= {"groups_put", "groups_ready", "producers_seen", "producer_wait_seconds"}
    seldom |= {f"stall_{part}_seconds" for part in PARTS} | {
        metric.name for metric in TABLE if "eval" in metric.name
    }
    needed = [metric for metric in TABLE if metric.name not in seldom]
    wanted = [metric.exported + ("_count" if metric.kind == "histogram" else "") for metric in needed]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), json.dumps(wanted)],
        capture_output=True, text=True, check=False, timeout=580, env={**os.environ, "PYTHONPATH": str(ROOT), "RAYSVC_TEAM": "search"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])

    names = {name for name, _, _ in found["mine"]}
    assert set(wanted) <= names
    known = {metric.exported for metric in TABLE if metric.kind != "histogram"}
    known |= {
        f"{m.exported}{end}" for m in TABLE if m.kind == "histogram" for end in ("_bucket", "_sum", "_count")
    }
    assert names <= known, "an exported name that the dashboard's test does not know"
    assert any(name.startswith("ray_raysvc_build_rows") for name in found["during"]), (
        "only seen after the run"
    )
    assert found["spilled"] >= 30 << 20
    board = json.loads((ROOT / "deploy" / "grafana" / "raysvc.json").read_text())
    asked = json.dumps(board) + (ROOT / "deploy" / "alerts.yml").read_text()
    of_ray = {name for name in re.findall(r"\bray_\w+", asked) if not name.startswith("ray_raysvc_")}
    assert of_ray - {"ray_io_cluster"} <= set(found["all"]), "a name that this Ray does not export"
    assert SPILLED in asked

    totals = {name: sum(value for n, _, value in found["mine"] if n == name) for name in names}
    assert (
        totals["ray_raysvc_steps_total"]
        == found["summary"]["steps"]
        == -(-found["row_counts"]["rows_written"] // 16)
    )
    assert totals["ray_raysvc_build_rows_total"] == 241
    assert totals["ray_raysvc_quarantined_rows_total"] == 1
    row_counts = found["row_counts"]
    assert totals["ray_raysvc_truncated_rows_total"] == row_counts["rows_truncated"] > 0
    assert (
        totals["ray_raysvc_truncated_tokens_total"]
        == row_counts["tokens_truncated"]
        > row_counts["rows_truncated"]
    )
    assert totals["ray_raysvc_cut_rows_total"] == found["summary"]["rows"] - row_counts["short"] > 0
    assert totals["ray_raysvc_trained_tokens_total"] == found["summary"]["tokens_trained"]
    (tags,) = [labels for name, labels, _ in found["mine"] if name == "ray_raysvc_stall_seconds_total"]
    assert (tags["server"], tags["role"]) == ("measured", "trainer")
    teams = {labels["team"] for _, labels, _ in found["mine"] if "server" in labels}
    assert teams == {"search"}, "from the trainer and from the server's own process"
    kept = {name for name, _, _ in found["last"]}
    assert {"ray_raysvc_planned_steps", "ray_raysvc_leases_held"} <= kept, (
        "Ray forgets a gauge that is not set again"
    )
    (source,) = [
        labels["source"] for name, labels, _ in found["mine"] if name == "ray_raysvc_build_rows_total"
    ]
    assert source == "rows.jsonl"
    assert found["summary"]["stalls"]["seconds"] >= 0
