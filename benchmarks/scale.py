"""What a run of 1e10 rows, 1000 parallel parts, 1024 ranks or 200 trainers would cost, from constants measured here.

    python benchmarks/scale.py [--ray] [--json-constants FILE]

Three steps, each printed as a table:
1. constants, measured on this machine in about a minute (`--ray` adds those of Ray: results of one call, actor calls);
2. growth: each quantity of the design at today's and the large size, by the law that the code follows;
3. a build, simulated event by event: workers that come up late, slices, commits to the store, nodes lost on the way.
Laws are stated beside each line; what is not measured (latency of a store, start of a node) is an argument of `Build`.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import quiet_ray, show


def best_of(call: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def manifest_constants(parts: int = 2000, many: int = 20_000) -> dict[str, float]:
    """What one part costs a manifest, and what many in a table cost it."""
    from raysvc.cache.entry import Entry
    from raysvc.cache.key import cache_key
    from raysvc.cache.manifest import REQUIRED, Manifest
    from raysvc.cache.names import MANIFEST, new_part
    from raysvc.cache.part_info import PartInfo
    from raysvc.cache.store.open import open_store

    infos = tuple(PartInfo(new_part(n)[0], 1000, 10**6, 10**7, "0" * 32, 64, "1" * 32) for n in range(many))
    manifest = Manifest(cache_key({}), infos[:parts], REQUIRED, {}, {})
    data = manifest.to_json()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        table = Manifest(cache_key({}), infos, REQUIRED, {}, {}).with_table(store, manifest.key).to_json()
        store.create(f"{manifest.key}/{MANIFEST}", table)
        opened = best_of(lambda: len(Entry.open(store, manifest.key).slice_starts))
    return {
        "manifest_bytes_of_many": len(table),
        "open_s_of_many": opened,
        "manifest_bytes_per_part": len(data) / parts,
        "manifest_write_s_per_part": best_of(manifest.to_json) / parts,
        "manifest_read_s_per_part": best_of(lambda: Manifest.from_json(data, "x")) / parts,
    }


def plan_constants() -> dict[str, float]:
    """What a plan costs at a number of rows: construction, and a step of 1024 rows for 8 and 1024 ranks."""
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan

    found: dict[str, float] = {}
    for rows in (10**5, 10**6, 10**7):
        lengths = np.random.default_rng(0).integers(16, 2048, rows).astype(np.int32)
        config = PlanConfig(batch_size=1024, micro_batch_tokens=16384)
        found[f"plan_init_s_{rows:.0e}"] = best_of(lambda c=config, n=lengths: Plan(c, n), 2)  # type: ignore[misc]
        plan = Plan(config, lengths)
        found[f"plan_step_s_{rows:.0e}"] = best_of(lambda p=plan: p.step(3, 8))  # type: ignore[misc]
    config = PlanConfig(batch_size=4096, micro_batch_tokens=16384)
    plan = Plan(config, lengths)
    for ranks in (8, 64, 1024):
        found[f"plan_step_s_{ranks}_ranks"] = best_of(lambda p=plan, r=ranks: p.step(3, r), 3)  # type: ignore[misc]
    found["length_bytes_per_row"] = float(lengths.itemsize)
    return found


def lease_constants() -> dict[str, float]:
    """One commit or heartbeat, as the server decides it."""
    from raysvc.actors.server.reader_lease import ReaderLease

    lease = ReaderLease("", "x").attach("a", time.monotonic(), 30.0, fence=1)

    def calls() -> None:
        one = lease
        for step in range(1000):
            now_s = time.monotonic()
            one = one.commit(one.fence, step, 0, now_s).beat(one.fence, 0, now_s)

    return {"commit_s": best_of(calls) / 1000}


class Answers:
    """An actor whose call returns many small objects."""

    def many(self, count: int) -> Any:
        """`count` objects of 1 KB."""
        return tuple(np.zeros(256, np.float32) for _ in range(count))


def ray_constants() -> dict[str, float]:
    """A call that returns as many objects as ranks, as `fetch` does."""
    import ray

    quiet_ray(2)
    actor = ray.remote(Answers).remote()
    found = {}
    for count in (1, 64, 1024):

        def call(count: int = count) -> None:
            refs = (
                actor.many.options(num_returns=count).remote(count) if count > 1 else [actor.many.remote(1)]
            )
            ray.wait(refs, num_returns=len(refs), timeout=60)

        call()
        found[f"call_s_{count}_results"] = best_of(call, 5)
    ray.shutdown()
    return found


@dataclasses.dataclass(frozen=True)
class Build:
    """A build on a growing pool.

    Attributes:
        slices: of equal work.
        slice_s: seconds of one, on one worker.
        workers: the pool's limit.
        node_s: until a worker that was asked for works (node, image, tokenizer).
        commit_s: two PUTs and their latency.
        losses_per_hour: of one worker; each costs its slice.
        manifest_s: writing the manifest, and listing receipts.
    """

    slices: int
    slice_s: float
    workers: int
    node_s: float = 120.0
    commit_s: float = 0.1
    losses_per_hour: float = 0.0
    manifest_s: float = 0.0


def simulate(build: Build, seed: int = 0) -> dict[str, float]:
    """Wall time, work that was done twice, and the share of paid worker time that made slices."""
    rng = random.Random(seed)
    ready = [
        (build.node_s * rng.uniform(0.8, 1.6), worker) for worker in range(min(build.workers, build.slices))
    ]
    heapq.heapify(ready)
    left, lost, paid, end = build.slices, 0, 0.0, 0.0
    rate = build.losses_per_hour / 3600
    while left:
        now, worker = heapq.heappop(ready)
        took = build.slice_s * rng.uniform(0.9, 1.3) + build.commit_s
        dies_in = rng.expovariate(rate) if rate else float("inf")
        if dies_in < took:
            lost += 1
            paid += dies_in
            heapq.heappush(ready, (now + dies_in + build.node_s, worker))
            continue
        left -= 1
        paid += took
        end = max(end, now + took)
        heapq.heappush(ready, (now + took, worker))
    useful = build.slices * build.slice_s
    return {
        "wall_s": end + build.manifest_s,
        "slices_done_twice": float(lost),
        "paid_s": paid,
        "useful_share": useful / paid,
    }


def growth(c: dict[str, float]) -> list[dict[str, Any]]:
    """Quantity, its law, today's size and the large one."""
    rows, parts, ranks, trainers = 10**10, 20_000, 1024, 200

    def line(what: str, law: str, small: str, large: str) -> dict[str, Any]:
        return {"quantity": what, "law": law, "small": small, "large": large}

    per_part, read_s = c["manifest_bytes_per_part"], c["manifest_read_s_per_part"]
    lengths, open_rows = c["length_bytes_per_row"], 72 * 500_000
    beats = trainers * 3 / 30.0
    return [
        line("manifest", f"{per_part:.0f} B a part up to 1 MiB, then one checksum for 64 parts", f"{per_part * 64 / 1e3:.0f} kB (64)", f"{c['manifest_bytes_of_many'] / 1e3:.0f} kB ({parts})"),
        line("opening an entry", f"{read_s * 1e6:.1f} us a part up to 1 MiB, then a read of 16 B a part", f"{read_s * 64 * 1e3:.1f} ms", f"{c['open_s_of_many'] * 1e3:.0f} ms"),
        line("lengths in each server, window", f"{lengths:.0f} B a row of the open slices", f"{lengths * 1e7 / 1e6:.0f} MB (1e7 rows)", f"{lengths * open_rows / 1e6:.0f} MB (72 slices of 500,000 rows)"),
        line("lengths, full: above 256 MB a mapped file", f"{lengths:.0f} B a row", f"{lengths * 1e7 / 1e6:.0f} MB (1e7 rows)", f"{lengths * rows / 1e9:.0f} GB (1e10 rows)"),
        line("order of rows", "O(1) memory", "0", "0"),
        line("plan of a step, 1024 rows", "rows of the step; rows of the entry only by cache misses", f"{c['plan_step_s_1e+05'] * 1e3:.1f} ms (1e5 rows)", f"{c['plan_step_s_1e+07'] * 1e3:.1f} ms (1e7 rows)"),
        line("plan of a step, 4096 rows", "ranks", f"{c['plan_step_s_8_ranks'] * 1e3:.1f} ms (8 ranks)", f"{c['plan_step_s_1024_ranks'] * 1e3:.1f} ms ({ranks} ranks)"),
        line("commit or heartbeat, in the server", "1 a step, 3 a lease", f"{c['commit_s'] * 1e6:.0f} us", f"{beats * c['commit_s'] * 1e3:.2f} ms/s for {trainers} trainers, if one server had them all"),
        *(
            [line("answer of fetch", "results = mini-batches * ranks", f"{c['call_s_64_results'] * 1e3:.1f} ms (64)", f"{c['call_s_1024_results'] * 1e3:.0f} ms ({ranks})")]
            if "call_s_1024_results" in c
            else []
        ),
    ]  # fmt: skip


