"""Words that name a run which is not there say which are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raysvc.cli.named_run import run_folder, with_job_named
from raysvc.errors import ConfigError


def runs(here: Path, *names: str) -> None:
    for age, name in enumerate(names):
        (here / name).mkdir(parents=True)
        (here / name / "job.json").touch()
        os.utime(here / name, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize("word", ["nope", "runs/nope", "nope/"])
def test_a_run_that_is_not_there_is_told_with_those_that_are_the_newest_first(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs(tmp_path, "runs/new", "runs/old")
    (tmp_path / "runs" / "notes").mkdir()
    told = r"is no run that is there; runs are new \(runs/new\), old \(runs/old\); name"
    with pytest.raises(ConfigError, match=told):
        with_job_named({"overrides": [word], "config": "job.yaml"}, "job.yaml", True)
    with pytest.raises(ConfigError, match=told):
        with_job_named({"overrides": ["job.yaml", word], "config": "job.yaml"}, "job.yaml", True)


def test_runs_of_the_folder_that_was_named_come_too_and_many_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs(tmp_path, *(f"out/r{n}" for n in range(10)))
    with pytest.raises(ConfigError, match=r"runs are r0 \(out/r0\), .*r7 \(out/r7\) and 2 more"):
        run_folder("out/r10")
    assert run_folder("out/r9") == "out/r9"
    assert run_folder("s3://bucket/r") == "s3://bucket/r"
