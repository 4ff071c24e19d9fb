"""Runs on a source that is followed: rows arrive while they train, and whoever may be killed is."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysvc.cli.main import app
from raysvc.job.job_file import load_job
from raysvc.row_ids import parse

from .test_follow import job_of, lines, steps_of
from .test_windowed_job import run_json, runner

RUN = """
import os, signal, sys
import ray, raysvc
from raysvc.actors.launch import find_server
steps = []
def stop():
    steps.append(1)
    if sys.argv[2] == "trainer" and len(steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "server" and len(steps) == 3:
        ray.kill(find_server("followed"), no_restart=False)
    return False
print(raysvc.train(sys.argv[1], should_stop=stop).metrics["steps"])
"""


def job_file(folder: Path, sample: dict[str, str], run: str, **sections: Any) -> Path:
    trainer = {"dp_size": 2, "model": "tiny", "run_dir": str(folder / run), "checkpoint_every_steps": 3}
    job = job_of(folder, sample, trainer={**trainer, "max_steps": 14}, **sections)
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_unset=True)))
    return path


def rows_of(folder: Path, run: str) -> list[list[int]]:
    lines = (folder / run / "rows.jsonl").read_text().splitlines()
    return [list(map(parse, json.loads(line)["row_ids"])) for line in lines]


def losses_of(folder: Path, run: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


class Fleet:
    """Appends traces to some files, until there are so many."""

    def __init__(self, folder: Path, count: int, seed: int) -> None:
        self.folder, self.count, self.rng = folder, count, random.Random(seed)
        self.written = self.rng.randint(2, 6)
        folder.mkdir(exist_ok=True)
        (folder / "a.jsonl").write_text(lines(*range(self.written)))
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while self.written < self.count:
            time.sleep(self.rng.uniform(0.1, 1.2))
            text = lines(*range(self.written, self.written + self.rng.randint(1, 6)))
            self.written += text.count("\n")
            cut = self.rng.randrange(len(text))
            with (self.folder / f"{self.rng.choice('abc')}.jsonl").open("a") as file:
                for part in (text[:cut], text[cut:]):  # a line may be there in part
                    file.write(part)
                    file.flush()
                    time.sleep(self.rng.uniform(0, 0.3))


@pytest.mark.slow
def test_kills_of_trainer_server_and_builder_change_no_step_of_a_queue_of_traces(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    """The thread that builds dies with its trainer."""
    fleet = Fleet(tmp_path / "in", 60, seed=1)
    job = job_file(tmp_path, sample, "killed")
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    fleet.thread.start()

    def run(path: Path, what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", RUN, str(path), what]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)

    died = run(job, "trainer")
    assert died.returncode == -signal.SIGKILL, died.stderr
    went_on = run(job, "server")
    assert went_on.returncode == 0, went_on.stderr
    assert went_on.stdout.splitlines()[-1] == "14"
    fleet.thread.join(timeout=60)
    rows = rows_of(tmp_path, "killed")
    undisturbed = steps_of(load_job(job))
    assert [sorted(ids) for ids in rows] == [sorted(ids) for ids, _ in undisturbed[:14]]
    again = run(job_file(tmp_path, sample, "again"), "nobody")  # another run on the same listings
    assert again.returncode == 0, again.stderr
    assert rows_of(tmp_path, "again") == rows
    assert losses_of(tmp_path, "again") == losses_of(tmp_path, "killed")
    shown = run_json("replay", "-c", str(job), "--step", "9")
    assert [one["sha256"] for one in shown["shards"]] == undisturbed[9][1]
    assert [row["row_id"] for row in run_json("plan", "-c", str(job), "--step", "9")["rows"]]
    ls = run_json("cache", "ls", "--root", str(tmp_path / "cache"))
    assert [one["state"] for one in ls["entries"]] == ["followed"]
    refused = runner.invoke(app, ["plan", "-c", str(job)])
    assert refused.exit_code == 2
    assert "has no end" in refused.stderr
