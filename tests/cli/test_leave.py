"""A command ends the local Ray that it started, at once, and no other."""

from __future__ import annotations

import subprocess
import sys

OURS = """
from raysvc.cluster import connect, leave
connect("local", need_cpus=1)
import ray
assert not ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV  # uv would make an environment for each worker
node = ray._private.worker._global_node
processes = [info.process for infos in node.all_processes.values() for info in infos]
(monitor,) = (info.process for info in node.all_processes["monitor"])
leave()
assert not ray.is_initialized()
assert all(process.poll() is not None for process in processes), [process.args for process in processes]
assert monitor.returncode == -9  # the only one that is not asked
leave()
"""
THEIRS = """
import ray
from raysvc.cluster import connect, leave
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
connect()
leave()
assert ray.is_initialized()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_local_ray_that_was_started_here_ends_with_all_its_processes() -> None:
    run(OURS)


def test_a_ray_that_was_there_stays() -> None:
    run(THEIRS)
