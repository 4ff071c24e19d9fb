"""Seconds from the command to the first trained step, with a warm cache; Ray's own start is named.

    python benchmarks/startup.py [--runs 3]

Each run is a fresh process that does what `raysvc train` does, on rows that were tokenized before; the
clock starts before the process does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import show

PHASES = ("python and imports", "ray start", "cache lookup and rest", "workers, server and first step")


def child(job: str) -> None:
    """One run, in a process of its own; prints when each thing happened, in seconds since the parent's clock."""
    begin = float(os.environ["STARTUP_BEGIN"])
    marks = {"imported": 0.0, "ray": 0.0, "start": 0.0, "first step": 0.0}
    from raysvc import cluster
    from raysvc.progress import Tick
    from raysvc.training import train_loop

    marks["imported"] = time.time() - begin
    connect = cluster.connect

    def timed(address: str | None = None, *, need_cpus: float = 0) -> str:
        before = time.time()
        where = connect(address, need_cpus=need_cpus)
        marks["ray"] += time.time() - before
        return where

    cluster.connect = timed

    def progress(tick: Tick) -> None:
        if tick.phase == "start":
            marks["start"] = time.time() - begin
        if tick.phase == "train" and not marks["first step"]:
            marks["first step"] = time.time() - begin

    train_loop.train(job, progress=progress)
    print(json.dumps(marks), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        from raysvc.cli.demo import write_job

        job = write_job(Path(folder) / "demo", 1000)
        job.write_text(job.read_text() + "\n")
        marks = [run(str(job), number) for number in range(options.runs + 1)][
            1:
        ]  # the first one fills the cache
    rows = []
    for phase, values in zip(PHASES, zip(*(phases(mark) for mark in marks), strict=True), strict=True):
        rows.append(
            {
                "phase": phase,
                "median s": statistics.median(values),
                "min s": min(values),
                "max s": max(values),
            }
        )
    totals = [mark["first step"] for mark in marks]
    share = statistics.median(mark["ray"] / mark["first step"] for mark in marks)
    rows.append(
        {"phase": "total", "median s": statistics.median(totals), "min s": min(totals), "max s": max(totals)}
    )
    show("Start-up with a warm cache", rows, share_of_ray_start=share)


def phases(mark: dict[str, float]) -> tuple[float, ...]:
    lookup = mark["start"] - mark["imported"]
    rest = mark["first step"] - mark["start"] - mark["ray"]
    return mark["imported"], mark["ray"], lookup, rest


def run(job: str, number: int) -> dict[str, float]:
    text = Path(job).read_text()
    own = Path(job).with_name(f"job-{number}.yaml")
    own.write_text(text.replace("run_dir: runs/demo", f"run_dir: runs/{number}\n  max_steps: 2"))
    env = {**os.environ, "STARTUP_BEGIN": str(time.time())}
    command = [sys.executable, __file__, "--child", str(own)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    marks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return marks


if __name__ == "__main__":
    main()
