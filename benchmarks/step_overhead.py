"""What the data path adds to a step whose compute takes 50 ms, beside a bare Ray actor round trip.

    python benchmarks/step_overhead.py [--steps 200] [--compute-ms 50]

Three loops in one process tree, in blocks of 20 steps in turn, so that a drift of the machine meets all of them:
- `round trip`: two actors, one empty call each, wait for both;
- `bare step`: the same with a sleep of the compute time inside;
- `raysvc step`: two workers that take their staged shard and then sleep as long; shards are planned,
  collated, fetched, staged and committed as in `raysvc train`.
Overhead of a loop is its time per step (a block's time by its steps) less the compute time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show

BLOCK = 20


class SleepingWorker:
    """A worker whose compute is a sleep; staging is the real one."""

    def __init__(self, rank: int) -> None:
        from raysvc.actors.staging.staging import Staging

        self._staging = Staging(rank, "cpu")

    def stage(self, key: tuple[int, int], shard: Any) -> int:
        return self._staging.put(key, shard)

    def train_step(self, keys: list[tuple[int, int]], seconds: float) -> float:
        waited = sum(self._staging.take(key, 60.0)[1] for key in keys)
        time.sleep(seconds)
        return waited

    def bare(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    options = parser.parse_args()
    quiet_ray()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.steps, options.compute_ms / 1e3)


def measure(folder: Path, steps: int, compute_s: float) -> None:
    import ray

    from raysvc.actors.dispatch.dispatch import WorkerGroup
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.batch_server import ServeSpec
    from raysvc.client.batch_client import attach
    from raysvc.job.config import PlanConfig

    uri = make_entry(folder / "cache", 64 * (steps + 4 * BLOCK), 200)
    plan = PlanConfig(batch_size=64, micro_batch_size=8)
    spec = ServeSpec(
        name="overhead", sources=[uri], plan=plan, pad_token_id=0, journal=str(folder / "journal")
    )
    server = start_server(spec, detached=False)
    actor = ray.remote(concurrency_groups={"stage": 1})(SleepingWorker).options(num_cpus=0.5)
    group = WorkerGroup([actor.remote(rank) for rank in range(2)])
    waited: list[float] = []
    times: dict[str, list[float]] = {"round trip": [], "bare step": [], "raysvc step": []}
    with attach("overhead", dp_size=2) as client:
        stream = client.steps(on_fetch=group.stage)

        def ours(
            count: int,
        ) -> None:  # as `raysvc train`: a step is started before the last one is waited for
            before: tuple[int, Any] | None = None
            for _ in range(count):
                step = next(stream)
                started = (step.index, group.start_step(step, compute_s))
                if before is not None:
                    finish(*before)
                before = started
            if before is not None:
                finish(*before)

        def finish(index: int, running: Any) -> None:
            waited.append(max(group.finish_step(running)))
            client.commit(index)

        def bare(seconds: float) -> Callable[[int], None]:
            def run(count: int) -> None:
                for _ in range(count):
                    ray.get([worker.bare.remote(seconds) for worker in group.workers])

            return run

        loops = {"round trip": bare(0.0), "bare step": bare(compute_s), "raysvc step": ours}
        for _ in range(steps // BLOCK + 1):
            for name, loop in loops.items():
                begin = time.perf_counter()
                loop(BLOCK)
                times[name].append((time.perf_counter() - begin) / BLOCK)
        nbytes = client.outline(0).mini_batches[0].nbytes
    report(times, compute_s, waited, nbytes)
    del server


def report(times: dict[str, list[float]], compute_s: float, waited: list[float], nbytes: int) -> None:
    rows = []
    trip_ms = statistics.median(times["round trip"][1:]) * 1e3
    for name, values in times.items():
        ms = [value * 1e3 for value in values[1:]]  # the first block warms up
        over_ms = statistics.median(ms) - (0.0 if name == "round trip" else compute_s * 1e3)
        row = {"loop": name, "median ms": statistics.median(ms), "min ms": min(ms), "max ms": max(ms)}
        rows.append({**row, "overhead ms": over_ms, "overhead / round trip": over_ms / trip_ms})
    stall = sum(waited[BLOCK:]) / (sum(times["raysvc step"][1:]) * BLOCK)
    show(
        "Step overhead",
        rows,
        stall_fraction=stall,
        step_bytes=nbytes,
        aim="raysvc step: at most 2 round trips",
    )


if __name__ == "__main__":
    main()
