"""The exam of loaders: kills, resumes, other worlds, uneven ends, on everybody's loader.

    python benchmarks/exam/run.py [CONTESTANT …] [CASE …]

Each contestant has an environment of its own, in `.bench/exam-…`, which sees the project's packages behind its own, and is played
in processes that are really killed (`play.py`, `cases.py`). A cell says how many rows were repeated, lost or moved against the
contestant's own undisturbed run, or what it said. Some minutes on two cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import CASES, Score, Table
from common import show
from play_env import python_of
from results import keep

HERE = Path(__file__).resolve().parent
CONTESTANTS = {
    "raysvc_load": (),
    "torchdata_map": ("torchdata",),
    "datasets_stream": ("torchdata",),
    "grain_map": ("grain",),
    "litdata_chunks": ("litdata",),
    "mosaic_streaming": ("mosaicml-streaming",),
    "hf_trainer": (),
    "hf_trainer_ignore": (),
    "trl_packed": (),
}


def facts_of(python: str, contestant: str) -> list[str]:
    """Version, promise and settings of a contestant, as its adapter says them."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {contestant} as c; print(c.VERSION, c.PROMISE, c.SETTINGS, sep='\\n')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-3:]


def main(words: list[str]) -> None:
    asked = [case for case in CASES if case.__name__ in words] or CASES
    names = [word for word in words if word in CONTESTANTS]
    rows: list[dict[str, Any]] = []
    about, cases = {}, {case.__name__: case.__doc__ for case in asked}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or list(CONTESTANTS):
            python = python_of(name, CONTESTANTS[name])
            about[name] = facts_of(python, name)
            table = Table(python, name, Path(folder) / name)
            scores: dict[str, Score] = {}
            for case in asked:
                scores[case.__name__] = case(table)
                print(f"{name} {case.__name__}: {scores[case.__name__]}", file=sys.stderr, flush=True)
            first = next(iter(scores.values()))
            exact = sum(score.is_exact for score in scores.values())
            rows.append({"contestant": name, "exact": f"{exact} of {len(asked)}", **{case: str(score) for case, score in scores.items()},
                         "first batch s": first.seconds, "peak MB": first.peak_mb})  # fmt: skip
            keep("loaders", rows, about=about, cases=cases)
    show("Loaders under kills", rows, about=about, cases=cases)


if __name__ == "__main__":
    main(sys.argv[1:])
