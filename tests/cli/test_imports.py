"""Looking is instant: what a command imports before it has answered. Modules are counted, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import raysvc

LISTS_MODULES = """
import atexit, json, sys
heavy = ("ray", "torch", "transformers", "datasets", "numpy", "pyarrow", "awkward", "gigatoken", "pandas",
         "rich.console")
atexit.register(lambda: print("MODULES", json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr))
from raysvc.cli.main import main
main()
"""


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


def imported(*arguments: str, cwd: Path | None = None) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LISTS_MODULES, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.rpartition("MODULES ")[2].splitlines()[0]))


@pytest.mark.parametrize(
    "names", [(), ("train",), ("doctor",), ("cache",), ("cache", "ls"), ("show",), ("top",)]
)
def test_help_imports_no_library_but_that_of_the_command_line(names: tuple[str, ...]) -> None:
    assert imported(*names, "--help") == set()


def test_a_listing_of_the_cache_opens_no_entry(job: Path) -> None:
    assert imported("cache", "ls", "--root", str(job.parent / "cache"), "--json") == set()
    assert imported("cache", "ls", "--root", str(job.parent / "cache")) <= {"rich.console"}


@pytest.mark.parametrize("module", ["raysvc.actors.worker.torch_worker", "raysvc.actors.server.batch_server"])
def test_a_rank_and_a_server_import_only_numpy_and_the_config_until_they_know_what_they_do(
    module: str,
) -> None:
    code = LISTS_MODULES.replace("from raysvc.cli.main import main\nmain()", f"import {module}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr.rpartition("MODULES ")[2]) == ["numpy"]


@pytest.mark.parametrize(
    "command",
    [
        ("show", "--row", "3"),
        ("show", "--step", "2"),
        ("plan",),
        ("plan", "--step", "1"),
        ("cache", "explain"),
        ("report", "--html", "page.html"),
        ("tokenize",),
        ("tokenize", "max_length=100"),
    ],
    ids=" ".join,
)
def test_looking_at_a_job_imports_neither_ray_nor_torch_nor_transformers(
    job: Path, command: tuple[str, ...]
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
