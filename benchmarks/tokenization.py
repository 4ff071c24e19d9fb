"""Tokenization beside what people use: rows and tokens per second, one core and two.

    python benchmarks/tokenization.py [--quick] [--out results.json]

Contenders, each in fresh processes pinned to their cores:
- ours: JSON lines -> parse, render, encode, mask, verification, sample against the reference -> Arrow file;
- datasets.map: `apply_chat_template(return_assistant_tokens_mask=True)` row by row;
- skyrl: `tokenize_chat_example` of SkyRL 0.3.0, in an environment of its own (`.bench/peers`);
- encode_batch: `tokenizers` alone, on texts that are already rendered;
- floor: parse, fast encode of texts that are already rendered, write;
- ray_data: `raysvc.tokenize` of eight copies of the file through Ray Data, from the call to the finished entry, on a Ray
  that runs already.

The best pass counts; the first one, of a cold process, is shown beside it, and rows per second of CPU time, which other
work on the machine disturbs less. Two cores are two processes with half of the rows each. The last line of stdout is JSON.

Figures: SGD with tools on two cores, 1.9 times one core (aim 1.8; 11-22). A build of 250 MB of SGD rows through Ray Data takes 16.3 s
on one core and 10.0 on two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers import peers_python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SHARED = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
ALL, LAST = "all_assistant_messages", "last_assistant_message"
# contender, train_on, cores, rows of gsm8k and sgd, passes, passes with --quick
PLAN: list[tuple[str, str, int, int, int, int, int]] = [
    ("floor", ALL, 1, 10**9, 10**9, 12, 6),
    ("ours", ALL, 1, 10**9, 10**9, 12, 6),
    ("ours", LAST, 1, 10**9, 10**9, 12, 6),
    ("ours", ALL, 2, 10**9, 10**9, 12, 6),
    ("encode_batch", ALL, 1, 2000, 400, 3, 2),
    ("datasets_map", ALL, 1, 2000, 200, 2, 1),
    ("datasets_map", ALL, 2, 4000, 400, 2, 0),
    ("skyrl", LAST, 1, 2000, 200, 3, 2),
    ("skyrl", ALL, 1, 2000, 60, 3, 2),
    ("ray_data", ALL, 1, 0, 10**9, 1, 1),
    ("ray_data", ALL, 2, 0, 10**9, 1, 1),
]
PLAN_ORDER = ["ours", "floor", "encode_batch", "datasets_map", "skyrl", "ray_data"]
ONE_PROCESS = ("datasets_map", "ray_data")  # they start their own workers


def measure(job: dict[str, Any], python: str, cores: int) -> dict[str, Any]:
    """Run one contender on `cores` cores: one process a core with its share of the rows, or one that starts its own."""
    cpus = sorted(os.sched_getaffinity(0))[:cores]
    if job["contender"] in ONE_PROCESS:
        jobs = [{**job, "cpus": cpus, "workers": cores}]
    else:
        jobs = [{**job, "cpus": [cpu], "part": n, "of": cores} for n, cpu in enumerate(cpus)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-P", str(HERE / "tokenize_runs.py")]
    started = [
        subprocess.Popen(
            [*command, json.dumps(one)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for one in jobs
    ]
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{job['contender']} did not start")
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0].strip().splitlines()[-1]) for process in started]
    return summary(job, cores, found)


def summary(job: dict[str, Any], cores: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates of one contender; with several processes a pass takes as long as its slowest process."""
    rows, tokens = sum(one["rows"] for one in found), sum(one["tokens"] for one in found)
    walls = [
        max(walls) for walls in zip(*([wall for wall, _ in one["passes"]] for one in found), strict=True)
    ]
    cpus = [sum(cpus) for cpus in zip(*([cpu for _, cpu in one["passes"]] for one in found), strict=True)]
    best = min(walls)
    return {
        "data": Path(job["data"]).stem,
        "contender": job["contender"],
        "train_on": job["train_on"],
        "cores": cores,
        "rows": rows,
        "rows_per_s": round(rows / best, 1),
        "tokens_per_s": round(tokens / best),
        "rows_per_cpu_s": round(rows / min(cpus), 1) if job["contender"] not in ONE_PROCESS else None,
        "first_pass_rows_per_s": round(rows / walls[0], 1),
        "seconds": round(best, 2),
        "seconds_to_first": found[0].get("seconds_to_first"),
        "load": round(os.getloadavg()[0], 1),
    }


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """The claims: times SkyRL, share of the floor by wall and by CPU time, scaling."""

    def rate(data: str, contender: str, train_on: str = ALL, cores: int = 1, of: str = "rows_per_s") -> float:
        key = (data, contender, train_on, cores)
        found = [r for r in results if (r["data"], r["contender"], r["train_on"], r["cores"]) == key]
        return float(found[0][of]) if found else float("nan")

    claims = {}
    for data in dict.fromkeys(r["data"] for r in results):
        one = rate(data, "ours")
        by_cpu = [rate(data, contender, of="rows_per_cpu_s") for contender in ("ours", "floor")]
        claims[f"{data}: ours / skyrl, all turns"] = one / rate(data, "skyrl")
        claims[f"{data}: ours / skyrl, last turn"] = rate(data, "ours", LAST) / rate(data, "skyrl", LAST)
        claims[f"{data}: ours / datasets.map"] = one / rate(data, "datasets_map")
        claims[f"{data}: ours / floor"] = one / rate(data, "floor")
        claims[f"{data}: ours / floor, by CPU time"] = by_cpu[0] / by_cpu[1]
        claims[f"{data}: ours on 2 cores / on 1"] = rate(data, "ours", ALL, 2) / one
    return {name: round(value, 2) for name, value in claims.items()}


