"""Tries the versions that pyproject.toml allows: the lowest and the newest, on each Python that can be had.

    python tests/versions.py                       # all; needs uv, and some 2 GB of disk for each environment
    python tests/versions.py --only lowest-3.11    # one

1. `uv pip compile` names the versions: of what we depend on the lowest that has a wheel for that Python, or the newest.
2. They are installed in .versions/NAME, torch as its CPU build of `TORCH`, whose older builds bring gigabytes of CUDA.
3. A job is tokenized on Ray, served and attached to, and the tests of the core run.

Prints a Markdown table for docs/testing.md; exit code 1 when something failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCH = "torch==2.13.0"
LEFT_OUT = ("nvidia-", "cuda-", "triton", "torch==")  # of the list: what torch brings
WITH = ("pytest", "pytest-timeout", "hypothesis", "moto")
TEMPLATES = "trl"  # its templates are rows of tests; it comes as it is, or its own bounds would raise the lowest of ours
CORE = ("tests/plan", "tests/collate", "tests/cache", "tests/chat", "tests/test_ragged.py")
SMOKE = """
from pathlib import Path
import sys
import raysvc
from raysvc.cli.sample_data import chat_rows, row_texts, write_rows, write_tokenizer

folder = Path(sys.argv[1])
rows = write_rows(folder / "rows.jsonl", 240)
tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
job = {
    "source": {"path": str(rows), "format": "chat"}, "tokenizer": str(tokenizer), "cache": {"root": str(folder / "cache")},
    "workers": {"min": 2, "slice_mb": 0.01}, "plan": {"batch_size": 16}, "server": {"name": "smoke"},
    "trainer": {"run_dir": str(folder / "run")},
}
assert raysvc.tokenize(job).num_rows == 240
server = raysvc.serve(job, detached=False)
with raysvc.attach("smoke") as client:
    for step in client:
        client.commit(step.index)
        if step.index == 3:
            break
"""


class Row(NamedTuple):
    """A line of the table."""

    name: str
    packages: str
    smoke: str
    core: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="lowest-3.11, newest-3.13, …")
    only = parser.parse_args().only
    names = [f"{kind}-{python}" for python in PYTHONS for kind in ("lowest", "newest")]
    rows = [tried(name) for name in names if only in (None, name) and interpreter(name.rpartition("-")[2])]
    print("\n| | versions | tokenize, serve, attach | tests of the core |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return int(any(row.smoke != "pass" or "failed" in row.core or "error" in row.core for row in rows))


def uv() -> str:
    """Path of uv: beside this Python, or in the PATH."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        sys.exit("error: uv is missing; run: pip install uv")
    return found


def interpreter(version: str) -> str | None:
    """Of this version; None where it cannot be had, which is said."""
    command = [uv(), "python", "find", "--no-python-downloads", version]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        print(f"no Python {version} here", file=sys.stderr)
    return found or None


def tried(name: str) -> Row:
    """Make the environment and run everything in it."""
    python = environment(name)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        smoke = [python, "-c", SMOKE, folder]
        done = subprocess.run(smoke, env={**env, "HOME": folder}, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-3000:])
    options = ("-m", "not slow", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    core = [python, "-m", "pytest", *options, *CORE]
    began = time.monotonic()
    ran = subprocess.run(core, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(ran.stdout[-9000:])
    return Row(
        name,
        packages(python),
        "fail" if done.returncode else "pass",
        outcome(ran.stdout, time.monotonic() - began),
    )


def outcome(output: str, seconds: float) -> str:
    """The last line of pytest, or what stood in its way."""
    counts = re.findall(r"\d+ (?:failed|passed|skipped|errors?)", output)
    return f"{', '.join(counts[-4:]) or 'error'} in {seconds:.0f} s"


def environment(name: str) -> str:
    """Python of the environment of that name, made where it is not there."""
    kind, _, version = name.rpartition("-")
    folder = ROOT / ".versions" / name
    python = str(folder / "bin" / "python")
    if (folder / ".installed").exists():
        return python
    wanted, listed = folder / "wanted.in", folder / "listed.txt"
    subprocess.run([str(interpreter(version)), "-m", "venv", str(folder)], check=True)
    text = (ROOT / "pyproject.toml").read_text()
    bounds = [re.search(rf'"({one}(?:\[\w+\])?>=[^"]*)"', text) for one in WITH]
    wanted.write_text("".join(f"{one[1]}\n" for one in bounds if one))
    (folder / "torch.txt").write_text(TORCH)
    subprocess.run(
        [
            uv(), "pip", "compile", "-q", "pyproject.toml", str(wanted), "--extra", "s3", "--python-version", version,
            "--resolution", "lowest-direct" if kind == "lowest" else "highest", "--only-binary", ":all:",
            "--override", str(folder / "torch.txt"), "--no-header", "--no-annotate", "-o", str(listed),
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line for line in listed.read_text().splitlines() if not line.startswith(LEFT_OUT)]
    listed.write_text("\n".join(lines) + "\n")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", TORCH, TEMPLATES, "-r", str(listed)]
    subprocess.run(install, check=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        # no CPU build for this Python: that of PyPI does not load without the CUDA libraries, 4 GB
        subprocess.run([python, "-m", "pip", "install", "-q", TORCH], check=True)
    (folder / ".installed").touch()
    return python


def packages(python: str) -> str:
    """Versions of what decides most."""
    shown = [
        "ray",
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "pyarrow",
        "numpy",
        "fsspec",
        "pydantic",
    ]
    code = f"from importlib.metadata import version as v; print(*(f'{{one}} {{v(one)}}' for one in {shown}), sep=', ')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
