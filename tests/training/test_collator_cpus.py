"""Collators and ranks of a run without a cluster: no more than the machine has CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.errors import ConfigError


def job(sample: dict[str, str], tmp_path: Path, collators: int = 0, ranks: int = 1) -> dict[str, Any]:
    return {
        "source": {"path": sample["rows"]},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 4},
        "server": {"collators": collators},
        "trainer": {"dp_size": ranks, "model": "tiny", "run_dir": str(tmp_path / "run")},
    }


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"collators": 4}, r"server\.collators: 4 processes .* has 3; at most 3"),
        ({"ranks": 16}, r"trainer\.dp_size: 16 ranks and the server hold [89]\S* CPUs, .* has 3; give fewer"),
    ],
)
def test_more_processes_than_cpus_are_refused_before_anything_is_built(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], told: str
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with pytest.raises(ConfigError, match=told):
        raysvc.train(job(sample, tmp_path, **asked))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_cluster_is_asked_for_as_many_as_are_wanted(
    tmp_path: Path, sample: dict[str, str], address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.job.job_file import load_job
    from raysvc.training.train import _check_cpus

    monkeypatch.setattr("ray.is_initialized", lambda: address is None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    _check_cpus(load_job(job(sample, tmp_path, 64, 64)), address)


def test_two_ranks_run_on_one_cpu(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.job.job_file import load_job
    from raysvc.training.train import _check_cpus

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    _check_cpus(load_job(job(sample, tmp_path, ranks=2)), None)
