"""The exam of loaders: kills, resumes, other worlds, uneven ends, on everybody's loader.

    python benchmarks/exam/run.py [CONTESTANT …]

Each contestant has an environment of its own, in `.bench/exam-…`, which sees the project's packages behind its own, and is played
in processes that are really killed (`play.py`, `cases.py`). A cell says how many rows were repeated, lost or moved against the
contestant's own undisturbed run, or what it said. Some minutes on two cores.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import CASES, Score, Table
from common import show

HERE = Path(__file__).resolve().parent
BENCH = HERE.parents[1] / ".bench"
CONTESTANTS = {
    "raysvc_load": (),
    "torchdata_map": ("torchdata",),
    "datasets_stream": ("torchdata",),
    "grain_map": ("grain",),
    "litdata_chunks": ("litdata",),
}


def python_of(contestant: str) -> str:
    """Python of a contestant's environment, made when it is not there."""
    needs = CONTESTANTS[contestant]
    if not needs:
        return sys.executable
    folder = BENCH / f"exam-{contestant}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "exam.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            site = next((folder / "lib").glob("python*/site-packages"))
            (site / "zz_project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *needs], check=True)
            (folder / "ready").touch()
    return str(python)


def facts_of(python: str, contestant: str) -> list[str]:
    """Version, promise and settings of a contestant, as its adapter says them."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {contestant} as c; print(c.VERSION, c.PROMISE, c.SETTINGS, sep='\\n')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-3:]


def main(names: list[str]) -> None:
    rows, about = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or list(CONTESTANTS):
            python = python_of(name)
            about[name] = facts_of(python, name)
            table = Table(python, name, Path(folder) / name)
            scores: dict[str, Score] = {}
            for case in CASES:
                scores[case.__name__] = case(table)
                print(f"{name} {case.__name__}: {scores[case.__name__]}", file=sys.stderr, flush=True)
            exact = sum(score.is_exact for score in scores.values())
            rows.append({"contestant": name, "exact": f"{exact} of {len(CASES)}", **{case: str(score) for case, score in scores.items()},
                         "first batch s": scores["middle"].seconds, "peak MB": scores["middle"].peak_mb})  # fmt: skip
    show("Loaders under kills", rows, about=about, cases={case.__name__: case.__doc__ for case in CASES})


if __name__ == "__main__":
    main(sys.argv[1:])
