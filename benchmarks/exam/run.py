"""The exam of loaders: kills, resumes, other worlds, uneven ends, on everybody's loader.

    python benchmarks/exam/run.py [CONTESTANT …] [CASE …]

Each contestant has an environment of its own, in `.bench/exam-…`, which sees the project's packages behind its own, and is played
in processes that are really killed (`play.py`, `table.py`); what is asked are data (`cases.py`). Results go to
`results/loaders.json` and docs/exam.md. Two contestants are played at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import CASES, Case, Score, examine
from play_env import python_of
from results import keep, write_pages
from table import Table

HERE = Path(__file__).resolve().parent
CONTESTANTS = {
    "raysvc_load": (),
    "raysvc_served": (),
    "raysvc_train": (),
    "torchdata_map": ("torchdata",),
    "torchdata_nodes": ("torchdata",),
    "datasets_stream": ("torchdata",),
    "grain_map": ("grain",),
    "grain_elastic": ("grain",),
    "litdata_chunks": ("litdata",),
    "lance_sampler": ("pylance",),
    "mosaic_streaming": ("mosaicml-streaming",),
    "hf_trainer": (),
    "hf_trainer_ignore": (),
    "trl_sft": (),
    "torchtitan_text": ("torchtitan",),
    "verl_prompts": ("verl",),
    "skyrl_prompts": ("skyrl==0.3.0",),
    "ray_data": (),
}


def facts_of(python: str, contestant: str) -> dict[str, Any]:
    """Version, promise, settings and what is not offered, as an adapter says them."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import {contestant} as c\n"
        "names = ('VERSION', 'PROMISE', 'SETTINGS', 'NOT_OFFERED', 'OFFERS')\n"
        "print(json.dumps({name.lower(): getattr(c, name) for name in names if hasattr(c, name)}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def play(name: str, asked: list[Case], folder: Path) -> dict[str, Any]:
    """Play one contestant through cases."""
    begin, needs = time.monotonic(), CONTESTANTS[name]
    python = python_of(needs[0] if needs else name, needs)  # adapters of one library share it
    facts, known, scores = facts_of(python, name), {}, {}
    table = Table(python, name, folder / name)
    try:
        for case in asked:
            if case.unless and case.name not in facts.get("offers", ()):
                facts.setdefault("not_offered", {}).setdefault(case.name, case.unless)
            if case.name in facts.get("not_offered", {}):
                scores[case.name] = Score(said="not offered")
            else:
                scores[case.name] = examine(case, table, known)
            print(f"{name} {case.name}: {scores[case.name]}", file=sys.stderr, flush=True)
    finally:
        table.close()
    told = {name: {**asdict(score), "right": score.is_right} for name, score in scores.items()}
    told = json.loads(json.dumps(told).replace(str(folder), "…"))  # where it was played says nothing
    took = {"took_s": round(time.monotonic() - begin)} if len(asked) == len(CASES) else {}
    return {"contestant": name, **took, "about": facts, "cases": told}


def main(words: list[str]) -> None:
    asked = [case for case in CASES if case.name in words] or list(CASES)
    names = [name for name in CONTESTANTS if name in words] or list(CONTESTANTS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(2) as pool:
        for row in pool.map(lambda name: play(name, asked, Path(folder)), names):
            keep("loaders", [row], cases={case.name: case.says for case in asked})
    write_pages()


if __name__ == "__main__":
    main(sys.argv[1:])
