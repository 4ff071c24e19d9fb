"""docs/extending.md, carried out: its steps on a copy of the source, then its commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
STEP = re.compile(r"In `([^`]+)`, (after|before) `([^`]+)`:\n\n +```\w+\n(.*?)\n +```", re.DOTALL)
FILE = re.compile(r"A new file `([^`]+)`:\n\n +```python\n(.*?)\n +```", re.DOTALL)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the steps change, and what their tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "face", "deploy", "nfs", "examples")
    for folder in ("raysvc", "actors", "pipelines", "docs", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def carry_out(text: str, folder: Path) -> int:
    """Do every step of a section; returns how many."""
    for name, block in FILE.findall(text):
        (folder / name).write_text(textwrap.dedent(block) + "\n")
    steps = STEP.findall(text)
    for name, side, anchor, block in steps:
        path = folder / name
        path.write_text(changed(path.read_text(), side, anchor, textwrap.dedent(block)))
    return len(steps) + len(FILE.findall(text))


def changed(source: str, side: str, anchor: str, block: str) -> str:
    """The source with a block beside the one line that holds the anchor."""
    lines = source.splitlines()
    (at,) = [number for number, line in enumerate(lines) if anchor in line]
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    if side == "before":
        return "\n".join([*lines[:at], textwrap.indent(block, indent), "", *lines[at:], ""])
    if line.endswith(anchor):
        inside = indent + "    " * line.endswith(("[", "{", "("))
        return "\n".join([*lines[: at + 1], textwrap.indent(block, inside), *lines[at + 1 :], ""])
    return source.replace(line, line.replace(anchor, f"{anchor}{block} "), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("title", "num_steps"), [("A format", 5), ("A store", 3), ("A layout", 3)])
def test_the_steps_of_the_page_lead_to_something_that_passes_its_contract(
    title: str, num_steps: int, copy: Path
) -> None:
    assert carry_out(section(title), copy) == num_steps
    commands = re.findall(r"^ *\$ python (.*)$", section(title), re.MULTILINE)
    assert commands
    env = {**os.environ, "PYTHONPATH": str(copy)}
    for command in commands:
        arguments = [sys.executable, *shlex.split(command)]
        done = subprocess.run(arguments, cwd=copy, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    if title != "A store":
        assert re.search(r"`(riddle|single)`", (copy / "docs" / "reference.md").read_text())


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `toy_train` of the page."""
    import importlib

    from ray import cloudpickle

    assert carry_out(section("A worker"), tmp_path) == 2
    monkeypatch.syspath_prepend(str(tmp_path))
    worker, train = (importlib.import_module(name) for name in ("toy_worker", "toy_train"))
    cloudpickle.register_pickle_by_value(worker)  # the session's workers do not look into this folder
    yield train
    cloudpickle.unregister_pickle_by_value(worker)
    for name in ("toy_worker", "toy_train"):
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.ray
def test_the_worker_of_the_page_has_the_same_losses_however_rows_are_split(
    toy: Any, serve: Callable[..., Any]
) -> None:
    import raysvc

    packed = {"layout": "packed", "micro_batch_size": None, "micro_batch_tokens": 64}
    found = []
    for dp_size, plan in ((1, {"micro_batch_size": 3}), (2, packed)):
        serve(f"bigram-{dp_size}", 24, {"epochs": 2, **plan})
        group = toy.start(dp_size)
        with raysvc.attach(f"bigram-{dp_size}", dp_size) as client:
            found.append(toy.losses(group, client.steps()))
        group.stop()
    assert len(found[0]) == 12
    assert found[0][-1] < 0.9 * found[0][0]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
