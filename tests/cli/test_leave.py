"""A process ends the local Ray that it started, and no other; a command frees no memory that ends with it."""

from __future__ import annotations

import subprocess
import sys

OURS = """
import atexit, contextlib, os, time
from raysvc.cluster import _import_ray, connect
def judge():  # registered first, so it runs last
    until = time.monotonic() + 30  # a killed process may take longer to end than Ray waits for it
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
    ended = all(process.poll() is not None for process in processes)
    with contextlib.suppress(Exception):
        ray.get_actor("of a thread that goes on")
    os._exit(0 if ended and not ray.is_initialized() else 1)
atexit.register(judge)
_import_ray("local")
import ray
connect("local", need_cpus=1)
assert not ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV  # uv would make an environment for each worker
node = ray._private.worker._global_node
processes = [info.process for infos in node.all_processes.values() for info in infos]
"""
BESIDE = """
import sys
from raysvc import cluster
cluster.connect = lambda address, need_cpus: str("ray" in sys.modules)
assert "ray" not in sys.modules
begun = cluster.starting()
assert "ray.util.placement_group" in sys.modules  # whole, so that another thread may import from it at once
assert begun.result() == "True"
"""
COMMAND = """
import os, sys
class Held:
    def __init__(self):
        self.itself = self  # a cycle, as torch's modules are
    def __del__(self):
        os.write(1, b" collected")
held = Held()
{}
"""


def test_the_end_of_a_command_collects_no_cycles() -> None:
    by_command = "from raysvc.cli.__main__ import main; sys.argv = ['raysvc', '--version']; main()"
    done = {}
    for what, code in {"a command": by_command, "any other process": ""}.items():
        command = [sys.executable, "-c", COMMAND.format(code)]
        done[what] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "raysvc " in done["a command"]
    assert "collected" not in done["a command"]
    assert done["any other process"] == " collected"


def test_ray_is_imported_before_a_thread_starts_it() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_local_ray_that_was_started_here_ends_with_all_its_processes() -> None:
    done = subprocess.run([sys.executable, "-c", OURS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_ray_that_was_there_stays(ray_session: None) -> None:
    import ray

    from raysvc.cluster import connect, leave

    connect()
    leave()
    assert ray.is_initialized()
