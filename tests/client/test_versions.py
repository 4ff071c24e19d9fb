"""Clients and servers of several versions: who works together, who is refused, and an upgrade under a trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.actors.versions import HERE, WIRE, Side, check_versions_meet
from raysvc.client.arguments import meet
from raysvc.errors import VersionMismatch

ROOT = Path(__file__).parents[2]
NEWER_PATCH, NEWER_MINOR = "0.1.99", "0.2.0"


@pytest.mark.parametrize(
    ("client", "server", "works"),
    [
        ("0.1.0", "0.1.7", True),
        ("0.1.7", "0.1.0", True),
        ("0.1.0", "0.2.0", False),
        ("0.2.0", "0.1.0", False),
        ("1.1.0", "0.1.0", False),
        ("0.1.0", "0.10.0", False),
    ],
)
def test_within_a_minor_version_they_work_and_else_not(client: str, server: str, works: bool) -> None:
    if works:
        check_versions_meet("a", Side(client, WIRE), Side(server, WIRE))
        return
    with pytest.raises(
        VersionMismatch, match=f"pip install raysvc=={server}` where you train, or `raysvc stop a`"
    ):
        check_versions_meet("a", Side(client, WIRE), Side(server, WIRE))


def test_another_wire_format_is_refused_within_a_minor_version() -> None:
    with pytest.raises(VersionMismatch):
        check_versions_meet("a", HERE, HERE._replace(wire=WIRE + 1))


def test_a_server_that_cannot_say_is_older() -> None:
    with pytest.raises(VersionMismatch, match=r"an older version.*raysvc stop a"):
        meet(SimpleNamespace(), "a")


def package(folder: Path, version: str) -> Path:
    """A copy of the package that says another version."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "raysvc", folder / "raysvc", ignore=ignored)  # what the links lead to, too
    init = folder / "raysvc" / "__init__.py"
    init.write_text(init.read_text().replace(f'__version__ = "{HERE.version}"', f'__version__ = "{version}"'))
    return folder


SERVE = """
import json, sys
import ray, raysvc
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
raysvc.serve(sys.argv[3], detached=True)
print(raysvc.__version__)
"""
ATTACH = """
import sys
import ray, raysvc
ray.init(address=sys.argv[1], log_to_driver=False)
try:
    with raysvc.attach("old-server") as client:
        client.rewind(0)
        client.commit(next(iter(client)).index)
        print("trained", raysvc.__version__)
except raysvc.errors.VersionMismatch as error:
    print(error)
"""


def run(code: str, path: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=280, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_is_upgraded_under_a_running_trainer(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import ray

    import raysvc
    from raysvc.actors.launch import find_server, restart_server, stop_server

    job: dict[str, Any] = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": "old-server"},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }
    raysvc.tokenize(job)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    old, patch, minor = (tmp_path / name for name in ("old", "patch", "minor"))
    package(old, HERE.version), package(patch, NEWER_PATCH), package(minor, NEWER_MINOR)
    installed = tmp_path / "installed"
    installed.symlink_to(old)
    address = ray.get_runtime_context().gcs_address
    assert run(SERVE, installed, address, str(installed), str(tmp_path / "job.yaml")) == HERE.version
    try:
        assert run(ATTACH, patch, address) == f"trained {NEWER_PATCH}", "a newer client, an older server"
        refused = run(ATTACH, minor, address)
        assert f"runs raysvc {HERE.version} and this client {NEWER_MINOR}" in refused
        with raysvc.attach("old-server") as client:
            steps = iter(client)
            first = next(steps)
            client.commit(first.index)
            installed.unlink()
            installed.symlink_to(patch)
            assert restart_server("old-server") == NEWER_PATCH
            indices = []
            for step in steps:
                ray.get(list(step.mini_batches[0].shards))
                client.commit(step.index)
                indices.append(step.index)
            assert indices == list(range(first.index + 1, 15)), "the trainer noticed nothing"
            facts = ray.get(find_server("old-server").stats.remote())
            assert facts["version"] == NEWER_PATCH
        assert run(ATTACH, old, address) == f"trained {HERE.version}", "an older client, a newer server"
    finally:
        stop_server("old-server")
