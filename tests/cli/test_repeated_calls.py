"""A lost worker of a build is no wall of lines in the terminal of whoever waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
LOSSES = """
import io, os, sys, time
sys.stdout = heard = io.StringIO()
from raysvc.cluster import connect
connect("local")
import ray

def submit(self, path):
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)

for name in ("MapWorker", "Own"):  # as Ray Data names its actors, and one of the user
    kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(type(name, (), {"submit": submit}))
    ray.get(kind.remote().submit.remote(f"{sys.argv[1]}/{name}"))
until = time.monotonic() + 60
while "Task Own" not in heard.getvalue() and time.monotonic() < until:
    time.sleep(0.1)  # lines come in their order, so what is shown of the first one is there too
sys.__stdout__.write(heard.getvalue())
"""


def test_calls_of_a_build_s_workers_that_ray_repeats_are_not_shown_and_those_of_others_are(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LOSSES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if "retries remaining" in line]
    assert any("Task Own.submit" in line for line in shown), done.stdout
    assert not any("MapWorker" in line for line in shown), shown
