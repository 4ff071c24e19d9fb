"""How long a trainer waits for data, against the compute time of a step.

    python benchmarks/serve.py [--seconds 2] [--rows 256] [--tokens 400] [--two-nodes] [--no-peers]

One trainer on one rank: wait for a batch of padded arrays in this process, then "compute" (sleep) so many ms.
- `serial`: collated here, in the loop, by raysvc's own collator;
- `raysvc k`: from a batch server by rank mode, k steps ahead;
- `torchdata`: StatefulDataLoader, two workers that read the same parts and pad with torch, two batches ahead each;
- `ray data`: `iter_torch_batches` over the same Arrow parts with the same padding, two batches ahead.
Stall is the share of the loop in which the trainer waited; overhead is a step's time less its compute.
torchdata is installed by this script below `.bench/serve`, and uses the torch of this environment.
With --two-nodes the server runs on another node of a `ray.cluster_utils.Cluster`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show

COMPUTE_MS = (5, 20, 50, 200)
BENCH = Path(__file__).parents[1] / ".bench" / "serve"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--two-nodes", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    start_ray(options.two_nodes)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)


def start_ray(two_nodes: bool) -> None:
    import ray

    if not two_nodes:
        quiet_ray(num_cpus=4, object_store_mb=700)
        return
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 400 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    cluster.add_node(num_cpus=2, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")


def measure(folder: Path, options: argparse.Namespace) -> None:
    from raysvc.actors.launch import start_server
    from raysvc.actors.serving import ServeSpec
    from raysvc.config import PlanConfig

    steps_per_epoch = 40
    uri = make_entry(folder / "cache", options.rows * steps_per_epoch, options.tokens)
    plan = PlanConfig(batch_size=options.rows, epochs=200, micro_batch_size=options.rows)
    spec = ServeSpec(
        name="bench", entry_uri=uri, plan=plan, pad_token_id=0, journal=str(folder / "journal"), num_cpus=0.5
    )
    server = start_server(spec, detached=True)
    systems: dict[str, Callable[[], Iterator[Any]]] = {"serial": lambda: serial(spec)}
    for depth in (0, 1, 2, 4):
        systems[f"raysvc {depth}"] = lambda depth=depth: served(depth)
    if not options.no_peers and not options.two_nodes:
        systems["torchdata"] = lambda: torchdata(uri, options.rows)
        systems["ray data"] = lambda: ray_data(uri, options.rows)
    rows = []
    for compute_ms in COMPUTE_MS:
        for name, make in systems.items():
            rows.append(
                {"compute ms": compute_ms, "system": name, **loop(make(), compute_ms / 1e3, options.seconds)}
            )
            print(rows[-1], file=sys.stderr, flush=True)
    show("Stall against compute", rows, **times(server), batch=[options.rows, options.tokens])


def loop(batches: Iterator[Any], compute_s: float, seconds: float) -> dict[str, float]:
    """Stall and overhead of the loop, after three steps of warming up."""
    waits: list[float] = []
    begin = stop = 0.0
    for number in range(100_000):
        asked = time.perf_counter()
        next(batches)
        came = time.perf_counter()
        if number == 3:
            begin = asked
        if number >= 3:
            waits.append(came - asked)
        time.sleep(compute_s)
        stop = time.perf_counter()
        if number >= 12 and stop - begin > seconds:
            break
    batches.close()  # type: ignore[attr-defined]
    elapsed = stop - begin
    return {
        "stall %": round(100 * sum(waits) / elapsed, 2),
        "overhead ms": round(1e3 * (elapsed / len(waits) - compute_s), 2),
        "median wait ms": round(1e3 * statistics.median(waits), 2),
        "steps": len(waits),
    }


def serial(spec: Any) -> Iterator[Any]:
    from raysvc.actors.making import Recipe
    from raysvc.actors.stream import EntryStream

    stream = EntryStream(spec.entry_uri, {}, Recipe(spec.plan, 0))
    for step in range(stream.schedule.num_steps):
        yield touched(stream.make(step, (1,))[1][0].arrays)


def served(depth: int) -> Iterator[Any]:
    from raysvc.client import attach

    with attach("bench", dp_size=1, rank=0, group="bench", look_ahead_steps=depth) as client:
        client.rewind(0)
        for step in client.steps():
            yield touched(step.shards[0].arrays)
            client.commit(step.index)


def touched(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays, one cell of every page read."""
    for array in arrays.values():
        array.reshape(-1).view(np.uint8)[::4096].sum()
    return arrays


class Rows:
    """A map-style dataset over the entry's rows, as a user writes one."""

    def __init__(self, uri: str) -> None:
        self.uri, self.entry = uri, None

    def __len__(self) -> int:
        from raysvc.cache.reader import open_entry

        return open_entry(self.uri).num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.entry is None:
            from raysvc.cache.reader import open_entry

            self.entry = open_entry(self.uri)
        batch = self.entry.read(np.array([index]))
        return {"input_ids": batch.tokens["input_ids"], "loss_mask": batch.tokens["loss_mask"]}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The four arrays that raysvc makes, by torch."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [
        torch.where(torch.tensor(row["loss_mask"]) > 0, each, -100)
        for row, each in zip(rows, ids, strict=True)
    ]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "position_ids": pad_sequence([torch.arange(len(each)) for each in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def torchdata(uri: str, batch_size: int) -> Iterator[Any]:
    if not BENCH.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(BENCH),
            "torchdata",
        ]
        subprocess.run(command, check=True)
    sys.path.append(str(BENCH))
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        Rows(uri), batch_size=batch_size, shuffle=True, num_workers=2, collate_fn=padded,
        multiprocessing_context="forkserver", persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


def ray_data(uri: str, batch_size: int) -> Iterator[Any]:
    import pyarrow as pa
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    tables = [
        pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in sorted(Path(uri).glob("*.arrow"))
    ]
    data = ray.data.from_arrow(tables).select_columns(["input_ids", "loss_mask"])

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        return padded([{"input_ids": i, "loss_mask": m} for i, m in zip(*batch.values(), strict=True)])

    while True:
        yield from data.iter_torch_batches(
            batch_size=batch_size, collate_fn=collate, prefetch_batches=2, drop_last=True
        )


def times(server: Any) -> dict[str, float]:
    """Seconds of attach, first batch, recovery after a kill; milliseconds of a round trip."""
    import ray

    from raysvc.client import attach

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
