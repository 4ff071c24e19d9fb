"""`raysvc doctor`: each check finds what it is there for, and says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.inspect.examine import (
    check_auth,
    check_clock_skew,
    check_look_ahead,
    check_shm,
    check_versions,
    examine,
)
from raysvc.inspect.node_checks import (
    check_access,
    check_answers,
    check_node_gpus,
    check_node_shm,
    check_packages,
)
from raysvc.inspect.node_facts import NodeFacts, facts_of_this_node
from raysvc.nodes.place import SharedFolder

GB = 10**9


def test_old_or_mixed_versions_fail() -> None:
    assert check_versions((3, 11, 7), "2.60.0", ["2.60.0", ""]).state == "ok"
    assert check_versions((3, 10, 1), "2.60.0").state == "fail"
    assert check_versions((3, 11, 7), "2.9.3").state == "fail"
    mixed = check_versions((3, 11, 7), "2.60.0", ["2.60.0", "2.61.0"])
    assert (mixed.state, mixed.remedy) == ("fail", "use one image for all nodes")


@pytest.mark.parametrize(
    ("environment", "mode", "state", "remedy"),
    [
        ({"RAY_AUTH_MODE": "token"}, 0o600, "ok", ""),
        ({"RAY_AUTH_MODE": "token"}, 0o644, "warn", "chmod 600"),
        ({"RAY_AUTH_MODE": "token"}, None, "fail", "ray get-auth-token --generate"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "hush"}, None, "ok", ""),
        ({"RAY_AUTH_MODE": "disabled"}, 0o600, "warn", "RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "tokens"}, 0o600, "fail", "set it to token"),
        ({}, 0o600, "warn", "RAY_AUTH_MODE=token"),
        ({}, None, "warn", "ray get-auth-token --generate"),
    ],
)
def test_authentication_is_judged_and_the_token_is_never_shown(
    tmp_path: Path, environment: dict[str, str], mode: int | None, state: str, remedy: str
) -> None:
    token = tmp_path / "auth_token"
    if mode is not None:
        token.write_text("hush")
        token.chmod(mode)
    found = check_auth(environment, token)
    assert found.state == state
    assert remedy in found.remedy
    assert bool(found.remedy) == (state != "ok")
    assert "hush" not in found.what + found.remedy


def test_shared_memory_of_a_container_is_too_small() -> None:
    assert check_shm(30 * GB, 100 * GB).state == "ok"
    small = check_shm(64 << 20, 100 * GB)
    assert (small.state, "--shm-size=27g" in small.remedy) == ("warn", True)
    assert check_shm(None, 100 * GB).state == "skip"


def test_a_look_ahead_that_does_not_fit_the_object_store_fails() -> None:
    assert [check_look_ahead(need, 10 * GB, 2).state for need in (GB, 6 * GB, 11 * GB)] == [
        "ok",
        "warn",
        "fail",
    ]


def test_a_clock_that_is_off_is_named() -> None:
    assert check_clock_skew({"a": 0.01, "b": -0.2}).state == "ok"
    off = check_clock_skew({"a": 0.01, "b": -7.5})
    assert (off.state, off.what) == ("warn", "b is off by -7.5 s")


def node(**changed: Any) -> NodeFacts:
    facts = NodeFacts({"Python": "3.11", "raysvc": "0.1.0"}, 30 * GB, 64 * GB, None, None, {})
    return facts._replace(**changed)


def test_a_node_with_another_package_is_named() -> None:
    other = node(versions={"Python": "3.11", "raysvc": ""})
    found = check_packages({"a": node(), "b": other}, node().versions)
    assert (found.state, found.what) == ("fail", "raysvc absent on b, 0.1.0 here")
    assert check_packages({"a": node()}, node().versions).state == "ok"


def test_a_node_that_does_not_answer_is_a_finding() -> None:
    found = check_answers({"a": node()}, {"b": "ModuleNotFoundError: No module named 'raysvc'"})
    assert (found.state, found.what) == ("fail", "b: ModuleNotFoundError: No module named 'raysvc'")


def test_shared_memory_of_one_node_is_too_small() -> None:
    found = check_node_shm({"a": node(), "b": node(shm_bytes=64 << 20)})
    assert (found.state, found.what) == ("warn", "b: 0.1 GB for 64.0 GB")
    assert "--shm-size=17g" in found.remedy


@pytest.mark.parametrize(
    ("seen", "cuda", "given", "device", "state"),
    [
        (None, None, 0, "auto", "skip"),
        (None, None, 0, "cuda", "fail"),
        (8, "12.8", 8, "cuda", "ok"),
        (8, None, 8, "auto", "fail"),
        (7, "12.8", 8, "auto", "fail"),
        (8, "12.8", 0, "auto", "warn"),
    ],
)
def test_driver_torch_and_ray_agree_about_gpus(
    seen: int | None, cuda: str | None, given: float, device: str, state: str
) -> None:
    found = check_node_gpus({"a": node(num_gpus=seen, cuda=cuda)}, {"a": given}, device)
    assert (found.state, bool(found.remedy)) == (state, state in ("warn", "fail"))


def test_a_folder_that_a_node_does_not_share_is_found(tmp_path: Path) -> None:
    place = SharedFolder.open("cache.root", str(tmp_path / "not" / "there"), {})
    assert facts_of_this_node("n", (place,)).access == {"cache.root": ""}
    assert place.try_here("n") == ""
    place.close()
    access = facts_of_this_node("n", (place,)).access  # as a node that has another disk
    assert list(tmp_path.iterdir()) == []
    found = check_access("cache.root", "/cache", {"b": node(access=access)})
    assert (found.state, found.what) == (
        "fail", "/cache: b does not see a file that this machine wrote there",
    )  # fmt: skip
    assert "every node must see it" in found.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    place = SharedFolder.open("cache.root", str(tmp_path), {})
    tmp_path.chmod(0o555)
    assert "cannot be written" in facts_of_this_node("n", (place,)).access["cache.root"]


def test_the_address_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.is_initialized", bool)
    found = {finding.check: finding for finding in examine()}
    assert found["cluster"].state == "fail"
    assert (found["nodes"].state, found["clock"].state) == ("skip", "skip")
    assert found["nodes"].what == "the cluster does not answer"
    monkeypatch.delenv("RAY_ADDRESS")
    assert "no cluster given" in {finding.check: finding for finding in examine()}["nodes"].what


def run(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    findings = json.loads(result.stdout.splitlines()[-1])["findings"]
    return result.exit_code, {finding["check"]: finding for finding in findings}


@pytest.mark.ray
def test_a_job_and_its_cluster_are_checked(tmp_path: Path, sample: dict[str, str], ray_session: None) -> None:
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    code, found = run("-c", str(path))
    assert (code, found["cluster"]["state"], found["clock"]["state"]) == (0, "ok", "ok")
    assert (found["cache store"]["state"], found["tokenizer"]["state"]) == ("ok", "ok")
    for check in ("nodes", "packages of nodes", "cache.root on nodes", "trainer.run_dir on nodes"):
        assert found[check]["state"] == "ok", found[check]
    assert not [name for name in tmp_path.rglob("*") if "doctor" in name.name], "nothing stays"
    assert found["object store"]["state"] == "skip"

    import raysvc

    raysvc.tokenize(path)
    _, found = run("-c", str(path))
    assert found["object store"]["state"] == "ok"

    code, found = run("-c", str(path), f"cache.root={path}/cache", "tokenizer.name=/not/there")
    assert code == 1
    for check in ("cache store", "tokenizer"):
        assert found[check]["state"] == "fail"
        assert found[check]["remedy"]
    plain = CliRunner().invoke(app, ["doctor", "-c", str(path)])
    assert "[ok  ] tokenizer" in plain.stdout