def show(results: list[dict[str, Any]], claims: dict[str, float]) -> None:
    print(
        f"\n{'data':12} {'contender':13} {'train_on':24} {'cores':>5} {'rows/s':>10} {'tokens/s':>12} "
        f"{'rows/CPU s':>10} {'first pass':>10} {'load':>5}"
    )
    for r in results:
        print(
            f"{r['data']:12} {r['contender']:13} {r['train_on']:24} {r['cores']:5d} {r['rows_per_s']:10,.0f} "
            f"{r['tokens_per_s']:12,d} {r['rows_per_cpu_s'] or 0:10,.0f} {r['first_pass_rows_per_s']:10,.0f} "
            f"{r['load']:5.1f}"
        )
    for r in results:
        if r["seconds_to_first"] is not None:
            after = r["seconds"] - r["seconds_to_first"]
            print(
                f"\nraysvc.tokenize through Ray Data, {r['cores']} cores: {r['rows']:,} rows in {r['seconds']} s, "
                f"of which {r['seconds_to_first']} s until the first slice was done, {after:.1f} s for the others"
            )
    print()
    for name, value in claims.items():
        print(f"{name:45} {value:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with the two JSONL files")
    parser.add_argument("--tokenizer", default=str(SHARED / "tokenizers" / "qwen2_5"))
    parser.add_argument("--no-peers", action="store_true", help="without SkyRL and datasets.map")
    parser.add_argument("--quick", action="store_true", help="fewer passes; about 5 minutes")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    results = []
    python = sys.executable if given.no_peers else peers_python()
    for contender, train_on, cores, gsm8k, sgd, passes, quick in PLAN:
        if given.no_peers and contender in ("skyrl", "datasets_map"):
            continue
        for name, rows in (("gsm8k_train", gsm8k), ("sgd_train", sgd)):
            job = {
                "contender": contender,
                "train_on": train_on,
                "data": str(given.data / f"{name}.jsonl"),
                "tokenizer": given.tokenizer,
                "rows": rows,
                "passes": quick if given.quick else passes,
            }
            if not rows or not job["passes"]:
                continue
            results.append(measure(job, python if contender == "skyrl" else sys.executable, cores))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    results.sort(key=lambda r: (r["data"], PLAN_ORDER.index(r["contender"]), r["train_on"], r["cores"]))
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "results": results,
        "claims": ratios(results),
    }
    show(results, report["claims"])
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
