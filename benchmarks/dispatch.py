"""Bringing a global batch to two workers: ours beside SkyRL 0.3.0's `MeshDispatch` and a plain `ray.put`.

    python benchmarks/dispatch.py [--quick] [--mb 1 50 1000] [--steps 6] [--no-peers]

Every worker copies its share into memory of its own and then sleeps for the compute time. A loop of steps is timed;
what a step takes beyond the compute time is on the critical path.

- `raysvc`: an actor returns the shards by value; the driver passes pending refs on, one step ahead; workers stage
  them in their ring. The next step is asked for before this one is waited for, as `raysvc train` does.
- `mesh`: the batch lies in the driver; `MeshDispatch.dispatch` chunks it, puts each chunk, calls the workers.
- `put`: the batch lies in the driver as numpy; one `ray.put` of all of it, every worker takes its rows.

`driver_ms` is the driver's own time per step, `driver_mb` what it serialized into the object store in one step more,
`worker_get_ms` what a worker waited for its data after the step was asked for, `worker_copy_ms` the copy inside a worker,
`critical_ms` as above, `x_mesh` how many times less that is than `mesh`. Peers run in `.bench/peers`, which
`benchmarks/peers.py` makes on the first run. 1 GB needs some 9 GB of memory, 5 of them in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import numpy as np
import typing_extensions

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
DP_SIZE = 2
WIDTH = 4096
SECONDS_PER_MB = 0.006  # of compute: longer than any of them needs for its copies, so that all could hide
WARM_STEPS = 4  # every byte of the ring, and of the object store, is touched once before the clock starts
COLUMNS = ("input_ids", "position_ids", "labels", "advantages")  # four bytes each


def lines_of(mb: float) -> int:
    """Rows of a batch of `mb` megabytes, divisible by the ranks."""
    return max(DP_SIZE, round(mb * 2**20 / (4 * len(COLUMNS) * WIDTH)) // DP_SIZE * DP_SIZE)


class Producer:
    """Stands for the batch server: returns one shard per rank, made before the clock starts."""

    def __init__(self, mb: float) -> None:
        from raysvc.collate.shard import Denominators, MicroBatchInfo, Shard

        lines = lines_of(mb) // DP_SIZE
        ones = np.ones(lines, np.int32)
        arrays = {name: np.ones((lines, WIDTH), np.int32) for name in COLUMNS}
        per_row = ("row_tokens", "row_group", "row_group_rows", "row_group_tokens", "seq_lengths")
        arrays |= dict.fromkeys(per_row, ones)
        micro = (MicroBatchInfo(0, lines, WIDTH, lines * WIDTH),)
        ids = np.arange(lines)
        count = Denominators(1, lines, lines)
        self._shards = [
            Shard(0, 0, rank, "padded_right", arrays, ids, count, micro) for rank in range(DP_SIZE)
        ]

    def fetch(self, step: int) -> Any:
        return tuple(self._shards)


class Worker:
    """Copies what it gets and sleeps."""

    def __init__(self, rank: int, kind: str) -> None:
        self._rank = rank
        self._own: dict[str, np.ndarray] = {}
        if kind == "mesh":
            typing.TypedDict = typing_extensions.TypedDict  # what skyrl needs on Python 3.11
        if kind == "raysvc":
            from raysvc.actors.staging.staging import Staging

            self._staging = Staging(rank, "cpu")

    def stage(self, key: tuple[int, int], shard: Any) -> int:
        return self._staging.put(key, shard)

    def train_step(self, keys: list[tuple[int, int]], seconds: float) -> tuple[float, float]:
        """Seconds that it waited for the data, and of the copy (in the thread that stages)."""
        (taken,) = [self._staging.take(key, 600.0) for key in keys]
        time.sleep(seconds)
        self._staging.release()
        return taken[1], taken[0].copy_s

    def mesh(self, batch: Any, seconds: float) -> tuple[float, float]:
        """When it had its data, and seconds of the copy."""
        return self._blocking({name: value.numpy() for name, value in batch.items()}, seconds)

    def plain(self, batch: dict[str, np.ndarray], seconds: float) -> tuple[float, float]:
        share = len(batch[COLUMNS[0]]) // DP_SIZE
        here = slice(self._rank * share, (self._rank + 1) * share)
        return self._blocking({name: value[here] for name, value in batch.items()}, seconds)

    def _blocking(self, arrays: dict[str, np.ndarray], seconds: float) -> tuple[float, float]:
        there, begin = time.time(), time.perf_counter()
        self._copy(arrays)
        copied = time.perf_counter() - begin
        time.sleep(seconds)
        return there, copied

    def _copy(self, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if name not in self._own or self._own[name].shape != array.shape:
                self._own[name] = np.empty_like(array)
            np.copyto(self._own[name], array)


def start(kind: str, mb: float) -> list[Any]:
    import ray
    from common import quiet_ray

    # a step lies there while the next one comes, and the one before until its refs are gone
    quiet_ray(num_cpus=4, object_store_mb=int(max(300, 5 * mb)))
    actor = ray.remote(concurrency_groups={"stage": 1})(Worker).options(num_cpus=0.5)
    return [actor.remote(rank, kind) for rank in range(DP_SIZE)]


def serialized_mb(call: Any) -> float:
    """Megabytes that the driver puts into the object store while `call` runs."""
    import ray

    total, put = 0, ray.put
    context = ray._private.worker.global_worker.get_serialization_context()

    def counted(value: Any, **options: Any) -> Any:
        nonlocal total
        total += context.serialize(value).total_bytes
        return put(value, **options)

    ray.put = counted
    try:
        call()
    finally:
        ray.put = put
    return round(total / 2**20, 3)


def measure_raysvc(mb: float, steps: int, compute_s: float) -> dict[str, Any]:
    import ray

    from raysvc.actors.dispatch.dispatch import WorkerGroup

    group = WorkerGroup(start("raysvc", mb))
    producer = ray.remote(Producer).options(num_cpus=0.5).remote(mb)
    times = {"driver": 0.0, "get": 0.0, "copy": 0.0}
    begin = 0.0

    def stage(step: int) -> None:
        group.stage_mini((step, 0), producer.fetch.options(num_returns=DP_SIZE).remote(step))

    def ask(step: int) -> Any:
        stage(step + 1)
        return group.call("train_step", [(step, 0)], compute_s)

    def finish(running: Any) -> None:
        waited, copied = zip(*ray.get(running), strict=True)
        times["get"] += max(waited)
        times["copy"] += max(copied)

    stage(0)
    before = None
    for step in range(steps + WARM_STEPS):
        start_s = time.perf_counter()
        running = ask(step)
        times["driver"] += time.perf_counter() - start_s
        if before is not None:
            finish(before)
            if step == WARM_STEPS:  # the last warm step ended here
                begin, times = time.perf_counter(), dict.fromkeys(times, 0.0)
        before = running
    finish(before)
    wall_s = time.perf_counter() - begin
    put = serialized_mb(lambda: ray.get(ask(steps + WARM_STEPS)))
    return row("raysvc", mb, steps, compute_s, wall_s, times, put)


def measure_mesh(mb: float, steps: int, compute_s: float) -> dict[str, Any]:
    typing.TypedDict = typing_extensions.TypedDict  # what skyrl needs on Python 3.11
    import ray
    import torch
    from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, MeshDispatch, MeshRank
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    workers = start("mesh", mb)
    infos = [
        ActorInfo(worker, MeshRank(rank, 0, 0, 0, DP_SIZE, DP_SIZE, 1)) for rank, worker in enumerate(workers)
    ]
    batch = TrainingInputBatch(
        {name: torch.ones((lines_of(mb), WIDTH), dtype=torch.int32) for name in COLUMNS}
    )
    batch.metadata = {}
    return measure_blocking(
        "mesh", mb, steps, compute_s,
        lambda: MeshDispatch.dispatch(infos, "mesh", batch, seconds=compute_s), ray,
    )  # fmt: skip


def measure_put(mb: float, steps: int, compute_s: float) -> dict[str, Any]:
    import ray

    workers = start("put", mb)
    batch = {name: np.ones((lines_of(mb), WIDTH), np.int32) for name in COLUMNS}

    def call() -> list[Any]:
        ref = ray.put(batch)
        return [worker.plain.remote(ref, compute_s) for worker in workers]

    return measure_blocking("put", mb, steps, compute_s, call, ray)


def measure_blocking(
    name: str, mb: float, steps: int, compute_s: float, call: Any, ray: Any
) -> dict[str, Any]:
    times = {"driver": 0.0, "get": 0.0, "copy": 0.0}
    begin = 0.0
    for step in range(steps + WARM_STEPS):
        if step == WARM_STEPS:
            begin, times = time.perf_counter(), dict.fromkeys(times, 0.0)
        start_s = time.perf_counter()
        refs = call()
        times["driver"] += time.perf_counter() - start_s
        asked = time.time()
        there, copied = zip(*ray.get(refs), strict=True)
        times["get"] += max(0.0, max(there) - asked)
        times["copy"] += max(copied)
    wall_s = time.perf_counter() - begin
    put = serialized_mb(lambda: ray.get(call()))
    return row(name, mb, steps, compute_s, wall_s, times, put)


def row(
    name: str,
    mb: float,
    steps: int,
    compute_s: float,
    wall_s: float,
    times: dict[str, float],
    put_mb: float,
) -> dict[str, Any]:
    per_step = {part: round(seconds / steps * 1e3, 2) for part, seconds in times.items()}
    return {
        "who": name,
        "batch_mb": mb,
        "driver_mb": put_mb,
        "driver_ms": per_step["driver"],
        "worker_get_ms": per_step["get"],
        "worker_copy_ms": per_step["copy"],
        "critical_ms": round((wall_s / steps - compute_s) * 1e3, 2),
        "compute_ms": compute_s * 1e3,
    }


def measured(who: str, mb: float, compute_s: float, steps: int) -> dict[str, Any]:
    """One tool at one size, in a process and a cluster of its own."""
    from peers import peers_python

    python = peers_python() if who == "mesh" else sys.executable
    size = ["--mb", str(mb), "--compute-s", str(compute_s), "--steps", str(steps)]
    command = [python, __file__, "--only", who, *size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{who} failed at {mb:g} MB:\n{done.stderr[-3000:]}")
    print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 50, 1000])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="three steps of half the compute")
    parser.add_argument("--compute-s", type=float, help="of a step; for the script itself")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--only", choices=["raysvc", "mesh", "put"], help="one of them, one size; for the script itself"
    )
    options = parser.parse_args()
    if options.only:
        measure = {"raysvc": measure_raysvc, "mesh": measure_mesh, "put": measure_put}[options.only]
        print(json.dumps(measure(options.mb[0], options.steps, options.compute_s)), flush=True)
        return
    from common import show

    steps = 3 if options.quick else options.steps
    tools = ("raysvc", "put") if options.no_peers else ("raysvc", "put", "mesh")
    rows = []
    for mb in options.mb:
        compute_s = max(0.2, mb * SECONDS_PER_MB) * (0.5 if options.quick else 1.0)
        found = {who: measured(who, mb, compute_s, steps) for who in tools}
        for who in tools:
            if "mesh" in found and who != "mesh":
                critical_ms = max(found[who]["critical_ms"], 0.1)
                found[who]["x_mesh"] = round(found["mesh"]["critical_ms"] / critical_ms, 1)
            rows.append(found[who])
    show("Dispatch of a global batch to two workers", rows, steps=steps)


if __name__ == "__main__":
    main()
