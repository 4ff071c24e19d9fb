"""A planted bad source is found by its loss and starved, whatever is killed on the way."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysvc.row_ids import parse, source_base

STEPS, EVERY = 20, 4

KILLED = """
import os, signal, sys
import ray, raysvc
from raysvc.actors.launch import find_server
done = [0]
def stop():
    done[0] += 1
    if done[0] == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    if done[0] == int(sys.argv[3]):
        os.kill(ray.get(find_server("adapting").stats.remote())["pid"], signal.SIGKILL)
    return False
print(raysvc.train(sys.argv[1], should_stop=stop, trainer={"dp_size": int(sys.argv[4])}).global_step)
"""


def garbage(path: Path, num_rows: int) -> Path:
    """Questions whose answers are noise."""
    rng = random.Random(7)
    answers = ["".join(rng.choices(string.printable[:90], k=60)) for _ in range(num_rows)]
    lines = [
        {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def job_of(folder: Path, sample: dict[str, str], run: str, **trainer: Any) -> Path:
    rows = Path(sample["rows"]).read_text().splitlines(keepends=True)
    for name, part in (("first", rows[:120]), ("second", rows[120:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    garbage(folder / "planted.jsonl", 120)
    names = ("first", "second", "planted")
    sources = {
        name: {"source": {"path": str(folder / f"{name}.jsonl"), "format": "chat"}, "weight": 1}
        for name in names
    }
    job = {
        "mixture": {"sources": sources, "adapt": {"every_steps": EVERY, "starve_above": 1.3}},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 12, "mini_batch_size": 6, "update_epochs": 2, "layout": "packed"},
        "server": {"name": "adapting", "look_ahead_steps": 2, "lease_ttl_s": 3},
        "trainer": {
            "model": "tiny", "learning_rate": 3.0e-3, "run_dir": str(folder / run), "max_steps": STEPS,
            "checkpoint_every_steps": 3, **trainer,
        },
    }  # fmt: skip
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def row_log(folder: Path, run: str) -> list[str]:
    return (folder / run / "rows.jsonl").read_text().splitlines()


def decisions_of(folder: Path, run: str) -> list[tuple[int, dict[str, float]]]:
    found = sorted((folder / run / "server" / "feedback" / "decisions").iterdir())
    records = [json.loads(path.read_text()) for path in found]
    return [(one["from_step"], one["weights"]) for one in records]


def rows_of(log: list[str]) -> dict[int, list[list[int]]]:
    """Step -> rows of its two mini-batches; they are trained twice."""
    rows: dict[int, list[list[int]]] = {}
    for line in map(json.loads, log):
        rows.setdefault(line["step"], []).append([parse(row) for row in line["row_ids"]])
    assert all(each[:2] == each[2:] for each in rows.values())
    return {step: each[:2] for step, each in rows.items()}


def planted_in(minis: list[list[int]]) -> int:
    """How many are of the planted source, the third one."""
    return sum(row >= source_base(2) for mini in minis for row in mini)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_planted_source_is_starved_and_kills_change_no_row(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.inspect.replay_run import replay_job
    from raysvc.job.job_file import load_job

    whole = job_of(tmp_path, sample, "whole")
    raysvc.train(whole)
    log = row_log(tmp_path, "whole")
    ((from_step, weights),) = decisions_of(tmp_path, "whole")
    assert weights == {"first": 1.0, "second": 1.0, "planted": 0.0}
    assert from_step % EVERY == 0
    rows = rows_of(log)
    assert [planted_in(rows[step]) for step in range(STEPS)] == [4] * from_step + [0] * (STEPS - from_step)

    for run, kills in (
        ("killed", [(from_step - EVERY + 1, 2, 1), (99, 3, 2)]),
        ("again", [(from_step - EVERY, 99, 2), (99, 4, 1)]),
    ):
        job = job_of(tmp_path, sample, run)
        for trainer_at, server_at, dp_size in kills:
            command = [sys.executable, "-c", KILLED, str(job), *map(str, (trainer_at, server_at, dp_size))]
            environment = {**os.environ, "RAY_ADDRESS": "local"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == (0 if trainer_at == 99 else -9), done.stderr[-2000:]
        assert decisions_of(tmp_path, run) == [(from_step, weights)]
        assert row_log(tmp_path, run) == log

    for step in range(STEPS):
        made = replay_job(load_job(tmp_path / "killed.yaml"), step, dp_size=1)
        assert [mini.row_ids.tolist() for mini in made.info.mini_batches] == rows[step]
        assert made.checksum() == replay_job(load_job(whole), step, dp_size=1).checksum()
