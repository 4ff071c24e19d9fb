"""What planning one step costs, against the number of rows up to 1e9, and what a report costs.

    python benchmarks/plan.py [--repeats 25]

Lengths are a thousand numbers seen as often as there are rows; like a memory map, they answer only for the rows of a
step, which is all that planning asks for. Steps are taken from all over the run, so nothing is found in a
cache. `memory` is the peak that Python and numpy allocate while a plan is made and its steps are planned.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # it has a tokenize.py

import argparse  # noqa: E402
import time  # noqa: E402
import tracemalloc  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

sys.path.append(str(HERE))

SIZES = (1_000, 1_000_000, 1_000_000_000)
BATCHES = (32, 256, 1024)
DP_SIZE = 8
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {},
    "padded, block(4096)": {"shuffle": "block(4096)"},
    "padded, by tokens": {"micro_batch_tokens": 16384, "oversize": "alone"},
    "packed": {"layout": "packed", "micro_batch_tokens": 8192, "oversize": "alone"},
}


class Repeated:
    """A thousand lengths, seen again and again as `num_rows` of them, without memory for more."""

    def __init__(self, num_rows: int) -> None:
        rng = np.random.default_rng(0)
        self._some = np.clip(rng.lognormal(6, 0.6, 1000), 16, 4096).astype(np.int32)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self._some[rows % 1000]


def repeated_rows(num_rows: int) -> Any:
    """Rows of a plan with such lengths."""
    from raysvc.plan.groups import Groups
    from raysvc.plan.plan_rows import HeldRows

    return HeldRows(Repeated(num_rows), Groups.singles(num_rows))  # type: ignore[arg-type]


def plan_cost(num_rows: int, batch_size: int, shape: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Milliseconds of one step, and memory."""
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan

    config = PlanConfig(batch_size=batch_size, **shape)
    plan = Plan(config, repeated_rows(num_rows))
    last = plan.schedule.num_steps - 1
    steps = [number * last // repeats for number in range(repeats + 1)]
    times = []
    for step in steps:
        start = time.perf_counter()
        plan.step(step, DP_SIZE)
        times.append((time.perf_counter() - start) * 1e3)
    tracemalloc.start()
    again = Plan(config, repeated_rows(num_rows))
    for step in steps[:3]:
        again.step(step, DP_SIZE)
    memory = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return {"ms per step": sorted(times)[len(times) // 2], "best ms": min(times), "memory MB": memory}


def mixture_cost(batch_size: int, repeats: int) -> dict[str, Any]:
    """A mixture of ten entries of 1e8 rows."""
    from raysvc.job.config import PlanConfig
    from raysvc.plan.mixture import Mixture, MixtureSource, Stage
    from raysvc.plan.plan import Plan

    sources = tuple(MixtureSource(f"source-{number}", 10**8) for number in range(10))
    mixture = Mixture(sources, (Stage(0, tuple(range(10**7, 11 * 10**7, 10**7))),))
    plan = Plan(PlanConfig(batch_size=batch_size), repeated_rows(10**9), mixture=mixture)
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        plan.step(number * plan.schedule.num_steps // repeats, DP_SIZE)
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms per step": sorted(times)[len(times) // 2], "best ms": min(times)}


def report_cost(num_rows: int) -> float:
    """Seconds of the report of a plan."""
    from raysvc.collate.plan_report import plan_report
    from raysvc.collate.shard_bytes import ColumnBytes
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan

    plan = Plan(PlanConfig(batch_size=256), repeated_rows(num_rows))
    start = time.perf_counter()
    plan_report(plan, DP_SIZE, ColumnBytes(per_cell=13, per_row=24))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25)
    repeats = parser.parse_args().repeats

    from common import show

    table = []
    for name, shape in SHAPES.items():
        for num_rows in SIZES:
            for batch_size in BATCHES:
                if batch_size <= num_rows:
                    cost = plan_cost(num_rows, batch_size, shape, repeats)
                    table.append({"plan": name, "rows": num_rows, "batch": batch_size, **cost})
    for batch_size in BATCHES:
        cost = mixture_cost(batch_size, repeats)
        table.append({"plan": "mixture of 10 entries", "rows": 10**9, "batch": batch_size, **cost})
    reports = {f"{num_rows:.0e}": report_cost(num_rows) for num_rows in SIZES}
    show(f"Planning one step for {DP_SIZE} ranks", table, report_seconds=reports)
    print(
        "a report of 64 sampled steps takes "
        + ", ".join(f"{s:.2f} s for {n} rows" for n, s in reports.items())
    )


if __name__ == "__main__":
    main()
