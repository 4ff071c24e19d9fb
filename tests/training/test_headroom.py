"""`raysvc train --headroom`: what is measured, and that nothing of the run is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.training.headroom import Headroom


def test_the_verdict_says_whether_data_is_the_limit() -> None:
    slow = Headroom(first_step=2, steps=10, tokens=5000, real_s=2.0, perfect_s=1.5)
    assert slow.share_lost == 0.25
    assert slow.verdict().startswith(
        "data costs 25.0% of the time: 3,333 tokens/s with a perfect loader, 2,500"
    )
    assert slow.to_json()["perfect"] == {"seconds": 1.5, "steps_per_s": 6.667, "tokens_per_s": 3333.3}
    even = Headroom(first_step=2, steps=10, tokens=5000, real_s=2.0, perfect_s=2.1)
    assert (even.share_lost, even.verdict().split(":")[0]) == (0.0, "data is not the limit")


@pytest.mark.slow
@pytest.mark.ray
def test_it_measures_after_a_run_and_leaves_the_run_as_it_was(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.actors.launch import server_names

    job = tmp_path / "job.yaml"
    sections = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "mini_batch_size": 8, "micro_batch_tokens": 1024},
        "server": {"name": "measured"},
        "trainer": {"dp_size": 2, "run_dir": str(tmp_path / "run"), "max_steps": 3},
    }
    job.write_text(yaml.safe_dump(sections))
    raysvc.train(job)
    before = contents(tmp_path / "run")

    result = CliRunner().invoke(app, ["train", "-c", str(job), "--headroom", "4", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["first_step"], found["steps"]) == (3 + 2, 4), "from the checkpoint on, after two to warm up"
    assert found["real"]["seconds"] > 0
    assert found["perfect"]["seconds"] > 0
    assert found["perfect_wait_s"] == 0, "shards were not there"
    plan = [
        json.loads(CliRunner().invoke(app, ["plan", "-c", str(job), "--step", str(step), "--json"]).stdout)
        for step in range(5, 9)
    ]
    entry = raysvc.tokenize(job)
    rows = [row["row_id"] for step in plan for row in step["rows"]]
    assert found["tokens"] == sum(sum(entry.row(row)["loss_mask"]) for row in rows)

    assert contents(tmp_path / "run") == before
    assert not [name for name in server_names() if name.startswith("measured")]
    assert CliRunner().invoke(app, ["train", "-c", str(job), "--headroom", "14"]).exit_code == 2


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
