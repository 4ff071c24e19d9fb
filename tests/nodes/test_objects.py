"""An object that takes longer to come from another node than anybody waits in one go."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import time
import numpy as np, ray
from ray.cluster_utils import Cluster
from tests.patience import wait_longer_for_nodes
from raysvc.actors import launch
from raysvc.client import rank_reader
from raysvc.client.rank_reader import RankReader
from raysvc.actors.server.spec import Role
from raysvc.nodes.objects import are_made

wait_longer_for_nodes()
store = {"object_store_memory": 400 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
cluster.add_node(num_cpus=1, resources={"far": 1}, **store)
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)


@ray.remote(num_cpus=0, resources={"far": 0.1})
def far():
    return np.ones(128 << 20, np.uint8)


class Connection:
    def check(self):
        raise AssertionError("an object that exists is got in one go")


# a hundredth of the time that it takes on a fast machine
rank_reader.POLL_S = launch.REPORT_EVERY_S = 0.001
ref = far.remote()
while not are_made(ref, 1.0):
    pass
assert RankReader(Connection(), Role(1))._values([ref])[0].nbytes == 128 << 20
ref = far.remote()
while not are_made(ref, 1.0):
    pass
assert launch.wait_for(ref, "a far object", timeout_s=10.0).nbytes == 128 << 20
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_transfer_that_takes_longer_than_a_look_still_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, timeout=280, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
