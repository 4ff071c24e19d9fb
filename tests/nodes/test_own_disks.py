"""A cluster whose second node has a disk of its own: what is refused before the work begins, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEN = {
    "root": "cache.root",
    "rows": "source.path",
    "tokenizer": "tokenizer",
    "model": "enrich",
    "serve": "trainer.run_dir",
    "train": "trainer.run_dir",
    "evals": "evals.held.source.path",
    "rollouts": "serve_rollouts(run_dir)",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_node_does_not_see_is_refused_before_the_work_in_one_shape(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    may = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if os.getuid() != 0 or may.returncode != 0:
        pytest.skip("needs the right to make mount namespaces")
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("own_disks.py")),
            sample["rows"],
            sample["tokenizer"],
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    for place, key in SEEN.items():
        text = told[place]["told"]
        assert text.startswith(f"NodeError: {key} {tmp_path}/own/"), text
        assert ": node " in text
        assert "does not see" in text
        assert text.endswith("; every node must see it; use a shared folder or s3://")
    assert "no node has zone=mars; nodes have zone=far, zone=near" in told["labels"]["told"]
    assert "wait_for_nodes" in told["labels"]["told"]
    assert told["built"] == [], "no row was tokenized before all of that was said"
    assert told["shared"]["told"] == 240, "what all see is built"
    assert told["warm"]["seconds"] < max(0.5, 20 * told["task"]["seconds"]), (
        "some tasks that do next to nothing"
    )
    assert told["left"] == [], "no file of a trial stays"
    lines = told["cli"]["lines"]
    assert told["cli"]["code"] == 2
    assert [line for line in lines if not line.startswith(("[tokenize]", "error: source.path"))] == [], (
        "no line of Ray itself"
    )
