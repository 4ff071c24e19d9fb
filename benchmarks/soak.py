"""Whether a long run stays flat: memory of server and client, refs, object store.

    python benchmarks/soak.py [--steps 1000]

Every step is fetched two ahead, opened (its arrays are read), committed and let go, two ranks, two mini-batches.
Figures are taken every tenth of the run; growth is the last one less the median of the second to fourth tenth.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    quiet_ray()
    with tempfile.TemporaryDirectory() as folder:
        rows = soak(Path(folder), options.steps)
    growth = {name: rows[-1][name] - statistics.median(row[name] for row in rows[1:4]) for name in rows[0]}
    show("Soak", [*rows, {**growth, "step": "growth"}], steps=options.steps)


def soak(folder: Path, steps: int) -> list[dict[str, Any]]:
    import ray

    from raysvc.actors.launch import start_server, stop_server, wait_for
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.client.batch_client import attach
    from raysvc.job.config import PlanConfig

    uri = make_entry(folder / "cache", 6400, 300)
    epochs = -(-steps // 100)
    plan = PlanConfig(batch_size=64, mini_batch_size=32, epochs=epochs)
    spec = ServeSpec(name="soak", entry_uri=uri, plan=plan, pad_token_id=0, journal=str(folder / "journal"))
    server = start_server(spec, detached=True)
    rows: list[dict[str, Any]] = []
    with attach("soak", dp_size=2, look_ahead_steps=2) as client:
        begin = time.perf_counter()
        for step in client.steps(stop=steps):
            for mini in step.mini_batches:
                for shard in ray.get(list(mini.shards)):
                    assert shard[1]["input_ids"].sum() > 0
            client.commit(step.index)
            del step, mini, shard
            if (client.frontier * 10) % steps == 0:
                stats = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
                rows.append({"step": client.frontier, **figures(stats, begin)})
    stop_server("soak")
    return rows


def figures(stats: dict[str, Any], begin: float) -> dict[str, Any]:
    """MB, counts and seconds at this moment."""
    import ray
    from ray._private.internal_api import memory_summary

    gc.collect()
    summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    used = re.search(r"Plasma memory usage (\d+) MiB", summary)
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    refs = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return {
        "server RSS MB": round(stats["rss_bytes"] / 2**20, 1),
        "client RSS MB": round(rss / 2**20, 1),
        "live refs": len(refs),
        "store MB": int(used.group(1)) if used else None,
        "s": round(time.perf_counter() - begin, 1),
    }


if __name__ == "__main__":
    main()
