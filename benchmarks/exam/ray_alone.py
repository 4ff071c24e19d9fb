"""A Ray that outlives the processes of a contestant, for adapters that need one."""

from __future__ import annotations

import os
import subprocess
import sys

RAY = """import ray, sys
for left in (2, 1, 0):
    try:
        one = ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=2**28, log_to_driver=False)
        break
    except Exception:  # the machine is busy, and its processes are late
        if not left:
            raise
        ray.shutdown()
print(one.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


def prepare() -> None:
    """Start a Ray that ends with this process."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # both ends: a token of the user would turn it on at one
    holder = subprocess.Popen(
        [sys.executable, "-c", RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = holder.stdout.readline().strip()
    if not address:
        raise RuntimeError("Ray did not start")
    os.environ["RAY_ADDRESS"] = address
