"""How long a run waits for its first step: trained while the entry is built, and after it was built.

    python benchmarks/first_step.py ../shared/data/sgd_train.jsonl --tokenizer DIR [--mb 1000] [--steps 20]

A file of `--mb` MB is made by repeating the rows with other numbers in their texts. Each line of the table is a fresh process with an empty cache
that trains a tiny model for so many steps, once with `plan.shuffle: window` and once with `full`; times are from the start of the process.
A step begins when the one before it was given to the workers. MB are of the largest process of a kind: its own pages, without mapped files,
after half of its life and at the end. `--only window` leaves the other line out. With `--s3 25` rows and cache lie in an S3 server (moto) whose
connections carry 25 MB/s each; the rows are cut into `--files` objects.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import show
from slow_s3 import slow_s3, upload

SHUFFLES = ("window", "full")
KINDS = {
    "driver": "--child",
    "server": "ray::BatchServer",
    "builder": "ray::Builder",
    "pool": "SliceWorker",
    "worker": "ray::CausalLMWorker",
}


def repeated(source: Path, target: Path, num_bytes: int) -> None:
    """Write the rows of a file again and again, each time with other numbers."""
    lines, written, round_ = source.read_text().splitlines(), 0, 0
    with target.open("w") as file:
        while written < num_bytes:
            for line in lines:
                changed = re.sub(
                    r'("content": "[^"]{0,40})', rf"\g<1> {round_ * 7919 % 100_003} ", line, count=1
                )
                written += file.write(changed + "\n")
                if written >= num_bytes:
                    return
            round_ += 1


def own_mb(root: int) -> dict[str, float]:
    """Kind of process -> MB of the largest one, of a process and all that descend from it."""
    parents, facts = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            found = re.search(r"RssAnon:\s+(\d+)", (folder / "status").read_text())
            facts[int(folder.name)] = (folder / "cmdline").read_text(), int(found[1]) / 1e3 if found else 0.0
        except OSError:
            continue  # it has ended
    largest: dict[str, float] = {}
    for pid, (command, megabytes) in facts.items():
        above = pid
        while above not in (root, 0):
            above = parents.get(above, 0)
        kind = next((kind for kind, name in KINDS.items() if name in command), "")
        if above == root and kind:
            largest[kind] = max(largest.get(kind, 0.0), megabytes)
    return largest


def child(job: str) -> None:
    """One run; prints when steps were trained."""
    begin, at = float(os.environ["FIRST_STEP_BEGIN"]), []
    from raysvc.training.train import train

    def stop() -> bool:
        at.append(time.time() - begin)
        return False

    summary = train(job, should_stop=stop).metrics
    print(json.dumps({"at": at, "stalls": summary["stalls"]["by_cause"], "end": time.time() - begin}))


def half_and_end(samples: list[dict[str, float]], kind: str) -> str:
    """MB of a kind of process, after half of its life and at the end."""
    lives = [sample[kind] for sample in samples if kind in sample]
    return f"{lives[len(lives) // 2]:.0f}, {lives[-1]:.0f}" if lives else "-"


def measured(
    folder: Path, rows: str, tokenizer: str, shuffle: str, steps: int, options: dict[str, str] | None = None
) -> dict[str, Any]:
    """One line of the table."""
    root = f"s3://rows/cache-{shuffle}" if options else str(folder / f"cache-{shuffle}")
    job = {
        "source": {"path": rows, "format": "chat", "storage_options": options or {}},
        "tokenizer": tokenizer,
        "max_length": 512,
        "truncation": "keep_start",
        "cache": {"root": root, "storage_options": options or {}},
        "plan": {"batch_size": 2, "shuffle": shuffle},
        "server": {"name": f"first-{shuffle}"},
        "trainer": {"dp_size": 1, "model": "tiny", "run_dir": str(folder / shuffle), "max_steps": steps},
    }
    path = folder / f"{shuffle}.json"
    path.write_text(json.dumps(job))
    environment = {**os.environ, "FIRST_STEP_BEGIN": str(time.time()), "RAY_ADDRESS": "local"}
    command = [sys.executable, __file__, "--child", str(path)]
    samples: list[dict[str, float]] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        while running.poll() is None:
            samples.append(own_mb(running.pid))
            time.sleep(1.0)
        assert running.stdout is not None
        said = running.stdout.read()
    found = json.loads(said.splitlines()[-1])
    made = 0 if options else len(list((folder / f"cache-{shuffle}").rglob("part-*.arrow")))
    return {
        "shuffle": shuffle,
        "first step begins s": round(found["at"][0], 1),
        f"step {steps} begins s": round(found["at"][-1], 1),
        "end s": round(found["end"], 1),
        "waited for rows s": round(found["stalls"].get("rows not tokenized yet", 0.0), 1),
        "slices made": made,
        **{f"{kind} MB": half_and_end(samples, kind) for kind in KINDS},
    }


def main() -> None:
    """Make the rows, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--tokenizer")
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=SHUFFLES, nargs="*", default=SHUFFLES)
    parser.add_argument("--s3", type=float, help="MB/s of a connection")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        repeated(arguments.rows, rows, arguments.mb * 10**6)
        with ExitStack() as stack:
            options, source = None, str(rows)
            if arguments.s3:
                options = stack.enter_context(slow_s3(arguments.s3 * 1e6))
                source = upload(rows, arguments.files, options)
            table = [
                measured(Path(folder), source, arguments.tokenizer, shuffle, arguments.steps, options)
                for shuffle in arguments.only
            ]
    show(f"The first step of {arguments.mb} MB", table)


if __name__ == "__main__":
    main()
