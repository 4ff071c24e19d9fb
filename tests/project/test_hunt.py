"""`tests/hunt.py`: Ray starts under its delays, and they are felt."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HUNT = Path(__file__).parents[1] / "hunt.py"
ROUND_TRIP = """
import time
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
class One:
    def call(self):
        return 1
actor = ray.remote(One).options(num_cpus=0).remote()
ray.get(actor.call.remote())
begin = time.perf_counter()
for _ in range(3):
    ray.get(actor.call.remote())
print((time.perf_counter() - begin) / 3)
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_call_waits_for_the_delays_and_ray_starts_in_spite_of_them() -> None:
    spec = importlib.util.spec_from_file_location("hunt", HUNT)
    assert spec is not None
    assert spec.loader is not None
    hunt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hunt)
    env = {**os.environ, **hunt.delays(most_us=200_000, least_us=200_000)}
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP], env=env, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) > 0.6, "there, in the queue of the actor, and back"