def builds(c: dict[str, float]) -> list[dict[str, Any]]:
    """1e10 rows of 1 kB in 20 000 slices of 500 MB, at 20 MB/s a worker (tokenizing, reading and writing)."""
    found = []
    for workers in (64, 250, 1000):
        for losses in (0.0, 0.2):
            build = Build(
                20_000,
                25.0,
                workers,
                losses_per_hour=losses,
                manifest_s=20_000 * c["manifest_write_s_per_part"] + 20,
            )
            outcome = {name: round(value, 3) for name, value in simulate(build).items()}
            found.append({"workers": workers, "losses per worker and hour": losses, **outcome})
    return found


def main() -> None:
    """Measure, project, simulate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray", action="store_true", help="measure Ray's constants too")
    parser.add_argument("--json-constants", type=Path, help="also write the constants here")
    arguments = parser.parse_args()
    constants = {**manifest_constants(), **plan_constants(), **lease_constants()}
    if arguments.ray:
        constants |= ray_constants()
    show("Constants", [{"constant": name, "value": value} for name, value in constants.items()])
    show("Growth", growth(constants))
    show("A build of 1e10 rows", builds(constants))
    if arguments.json_constants:
        arguments.json_constants.write_text(json.dumps(constants, indent=1))


if __name__ == "__main__":
    main()
