"""Every kind of file in a run folder and an entry of the cache, replaced by what would run, or damaged; every command that reads it.

Nothing runs, no command ends in a traceback, and what decides something is named, in one line, by the commands that need it.
Checkpoints are in `test_damaged_checkpoints.py`.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raysvc.cli.main import app

from .test_damaged_checkpoints import harms

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NO_JSON = {"pickle", "a file of torch", "zip"}
ANYTHING = {*NO_JSON, "empty", "cut", "bit"}
# what a command must name: kind of file -> harms. The rest carries no digest, or says what can be made again.
NAMED = {
    "manifest.json": ANYTHING,
    "part-#-#.arrow": ANYTHING,
    "tokenizer.json": ANYTHING,
    "run.json": ANYTHING,
    "job.json": ANYTHING,
    "summary.json": {*NO_JSON, "empty", "cut"},  # for display: no command goes by it
    "served.jsonl": {
        *NO_JSON,
        "bit",
    },  # without it a replay takes the job's own plan, and compares its rows with rows.jsonl
    "rows.jsonl": ANYTHING,
    "metrics.jsonl": {*ANYTHING, "another word"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str], ray_session: None) -> Path:
    """A finished run with its cache."""
    import raysvc

    folder = tmp_path_factory.mktemp("world")
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 16},
        "server": {"name": "hostile"},
        "trainer": {"model": "tiny", "run_dir": str(folder / "run"), "max_steps": 3},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    raysvc.train(str(folder / "job.yaml"))
    shutil.copytree(folder / "run", folder / "other")  # to compare with
    return folder


def commands(folder: Path) -> dict[str, list[str]]:
    job = ["-c", str(folder / "job.yaml")]
    (key,) = [path.name for path in (folder / "cache").iterdir() if len(path.name) == 64]
    return {
        "train": ["train", *job],  # all steps are trained: it looks at the run, and starts nothing
        "tokenize": ["tokenize", *job],
        "plan": ["plan", *job, "--step", "1"],
        "show": ["show", *job, "--step", "1", "--rows"],
        "replay": ["replay", *job, "--step", "1"],
        "compare": [
            "report",
            str(folder / "run"),
            str(folder / "other"),
            "--out",
            str(folder / "report.html"),
        ],
        "report": ["report", *job, "--out", str(folder / "report.html")],
        "verify": ["cache", "verify", key, "--root", str(folder / "cache")],
        "ls": ["cache", "ls", "--root", str(folder / "cache")],
    }


def kinds(folder: Path) -> dict[str, Path]:
    """One file of each kind."""
    found: dict[str, Path] = {}
    for path in sorted((*folder.glob("cache/**/*"), *folder.glob("run/**/*"))):
        name = re.sub(r"[0-9a-f]{16,}|\d+", "#", path.name)
        inside = {"checkpoints", "model"} & set(path.relative_to(folder).parts)
        passing = path.name.startswith("use")  # a thread may put it there, or away
        if not (passing or inside) and path.is_file():
            found.setdefault(
                name if len(path.parts) - len(folder.parts) < 4 else f"{path.parent.name}/{name}", path
            )
    return found


def some_harms(good: bytes, marker: Path) -> Iterator[tuple[str, bytes]]:
    for what, bad in harms(good, marker, 2):
        if what in ANYTHING and bad is not None:
            yield what, bad
    yield "cut", good[: len(good) // 2]
    for share in (0.05, 0.2, 1 / 3, 0.5, 0.7, 0.9):
        bad_bit = bytearray(good)
        bad_bit[int(len(good) * share)] ^= 4
        yield "bit", bytes(bad_bit)
    if b'"by_length":{"' in good:
        yield "another word", good.replace(b'"by_length":{"', b'"by_length":{"x', 1)


def restore(good: Path, folder: Path) -> None:
    for attempt in range(100):
        try:
            for part in ("cache", "run"):
                shutil.rmtree(folder / part, ignore_errors=True)
                shutil.copytree(good / part, folder / part, ignore=shutil.ignore_patterns("use-*", "used-*"))
            return
        except OSError:  # a thread marks an entry as used meanwhile, or ends such a mark
            assert attempt < 99
            time.sleep(0.02)


def test_no_file_that_is_read_runs_and_what_decides_something_is_named(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore(world, tmp_path)
    restore(tmp_path, world)
    marker = tmp_path / "it-ran"
    wanted = {(kind, what) for kind, all_of in NAMED.items() for what in all_of}
    named: set[tuple[str, str]] = set()
    assert set(NAMED) <= set(kinds(world)), sorted(kinds(world))
    for kind, path in kinds(world).items():
        good = path.read_bytes()
        for what, bad in some_harms(good, marker) if good else ():
            for name, command in commands(world).items():
                path.unlink(missing_ok=True)
                path.write_bytes(bad)
                said: Any = CliRunner().invoke(app, command)
                case = (kind, what, name, said.output[-300:])
                assert not marker.exists(), case
                assert said.exit_code in (0, 1, 2), case
                assert said.exception is None or isinstance(said.exception, SystemExit), (
                    case,
                    said.exception,
                )
                assert said.exit_code == 0 or path.name in said.output, case
                if path.name in said.stderr or (said.exit_code and path.name in said.output):
                    named.add((kind, what))
                restore(tmp_path, world)
    assert wanted - named == set()
