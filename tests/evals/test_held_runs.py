"""Runs that hold rows out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.errors import StateMismatch
from raysvc.evals.held_rows import evaluated_rows
from raysvc.job.job_file import load_job
from raysvc.row_ids import parse
from raysvc.training.run_folder import RunFolder


def held_job(folder: Path, sample: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 16, "epochs": 2, "micro_batch_tokens": 1024},
        "server": {"name": "held"},
        "trainer": {"model": "tiny", "run_dir": str(folder / "held"), "eval_every_steps": 8},
        "evals": {"held": {"share": 0.2}},
        **more,
    }


def test_a_held_out_row_is_evaluated_and_never_trained(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = load_job(held_job(tmp_path, sample))
    summary = raysvc.train(job).metrics
    folder = RunFolder(tmp_path / "held")
    trained = [parse(row) for line in folder.lines(folder.rows) for row in line["row_ids"]]
    held = evaluated_rows(job, raysvc.tokenize(job).entries)
    assert not set(trained) & set(held)
    assert sorted([*trained, *held, *held]) == sorted([*range(240)] * 2)
    evals = list(folder.lines(folder.evals))
    assert [line["rows"] for line in evals] == [len(held)] * len(evals)
    assert len(evals) >= 3
    assert summary["evals"]["held"]["rows"] == len(held)
    assert json.loads((tmp_path / "held" / "job.json").read_bytes())
    other = held_job(tmp_path, sample, evals={"held": {"share": 0.3}})
    with pytest.raises(StateMismatch, match=r"evals\.held\.share was 0\.2 and is 0\.3"):
        raysvc.train(other)
