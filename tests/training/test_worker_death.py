"""What a user sees when a worker of `raysvc train` is killed: what died, where, and which command goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def started(arguments: list[str], err: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raysvc.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)


def worker_pids(run: subprocess.Popen[str]) -> list[int]:
    """Its workers, which are processes of the Ray that it started."""
    import psutil

    found = []
    for each in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # an idle worker of Ray may end at any time
            if "ray::CausalLMWorker" in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


def test_the_last_line_says_what_died_where_and_which_command_goes_on(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job: dict[str, Any] = {
        "source": {"path": sample["rows"], "format": "chat"}, "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")}, "server": {"name": "dies"},
        "plan": {"batch_size": 8, "epochs": 3, "micro_batch_tokens": 1024},
        "trainer": {"dp_size": 2, "run_dir": str(tmp_path / "run"), "checkpoint_every_steps": 4, "device": "cpu"},
    }  # fmt: skip
    path = tmp_path / "a job.yaml"
    path.write_text(yaml.safe_dump(job))
    arguments = ["train", "-c", str(path), "--json", "trainer.keep_checkpoints=3"]
    run, rows = started(arguments, subprocess.STDOUT), tmp_path / "run" / "rows.jsonl"
    begin = time.monotonic()
    while not rows.exists() or rows.read_bytes().count(b"\n") < 6:
        assert run.poll() is None, run.communicate()[0][-2000:]
        assert time.monotonic() - begin < 300
        time.sleep(0.005)
    pid = max(worker_pids(run))
    os.kill(pid, signal.SIGKILL)
    seen, _ = run.communicate(timeout=300)
    last = seen.strip().splitlines()[-1]
    assert run.returncode == 1, "not a mistake of the user's"
    assert re.search(
        rf"worker of rank \d failed in \w+: its process {pid} on node \d+\.\d+\.\d+\.\d+ died", last
    )
    again = shlex.split(last.partition("resume from the last checkpoint with: ")[2])
    assert again == ["raysvc", *arguments]
    assert "Traceback" not in seen

    whole, err = started(again[1:], subprocess.PIPE).communicate(timeout=300)
    summary = json.loads(whole.splitlines()[-1])
    assert summary["resumed_from"] >= 4, err[-1000:]
    assert summary["steps"] == rows.read_bytes().count(b"\n") == 90
