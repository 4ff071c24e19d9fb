"""benchmarks/scale_ranks.py at its size: 1e10 rows and 4,096 ranks, with the planner and the stream of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale_ranks.py"


@pytest.mark.slow
def test_4096_ranks_get_the_same_of_1e10_rows_whatever_becomes_of_builders_and_servers(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(SCRIPT), "--one", str(tmp_path), "--ranks", "4096"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (found["rows"], found["slices"], found["ranks"]) == ("1e+10", 20_000, 4096)
    assert found["same"]
    assert found["steps compared"] == 20
    assert found["deaths"] > 10
    assert found["servers"] > 3
    assert found["own MB"] < 1000
