"""How long a trainer waits for data, against the compute time of a step.

    python benchmarks/serve.py [--quick] [--compute 50 200] [--two-nodes] [--no-peers] [--no-gain]

One trainer on one rank: wait for a batch of padded arrays in this process, then "compute" (sleep) so many ms.
- `in memory`: tensors that this process made before, the floor: nothing is brought, nothing committed;
- `serial`: collated here, in the loop, by raysvc's own collator;
- `raysvc k`: from a batch server by rank mode, k steps ahead;
- `torchdata`, `ray data`: as `serve_peers.py` says.
Stall is the share of the loop in which the trainer waited for a batch, without its reading of the arrays, which has a column;
overhead is a step's time less its compute. `ready_step_ms_at_K` is what a step that is there costs the trainer's thread after K ms
of compute: its commit, and taking the next one.
torchdata is installed by this script below `.bench/serve`, and uses the torch of this environment.
With --two-nodes the server runs on another node of a `ray.cluster_utils.Cluster`. What look-ahead gains, and where it cannot, is
measured by `serve_gain.py`, which runs behind it in the same Ray.

Figures (11-23, `--quick`, 256 rows of about 400 tokens a step): share of time in which a rank waited, in %.

    compute  in memory  serial  raysvc 1     2     4  torchdata  Ray Data
      5 ms     0.15      43       74        71    58      62        61
     20 ms     0.04      16        1.4    0.10  0.12      24       8.8
     50 ms     0.02     6.7       0.06    0.08  0.05     4.4      0.39
    200 ms     0.01     2.4       0.01    0.02  0.02     1.4      0.11

A step that is ready costs the trainer's thread 0.03 ms, 0.03 of an actor round trip (aim 0.2). A step takes some 14 ms of CPU in all
(server 8 to 10), so at 5 ms of compute two cores are the limit. Recovery after SIGKILL of the server takes 1.5 s, where an empty actor
needs 0.6.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show
from serve_gain import gain, loop, served
from serve_peers import ray_data, torchdata

COMPUTE_MS = (5, 20, 50, 200)
ROWS, TOKENS = 256, 400  # of a step, and of a row
QUICK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compute", type=int, nargs="+", default=COMPUTE_MS, help="ms of a step")
    parser.add_argument("--two-nodes", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-gain", action="store_true")
    options = parser.parse_args()
    with running_ray(options.two_nodes), tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)
        if not options.no_gain:
            show("What look-ahead gains", gain(Path(folder), QUICK_S if options.quick else 4 * QUICK_S))


@contextmanager
def running_ray(two_nodes: bool) -> Iterator[None]:
    """One node, or a head without CPUs, where the trainer is, and a node for the server."""
    import ray
    from ray.cluster_utils import Cluster

    if not two_nodes:
        quiet_ray(num_cpus=4, object_store_mb=700)
        yield
        return

    store = {"object_store_memory": 400 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    cluster.add_node(num_cpus=2, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()  # before the cluster, whose end would take this process with it
    cluster.shutdown()


def measure(folder: Path, options: argparse.Namespace) -> None:
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    steps_per_epoch = 40
    uri = make_entry(folder / "cache", ROWS * steps_per_epoch, TOKENS)
    plan = PlanConfig(batch_size=ROWS, epochs=200, micro_batch_size=ROWS)
    spec = ServeSpec(
        name="bench", sources=[uri], plan=plan, pad_token_id=0, journal=str(folder / "journal"), num_cpus=0.5
    )
    server = start_server(spec, detached=True)
    systems: dict[str, Callable[[], Iterator[Any]]] = {
        "in memory": lambda: in_memory(spec),
        "serial": lambda: serial(spec),
    }
    for depth in (0, 1, 2, 4):
        systems[f"raysvc {depth}"] = lambda depth=depth: served("bench", depth)
    if not options.no_peers and not options.two_nodes:
        systems["torchdata"] = lambda: torchdata(uri, ROWS)
        systems["ray data"] = lambda: ray_data(uri, ROWS)
    rows, seconds = [], QUICK_S if options.quick else 4 * QUICK_S
    for compute_ms in options.compute:
        for name, make in systems.items():
            rows.append({"compute ms": compute_ms, "system": name, **loop(make(), compute_ms / 1e3, seconds)})
            print(rows[-1], file=sys.stderr, flush=True)
    ready_ms = {
        f"ready_step_ms_at_{ms}": ready_step_ms("bench", ms / 1e3) for ms in options.compute if ms > 5
    }
    show("Stall against compute", rows, **ready_ms, **times(server), batch=[ROWS, TOKENS])


def in_memory(spec: Any) -> Iterator[Any]:
    """Tensors of a few steps, again and again."""
    import torch

    some = [
        {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        for arrays in itertools.islice(serial(spec), 8)
    ]
    yield from itertools.cycle(some)


def serial(spec: Any) -> Iterator[Any]:
    from raysvc.actors.server.entry_stream import EntryStream
    from raysvc.actors.server.make_step import Recipe

    stream = EntryStream(spec.sources, {}, Recipe(spec.plan, 0))
    for step in range(stream.schedule.num_steps):
        yield stream.make(step, (1,))[1][0].arrays


def ready_step_ms(name: str, compute_s: float) -> dict[str, float]:
    """What a step that is there costs the trainer's thread, two steps ahead: medians of its commit, of taking the next one, and
    of their sum."""
    from raysvc.client.rank_client import attach_rank

    took = []
    with attach_rank(name, dp_size=1, rank=0, group="bench", look_ahead_steps=2) as client:
        client.rewind(0)
        steps = client.steps()
        index = next(steps).index
        for _ in range(40):
            time.sleep(compute_s)
            begin = time.perf_counter()
            client.commit(index)
            committed = time.perf_counter()
            index = next(steps).index
            came = time.perf_counter()
            took.append((committed - begin, came - committed, came - begin))
    parts = zip(("commit", "take", "both"), zip(*took[5:], strict=True), strict=True)
    return {name: round(1e3 * statistics.median(seconds), 3) for name, seconds in parts}


def times(server: Any) -> dict[str, float]:
    """Seconds of attach, first batch, recovery after a kill; milliseconds of a round trip."""
    import ray

    from raysvc.client.batch_client import attach

    control = server.heartbeat.options(concurrency_group="control")
    begin = time.perf_counter()
    client = attach("bench", dp_size=1, look_ahead_steps=2)
    attached = time.perf_counter()
    first = next(iter(client))
    ray.get(list(first.mini_batches[0].shards))
    came = time.perf_counter()
    trips = []
    for _ in range(200):
        asked = time.perf_counter()
        ray.get(control.remote(client.lease.fence))
        trips.append(time.perf_counter() - asked)
    pid = ray.get(server.stats.remote())["pid"]
    os.kill(pid, signal.SIGKILL)
    killed = time.perf_counter()
    client.fetch(1)
    recovered = time.perf_counter()
    client.detach()
    restart_s = bare_restart()
    return {
        "attach_s": round(attached - begin, 4),
        "first_batch_s": round(came - attached, 4),
        "recovery_s": round(recovered - killed, 3),
        "bare_actor_restart_s": round(restart_s, 3),
        "round_trip_ms": round(1e3 * statistics.median(trips), 3),
    }


def bare_restart() -> float:
    """Seconds until an empty actor answers again after a kill."""
    import ray

    class Empty:
        def pid(self) -> int:
            return os.getpid()

    actor = ray.remote(Empty).options(max_restarts=-1, max_task_retries=-1, num_cpus=0).remote()
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    begin = time.perf_counter()
    ray.get(actor.pid.remote())
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
