"""Of what peers of a mesh share, each node gets one copy over the network, by Ray's own counters of the nodes' stores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_node_gets_what_its_ranks_need_once_and_the_steps_say_so() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "mesh_bytes.py"
    command = [sys.executable, str(script), "--steps", "3", "--cases", "2", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["mesh"] for row in rows] == ["dp=2, tp=4", "dp=2, tp=2, cp=2"]
    for row, peers in zip(rows, (4, 2), strict=True):
        assert row["ranks"] == pytest.approx(peers * row["needed"], rel=0.01), (
            "each rank takes all of its own"
        )
        assert row["node"] == pytest.approx(row["needed"], rel=0.05)
        assert row["told"] == pytest.approx(row["needed"], rel=0.001)
