"""Bringing a global batch to two workers: ours beside SkyRL 0.3.0's `MeshDispatch` and a plain `ray.put`.

    python benchmarks/dispatch.py [--mb 1 50 1000] [--steps 6] [--compute-s 0.2 0.6 6] [--no-peers]

Every worker copies its share into memory of its own and then sleeps for the compute time. A loop of steps is timed;
what a step takes beyond the compute time is on the critical path.

- `raysvc`: an actor returns the shards by value; the driver passes pending refs on, one step ahead; workers stage
  them in their ring. The next step is asked for before this one is waited for, as `raysvc train` does.
- `mesh`: the batch lies in the driver; `MeshDispatch.dispatch` chunks it, puts each chunk, calls the workers.
- `put`: the batch lies in the driver as numpy; one `ray.put` of all of it, every worker takes its rows.

`driver_ms` is the driver's own time per step, `driver_mb` what it put into the object store, `worker_copy_ms` the
copy inside a worker, `critical_ms` as above. Peers run in `.bench/peers`, which `benchmarks/peers.py` makes.
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

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".bench" / "peers" / "bin" / "python"
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
DP_SIZE = 2
WIDTH = 4096
COLUMNS = ("input_ids", "position_ids", "labels", "advantages")  # four bytes each


def lines_of(mb: float) -> int:
    """Rows of a batch of `mb` megabytes, divisible by the ranks."""
    return max(DP_SIZE, round(mb * 2**20 / (4 * len(COLUMNS) * WIDTH)) // DP_SIZE * DP_SIZE)


class Producer:
    """Stands for the batch server: returns one shard per rank, made before the clock starts."""

    def __init__(self, mb: float) -> None:
        from raysvc.collate import Denominators, MicroBatch, Shard

        lines = lines_of(mb) // DP_SIZE
        ones = np.ones(lines, np.int32)
        arrays = {name: np.ones((lines, WIDTH), np.int32) for name in COLUMNS}
        arrays |= {"row_tokens": ones, "row_group": ones, "row_group_rows": ones, "seq_lengths": ones}
        micro = (MicroBatch(0, lines, WIDTH, lines * WIDTH),)
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
            from raysvc.actors.staging import Staging

            self._staging = Staging(rank, "cpu")

    def stage(self, key: tuple[int, int], shard: Any) -> int:
        return self._staging.put(key, shard)

    def train_step(self, keys: list[tuple[int, int]], seconds: float) -> float:
        copies = [self._staging.take(key, 600.0)[0].copy_s for key in keys]
        time.sleep(seconds)
        self._staging.release()
        return sum(copies)

    def mesh(self, batch: Any, seconds: float) -> float:
        begin = time.perf_counter()
        self._copy({name: value.numpy() for name, value in batch.items()})
        copied = time.perf_counter() - begin
        time.sleep(seconds)
        return copied

    def plain(self, batch: dict[str, np.ndarray], seconds: float) -> float:
        begin = time.perf_counter()
        share = len(batch[COLUMNS[0]]) // DP_SIZE
        here = slice(self._rank * share, (self._rank + 1) * share)
        self._copy({name: value[here] for name, value in batch.items()})
        copied = time.perf_counter() - begin
        time.sleep(seconds)
        return copied

    def _copy(self, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if name not in self._own or self._own[name].shape != array.shape:
                self._own[name] = np.empty_like(array)
            np.copyto(self._own[name], array)


def start(kind: str, mb: float) -> list[Any]:
    import ray
    from common import quiet_ray

    quiet_ray(num_cpus=4, object_store_mb=int(max(300, 5 * mb)))
    actor = ray.remote(concurrency_groups={"stage": 1})(Worker).options(num_cpus=0.5)
    return [actor.remote(rank, kind) for rank in range(DP_SIZE)]


def measure_raysvc(mb: float, steps: int, compute_s: float) -> dict[str, Any]:
    import ray

    from raysvc.actors.dispatch import WorkerGroup

    group = WorkerGroup(start("raysvc", mb))
    producer = ray.remote(Producer).options(num_cpus=0.5).remote(mb)
    driver_s = copy_s = 0.0
    begin = 0.0
    before = None

    def stage(step: int) -> None:
        group.stage_mini((step, 0), producer.fetch.options(num_returns=DP_SIZE).remote(step))

    stage(0)
    for step in range(steps + 2):  # the first two warm the memory up
        if step == 2:
            begin, driver_s, copy_s = time.perf_counter(), 0.0, 0.0
        start_s = time.perf_counter()
        stage(step + 1)
        running = group.call("train_step", [(step, 0)], compute_s)
        driver_s += time.perf_counter() - start_s
        if before is not None:
            copy_s += max(ray.get(before))
            if step == 2:
                begin = time.perf_counter()  # step 1 ended here
        before = running
    copy_s += max(ray.get(before))
    wall_s = time.perf_counter() - begin
    return row("raysvc", mb, steps, compute_s, wall_s, driver_s, copy_s, 0.0)


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
    driver_s = copy_s = begin = 0.0
    for step in range(steps + 2):
        if step == 2:
            begin, driver_s, copy_s = time.perf_counter(), 0.0, 0.0
        start_s = time.perf_counter()
        refs = call()
        driver_s += time.perf_counter() - start_s
        copy_s += max(ray.get(refs))
    return row(name, mb, steps, compute_s, time.perf_counter() - begin, driver_s, copy_s, mb)


def row(
    name: str,
    mb: float,
    steps: int,
    compute_s: float,
    wall_s: float,
    driver_s: float,
    copy_s: float,
    put: float,
) -> dict[str, Any]:
    return {
        "who": name,
        "batch_mb": mb,
        "driver_mb": put,
        "driver_ms": round(driver_s / steps * 1e3, 2),
        "worker_copy_ms": round(copy_s / steps * 1e3, 2),
        "critical_ms": round((wall_s / steps - compute_s) * 1e3, 2),
        "compute_ms": compute_s * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 50, 1000])
    parser.add_argument("--compute-s", type=float, nargs="+", default=[0.2, 0.6, 6.0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--only", choices=["raysvc", "mesh", "put"], help="one of them, one size; for the script itself"
    )
    options = parser.parse_args()
    if options.only:
        measure = {"raysvc": measure_raysvc, "mesh": measure_mesh, "put": measure_put}[options.only]
        print(json.dumps(measure(options.mb[0], options.steps, options.compute_s[0])), flush=True)
        return
    from common import show

    rows = []
    for mb, compute_s in zip(options.mb, options.compute_s, strict=False):
        for who in ("raysvc", "put") if options.no_peers else ("raysvc", "mesh", "put"):
            python = str(PEERS) if who == "mesh" else sys.executable
            size = ["--mb", str(mb), "--compute-s", str(compute_s), "--steps", str(options.steps)]
            command = [python, __file__, "--only", who, *size]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{who} failed:\n{done.stderr[-3000:]}")
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    show("Dispatch of a global batch to two workers", rows, steps=options.steps)


if __name__ == "__main__":
    main()
