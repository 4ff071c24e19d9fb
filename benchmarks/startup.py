"""The first and the last seconds of a command: what is done when, from the start of the process.

    python benchmarks/startup.py [--runs 3]

Each run is `raysvc train` in a fresh process, on rows that were tokenized before; the clock starts before the process
does, and stops when it is gone. In the same run, processes of their own measure what cannot be saved: Ray's own start, and
one import of torch. A timeline shows the run of median length.

Figures: `raysvc show` takes 0.83 to 0.95 s, `plan` 0.85 to 0.98, `cache ls` 0.14, `--help` 0.07; the first step comes 5.7 to 6.3 s after the
start of a command, of which Ray's own start is 2.8 to 3.7. On a slow day all of these were 1.4 to 1.6 times as long.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import show

Spans = dict[str, tuple[float, float]]  # name -> (begin, end), seconds of the parent's clock
WIDTH = 60
ALLOWED_S = 1.5  # beside Ray's start and one import of torch
RAY = "import ray; ray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=40)"
FLOORS = {"Ray's own start": f"import time; t=time.time(); {RAY}; print(time.time()-t)",
          "one import of torch": "import time; t=time.time(); import torch; print(time.time()-t)"}  # fmt: skip


def child(job: str) -> None:
    """One run, in a process of its own; prints when each thing happened."""
    begin = float(os.environ["STARTUP_BEGIN"])
    spans: Spans = {}
    import raysvc.cli.train as command
    from raysvc import cluster
    from raysvc.cli.__main__ import main
    from raysvc.training import train as door

    def note(name: str, since: float) -> None:
        spans.setdefault(name, (since, time.time() - begin))

    def timed(place: Any, attribute: str, name: str) -> None:
        real: Callable[..., Any] = getattr(place, attribute)

        def run(*args: Any, **kwargs: Any) -> Any:
            since = time.time() - begin
            try:
                return real(*args, **kwargs)
            finally:
                note(name, since)

        setattr(place, attribute, run)

    note("python and imports", 0.0)
    timed(cluster, "_connect", "Ray starts")
    real_train, real_starting, real_summary = door.train, door.starting, command.show_summary

    def train(*args: Any, progress: Any, **kwargs: Any) -> Any:
        def seen(tick: Any) -> None:
            if tick.phase == "train":
                note("first step", spans["waiting for the workers"][1])
            progress(tick)

        return real_train(*args, progress=seen, **kwargs)

    def starting(*args: Any, **kwargs: Any) -> Any:
        ray_there = real_starting(*args, **kwargs)
        from raysvc.actors.dispatch.worker_group import WorkerGroup  # only here: their imports are measured
        from raysvc.training import train_loop

        timed(train_loop, "entry_or_build", "the entry is looked up")
        timed(train_loop, "serve_entry", "the server opens")
        timed(train_loop, "_attach_when_free", "the driver attaches")
        timed(WorkerGroup, "wait_for_setup", "waiting for the workers")
        return ray_there

    def summary(*args: Any) -> None:
        real_summary(*args)
        spans["end"] = (time.time() - begin, 0.0)
        print(json.dumps(spans), flush=True)

    door.train, door.starting, command.show_summary = train, starting, summary
    sys.argv = ["raysvc", "train", "-c", job]
    main()


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
        runs = [run(job, number) for number in range(options.runs + 1)][1:]  # the first one fills the cache
        floors = {
            name: statistics.median(floor(code) for _ in range(options.runs)) for name, code in FLOORS.items()
        }
    runs.sort(key=lambda spans: spans["first step"][1])
    draw(runs[len(runs) // 2])
    first = [spans["first step"][1] for spans in runs]
    bound = sum(floors.values()) + ALLOWED_S
    rows = [{"what": name, "median s": statistics.median(spans[name][1] - spans[name][0] for spans in runs)}
            for name in runs[0]]  # fmt: skip
    rows += [{"what": name, "median s": seconds} for name, seconds in floors.items()]
    rows += [{"what": f"allowed: both and {ALLOWED_S} s", "median s": bound},
             {"what": "command to first step", "median s": statistics.median(first)}]  # fmt: skip
    ends = sorted(round(spans["end"][1] - spans["end"][0], 2) for spans in runs)
    show("Start-up with a warm cache", rows,
         within_what_is_allowed=statistics.median(first) <= bound, ends_s=ends)  # fmt: skip


def floor(code: str) -> float:
    """Seconds that a line of Python takes in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def run(job: Path, number: int) -> Spans:
    """One run of two steps; `end` is from its summary to the end of the process, in seconds."""
    own = job.with_name(f"job-{number}.yaml")
    own.write_text(job.read_text().replace("run_dir: runs/demo", f"run_dir: runs/{number}\n  max_steps: 2"))
    begin = time.time()
    env = {**os.environ, "STARTUP_BEGIN": str(begin)}
    command = [sys.executable, __file__, "--child", str(own)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    spans: Spans = json.loads(done.stdout.splitlines()[-1])
    return {**spans, "end": (spans["end"][0], time.time() - begin)}


def draw(spans: Spans) -> None:
    """One line a span, one scale."""
    whole = max(end for _, end in spans.values())
    for name, (begin, end) in sorted(spans.items(), key=lambda item: tuple(item[1])):
        bar = " " * round(WIDTH * begin / whole) + "█" * max(1, round(WIDTH * (end - begin) / whole))
        print(f"{name:<24} {begin:6.2f} – {end:6.2f} s |{bar:<{WIDTH}}|")
    print()


if __name__ == "__main__":
    main()
