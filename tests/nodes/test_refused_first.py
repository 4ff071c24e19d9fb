"""What no node can hold is refused before a row is tokenized, and named again while nodes may come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

import raysvc
from raysvc.actors import launch
from raysvc.actors.dispatch import worker_places
from raysvc.errors import ConfigError
from raysvc.nodes.room import not_free

COLUMNS = {"enrich": {"ref_logprobs": {}}, "trainer": {"device": "cuda"}}
LARGE: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "server": (raysvc.serve, {"server": {"num_cpus": 16}}, r"server.num_cpus: needs 16 CPU, the cluster has 4"),
    "node": (
        raysvc.serve,
        {"server": {"num_cpus": 16, "placement": "data"}},
        r"server.placement: .* needs 16 CPU, that node has 4",
    ),
    "ranks": (raysvc.train, {"trainer": {"dp_size": 16}}, r"trainer and the server: needs 8.5 CPU, the cluster has 4"),
    "GPUs": (raysvc.train, {"trainer": {"device": "cuda"}}, r"trainer and the server: needs 1 GPU, the cluster has 0"),
    "columns": (raysvc.enrich, COLUMNS, r"trainer.device: needs 1 GPU, the cluster has 0"),
    "served columns": (raysvc.serve, COLUMNS, r"trainer.device: needs 1 GPU, the cluster has 0"),
    "columns of a windowed job": (
        raysvc.serve,
        {**COLUMNS, "plan": {"batch_size": 4, "shuffle": "window"}},
        r"trainer.device: needs 1 GPU, the cluster has 0",
    ),
    "a model": (raysvc.enrich, {"enrich": {"teacher": {"model": "/none"}}}, r"there is no folder /none"),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_what_no_node_can_hold_is_refused_before_a_row_is_tokenized(
    name: str, tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    call, sections, text = LARGE[name]
    job = {
        "source": {"path": sample["rows"]},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 4},
        **sections,
    }
    job["trainer"] = {"run_dir": str(tmp_path / "run"), **sections.get("trainer", {})}
    with pytest.raises(ConfigError, match=text):
        call(job)
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_large_columns_of_rows_that_are_there_are_refused_before_other_rows_are_tokenized(
    tmp_path: Path, sample: dict[str, str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := tmp_path / "other.jsonl").write_text(Path(sample["rows"]).read_text().partition("\n")[0])
    job: dict[str, Any] = {"tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "cache")}}
    raysvc.tokenize(job, source={"path": sample["rows"]})
    there = list((tmp_path / "cache").rglob("*.arrow"))
    paths = {"first": str(other), "second": sample["rows"]}
    sources = {name: {"source": {"path": path}, "weight": 1} for name, path in paths.items()}
    monkeypatch.setattr("raysvc.scoring.before_rows.CLUSTER_S", 0.0)
    with pytest.raises(ConfigError, match="workers: needs 16 CPU, they have 4"):
        raysvc.enrich(
            job, mixture={"sources": sources}, enrich={"ref_logprobs": {}}, workers={"num_cpus": 16}
        )
    assert list((tmp_path / "cache").rglob("*.arrow")) == there


def test_columns_that_are_there_need_no_cluster(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        "source": {"path": sample["rows"]},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "enrich": {"ref_logprobs": {}},
    }
    computed = raysvc.enrich(job, trainer={"device": "cpu"})
    monkeypatch.setattr("raysvc.cluster.connect", lambda *_, **__: pytest.fail("a hit joined a cluster"))
    assert raysvc.enrich(job, trainer={"device": "cuda"}).uri == computed.uri


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the two that wait have said; a thread of an earlier test may say something, too."""
    waiting = {launch.__name__, worker_places.__name__}
    return [each.getMessage() for each in caplog.records if each.name in waiting]


def test_a_wait_names_again_what_the_cluster_lacks(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(launch, "REPORT_EVERY_S", 0.1)
    monkeypatch.setattr(worker_places, "REPORT_EVERY_S", 0.1)
    waiting = ray.remote(num_cpus=16)(lambda: None).remote()
    with pytest.raises(TimeoutError):
        launch.wait_for(waiting, "it", 2.0, lacks=lambda: "needs 16 CPU")
    ray.cancel(waiting)
    assert len(told(caplog)) > 1
    assert all(message.endswith(" s: needs 16 CPU") for message in told(caplog))

    caplog.clear()
    reserved = placement_group([{"CPU": 9.0}])
    thread = threading.Thread(target=worker_places.wait_for_places, args=(reserved,))
    thread.start()
    until = time.monotonic() + 100
    while len(told(caplog)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    remove_placement_group(reserved)
    thread.join(100)
    assert not thread.is_alive(), "places that were removed are not waited for"
    assert [message.endswith(" s: needs 9 CPU, the cluster has 4") for message in told(caplog)[:2]] == [
        True
    ] * 2


def test_a_wait_speaks_of_resources_only_where_they_are_missing(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(launch, "REPORT_EVERY_S", 0.1)
    launch.wait_for(ray.remote(num_cpus=0)(lambda: time.sleep(1.0)).remote(), "server 'x' to start")
    assert {message.partition(" since ")[0] for message in told(caplog)} == {
        "waiting for server 'x' to start"
    }
    assert not [message for message in told(caplog) if "CPU" in message]

    until = time.monotonic() + 100
    while (
        not_free([{"CPU": 4.0}]) is not None
    ):  # what another test had is free a little later, as Ray tells it
        assert time.monotonic() < until
        time.sleep(0.05)
    held = placement_group([{"CPU": 3.0}])
    ray.get(held.ready(), timeout=100)
    until = time.monotonic() + 100
    while not_free([{"CPU": 2.0}]) is None and time.monotonic() < until:
        time.sleep(0.05)  # Ray tells what is free a little later
    assert not_free([{"CPU": 2.0}]) == "needs 2 CPU, and 1 of 4 is free"
    assert not_free([{"CPU": 1.0}]) is None
    remove_placement_group(held)
