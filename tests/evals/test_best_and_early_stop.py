"""Runs whose evals decide: which model is the best, and when they stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app
from raysvc.cli.view import plain
from raysvc.errors import StateMismatch
from raysvc.job.job_file import load_job
from raysvc.training import train_loop
from raysvc.training.export import export
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_job import job_of_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def rising_job(folder: Path, sample: dict[str, str], name: str, **trainer: Any) -> Path:
    """A job whose rate is so high that the second eval is worse than the first one."""
    held = {"eval": "held", "metric": "loss"}
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": name},
        "evals": {"held": {"share": 0.2}},
        "trainer": {
            "model": "tiny", "learning_rate": 0.3, "run_dir": str(folder / name), "eval_every_steps": 2,
            "checkpoint_every_steps": 3, "keep_checkpoints": 1,
            "keep_best": held, "stop_after": {**held, "patience": 1}, **trainer,
        },
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def steps_kept(folder: Path) -> list[int]:
    return [one.step for one in RunFolder(folder).checkpoints()]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_stops_early_leaves_the_best_model_and_does_not_go_on_unless_it_is_told_to(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job, run = rising_job(tmp_path, sample, "early"), tmp_path / "early"
    summary = raysvc.train(job).metrics
    losses = [line["loss"] for line in RunFolder(run).lines(run / "evals.jsonl")]
    assert losses[0] < losses[1], "the job is to be one whose loss rises"
    assert (summary["steps"], len(losses)) == (4, 2)
    assert summary["best"] == {"eval": "held", "metric": "loss", "value": losses[0], "steps": 2}
    assert summary["stopped_early"]["without"] == summary["stopped_early"]["patience"] == 1
    assert steps_kept(run) == [2, 4], "the newest one, and the best"

    ticks = []
    again = raysvc.train(job, progress=ticks.append).metrics
    assert ticks[-1].facts == {"already": "stopped early"}
    assert (again["steps"], again["stopped_early"]) == (4, summary["stopped_early"])

    for keep in ({"eval": "held", "metric": "bits_per_byte"}, None):
        with pytest.raises(
            StateMismatch, match=r"keep_best was loss of held, and is (bits_per_byte of held|not given) now"
        ):
            raysvc.train(job, trainer={"keep_best": keep})
    assert job_of_run(run).trainer.keep_best == load_job(job).trainer.keep_best

    told = {}
    for options, step in ([], 2), (["--step", "2"], 2), (["--step", "4"], 4):
        out = tmp_path / f"out{len(told)}"
        done = CliRunner().invoke(app, ["export", str(run), *options, "--out", str(out), "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout.splitlines()[-1])["step"] == step
        told[out.name] = weights(out)
    assert told["out0"] == told["out1"] == weights(run / "model") != told["out2"]

    with pytest.raises(
        StateMismatch, match=r"trainer\.stop_after was .*'patience': 1.* and is .*'patience': 2"
    ):
        raysvc.train(job, trainer={"stop_after": {"eval": "held", "patience": 2}})
    longer = raysvc.train(
        job,
        progress=ticks.append,
        trainer={"stop_after": {"eval": "held", "patience": 2}, "resume": "changed", "max_steps": 6},
    ).metrics
    assert (longer["steps"], longer["resumed_from"]) == (6, 4)
    (resumed,) = [tick for tick in ticks if tick.phase == "resume"]
    assert plain(resumed).startswith("[resume] 4 steps trained before checkpoint=step-00000004.")
    best = min(line["loss"] for line in RunFolder(run).lines(run / "evals.jsonl"))
    assert longer["best"]["value"] == best


KILLED = """
import os, signal, sys
import raysvc
from raysvc.training import train_loop
from raysvc.training.run_folder import RunFolder

publish = RunFolder.publish

def die_before(self, folder, state):
    if str(state["data"]["frontier"]) == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    publish(self, folder, state)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

RunFolder.publish = die_before
if sys.argv[2] == "model":
    train_loop.write_model = die
raysvc.train(sys.argv[1])
"""


def test_a_run_that_is_killed_between_an_eval_and_its_checkpoint_ends_like_one_that_was_not(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    calm = raysvc.train(rising_job(tmp_path, sample, "calm")).metrics
    job, run = rising_job(tmp_path, sample, "killed"), tmp_path / "killed"
    for place, lines, kept in (("2", 1, []), ("4", 2, [2, 3]), ("model", 2, [2, 4])):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(job), place],
            capture_output=True,
            text=True,
            env={**os.environ},
        )
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        assert len((run / "evals.jsonl").read_bytes().splitlines()) == lines, "the eval is over"
        assert steps_kept(run) == kept, place
        assert not (run / "model").exists()
    summary = raysvc.train(job).metrics
    for name in ("steps", "best", "stopped_early", "rows", "loss_last"):
        assert summary[name] == calm[name], name
    assert weights(run / "model") == weights(tmp_path / "calm" / "model")
    assert steps_kept(run) == steps_kept(tmp_path / "calm") == [2, 4]


class Died(Exception):
    """Stands for a kill."""


def die_of_it(*_: Any, **__: Any) -> None:
    raise Died


def test_a_run_that_went_on_has_the_model_of_its_last_end_and_not_of_an_earlier_one(
    tmp_path: Path, sample: dict[str, str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = (
        rising_job(tmp_path, sample, "longer", stop_after=None, learning_rate=1e-3),
        tmp_path / "longer",
    )

    def exported(steps: int) -> bytes:
        out = tmp_path / f"out{steps}"
        if not out.exists():
            export(load_job(job), out, steps)
        return weights(out)

    assert raysvc.train(job, trainer={"max_steps": 2}).metrics["steps"] == 2
    assert weights(run / "model") == exported(2)
    with monkeypatch.context() as patch:
        patch.setattr(train_loop, "write_model", die_of_it)
        with pytest.raises(Died):
            raysvc.train(job, trainer={"max_steps": 4, "resume": "changed"})
    assert weights(run / "model") == exported(2), "nobody has written another one"
    summary = raysvc.train(job, trainer={"max_steps": 4, "resume": "changed"}).metrics
    assert (summary["steps"], summary["best"]["steps"]) == (4, 4)
    assert weights(run / "model") == exported(4) != weights(tmp_path / "out2")

    asked = iter((False, True))
    stopped = raysvc.train(
        job, trainer={"max_steps": 8, "resume": "changed"}, should_stop=lambda: next(asked)
    ).metrics
    assert (stopped["steps"], stopped["model"]) == (6, None)
    ended = raysvc.train(job, trainer={"max_steps": 6, "resume": "changed"}).metrics
    assert (ended["steps"], ended["model"]) == (6, str(run / "model"))
    assert weights(run / "model") == exported(ended["best"]["steps"])
