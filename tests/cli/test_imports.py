"""Looking is instant: what a command imports before it has answered. Modules are counted, not seconds."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import raysvc

HEAVY = [
    "ray",
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "pyarrow",
    "awkward",
    "gigatoken",
    "pandas",
    "rich.console",
]
FORKS = f"""
import json, os, sys, traceback
from raysvc.cli.main import main
for line in sys.stdin:
    words, folder, shown = json.loads(line)
    if child := os.fork():
        os.waitpid(child, 0)
        print(flush=True)
        continue
    os.chdir(folder)
    os.dup2(os.open(shown, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.argv, code = ["raysvc", *words], 1
    try:
        main()
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    found = [name for name in {HEAVY} if name in sys.modules]
    print("MODULES", json.dumps([code, found]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., set[str]]]:
    """Runs a command in a fork of a process that has imported the command line and nothing else; gives what is imported then."""
    shown = tmp_path_factory.mktemp("shown")
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, done, numbers = process.stdin, process.stdout, itertools.count()

        def run(*words: str, cwd: Path = Path()) -> set[str]:
            path = shown / str(next(numbers))
            print(json.dumps([words, str(cwd.absolute()), str(path)]), file=told, flush=True)
            assert done.readline() == "\n"
            text = path.read_text()
            code, found = json.loads(text.rpartition("MODULES ")[2] or "[1, []]")
            assert code == 0, text
            return set(found)

        yield run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str]) -> Path:
    """A job whose entry is built."""
    folder = tmp_path_factory.mktemp("imports")
    sections = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(sections))
    raysvc.tokenize(path)
    return path


@pytest.mark.parametrize(
    "names", [(), ("train",), ("doctor",), ("cache",), ("cache", "ls"), ("show",), ("top",)]
)
def test_help_imports_no_library_but_that_of_the_command_line(
    imported: Callable[..., set[str]], names: tuple[str, ...]
) -> None:
    assert imported(*names, "--help") == set()


def test_a_listing_of_the_cache_opens_no_entry(imported: Callable[..., set[str]], job: Path) -> None:
    assert imported("cache", "ls", "--root", str(job.parent / "cache"), "--json") == set()
    assert imported("cache", "ls", "--root", str(job.parent / "cache")) <= {"rich.console"}


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("raysvc.actors.worker.torch_worker", ["numpy"]),
        ("raysvc.actors.server.batch_server", ["numpy"]),
        ("raysvc.training.train", []),
    ],
)
def test_what_is_waited_for_imports_little_until_it_knows_what_to_do(module: str, known: list[str]) -> None:
    """A rank, a server, and the command that starts Ray."""
    code = f"import json, sys, {module}; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == known


@pytest.mark.parametrize(
    "command",
    [
        ("show", "--row", "3"),
        ("show", "--step", "2"),
        ("plan",),
        ("plan", "--step", "1"),
        ("cache", "explain"),
        ("report", "--out", "page.html"),
        ("tokenize",),
        ("tokenize", "max_length=100"),
    ],
    ids=" ".join,
)
def test_looking_at_a_job_imports_neither_ray_nor_torch_nor_transformers(
    imported: Callable[..., set[str]], job: Path, command: tuple[str, ...]
) -> None:
    words = (
        [*command[:2], "-c", str(job), *command[2:]]
        if command[0] == "cache"
        else [command[0], "-c", str(job), *command[1:]]
    )
    found = imported(*words, cwd=job.parent)
    assert found & {"ray", "torch", "transformers", "datasets", "pandas"} == set()
    if command[0] != "tokenize":
        assert found & {"gigatoken", "awkward"} == set()
