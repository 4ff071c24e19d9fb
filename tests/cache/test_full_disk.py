"""A cache root on a disk that is really full: a small tmpfs, where this user may mount one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app

from .helpers import wait_until_unused

SIZE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={SIZE}", "raysvc-test", str(place)]
    if mount is None or os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Take what is left, to the last byte."""
    path = disk / "other-people.bin"
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return path


def job_file(folder: Path, disk: Path, sample: dict[str, str]) -> str:
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(disk / "cache")},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return str(folder / "job.yaml")


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout.splitlines()[-1])


def test_a_build_on_a_full_disk_is_one_line_and_goes_on_when_there_is_room(
    disk: Path, tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_file(tmp_path, disk, sample)
    filler = fill(disk)
    for _ in range(2):
        result = CliRunner().invoke(app, ["tokenize", "-c", job, "-q"])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert "No space left" in result.stderr
    assert run("cache", "ls", "-c", job, "--json")["entries"] == []
    os.truncate(filler, filler.stat().st_size - (200 << 10))
    assert run("tokenize", "-c", job, "--json")["cache"]["hit"] is False


def test_looking_reading_and_gc_work_on_a_full_disk(
    disk: Path, tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_file(tmp_path, disk, sample)
    built = raysvc.tokenize(job)
    rows = built.table().to_pylist()
    del built
    fill(disk)
    assert [one["state"] for one in run("cache", "ls", "-c", job, "--json")["entries"]] == ["finished"]
    assert run("cache", "explain", "-c", job, "--json")["hit"] is True
    assert run("tokenize", "-c", job, "--json")["cache"]["hit"] is True
    entry = raysvc.tokenize(job)
    assert [entry.row(row)["input_ids"] for row in range(len(rows))] == [row["input_ids"] for row in rows]
    assert run("cache", "verify", entry.key, "-c", job, "--json")["problems"] == []
    unused = ["cache", "gc", "-c", job, "--json", "--days", "0", "--grace-hours", "0"]
    assert any(one["folder"] == entry.key for one in run(*unused, "--dry-run")["removals"])
    uri = entry.uri
    del entry
    wait_until_unused(Path(uri).parent)
    assert any(one["action"] == "removed" for one in run(*unused)["removals"])
    assert not Path(uri).exists()
