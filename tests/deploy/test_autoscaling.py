"""Tokenizing asks for nodes and gives them back; verified with Ray's autoscaler and nodes that are processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .machines import NAMESPACES

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
LAB = Path(__file__).with_name("autoscaling_lab.py")
NETWORK = (
    "ip link set lo up; ip link add v0 type veth peer name v1; ip addr add 10.88.0.1/24 dev v0;"
    "ip link set v0 up; ip link set v1 up; ip route add default via 10.88.0.2;"
)


def namespaces_missing() -> str | None:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "unshare or ip is not installed"
    done = subprocess.run([*NAMESPACES, "bash", "-ec", NETWORK], capture_output=True, text=True, check=False)
    return f"no namespaces here: {done.stderr.strip()[:100]}" if done.returncode else None


def test_a_build_takes_nodes_loses_one_and_gives_all_back(tmp_path: Path, sample: dict[str, str]) -> None:
    missing = namespaces_missing()
    if missing:
        pytest.skip(missing)
    command = [sys.executable, str(LAB), sample["rows"], sample["tokenizer"], str(tmp_path)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = tempfile.mkdtemp(
        prefix="ra", dir="/tmp"
    )  # /tmp/ray holds one "current cluster" for the whole machine
    done = subprocess.run(
        [*NAMESPACES, "bash", "-ec", f'{NETWORK} exec "$@"', "_", *command],
        capture_output=True, text=True, check=False, timeout=380, env={**os.environ, "PATH": path, "RAY_TMPDIR": own, "AUTOSCALER_UPDATE_INTERVAL_S": "1"},
    )  # fmt: skip
    shutil.rmtree(own, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["pools"][0] == found["pools"][-1] == [], found
    assert ["data", "data"] in found["pools"], found
    assert not any("gpu" in pools for pools in found["pools"]), found

    assert len(found["killed"]) == 1, found
    assert found["rows"] == 240
    # a slice that is done again leaves a second part: the dead node had one slice in work
    assert found["slices"] <= found["parts"] <= found["slices"] + 1, found

    assert found["while_serving"], "the server ran on a node of its own"
