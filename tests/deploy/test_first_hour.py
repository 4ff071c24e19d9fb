"""The first hour on a cluster without a worker: one job.yaml, submitted; machines come, one is lost, all go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .machines import LAY, NAMESPACES

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("first_hour.py")
ROWS = 30_000


def test_one_submitted_job_brings_machines_loses_one_trains_and_leaves_none() -> None:
    may = subprocess.run([*NAMESPACES, "bash", "-ec", LAY], capture_output=True, check=False)
    if os.getuid() != 0 or may.returncode != 0:
        pytest.skip("needs the right to make namespaces")
    command = [sys.executable, str(SCRIPT), str(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=480)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads(done.stdout.splitlines()[-1])
    lines, seen = found["lines"], found["seen"]
    assert found["code"] == 0, done.stdout[-3000:]

    assert seen[0] == seen[-1] == [], "no machine before and after"
    assert max(map(len, seen)) >= 2
    assert found["killed"], "a machine was powered off in mid-build"
    assert any("waiting for more nodes: needs 1 CPU" in line for line in lines), "it says what it waits for"
    assert not [line for line in lines if "retries remaining" in line or "Traceback" in line]

    summary = json.loads(next(line for line in lines if line.startswith("{")))
    assert summary["cache"]["hit"] is False
    assert summary["steps"] == 10
    assert found["source_rows"] == list(range(ROWS)), "each row once"
