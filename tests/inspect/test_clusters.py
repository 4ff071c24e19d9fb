"""All runs of a user are looked at together: the list in `raysvc.inspect.clusters`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.inspect import clusters
from raysvc.inspect.clusters import OwnRuns
from raysvc.nodes import own_rays
from raysvc.nodes.own_rays import LocalRay

# the Ray at an address is a file: what it says; none: it has ended, empty: it hangs
ASK = """
import pathlib, sys, time
for _ in sys.stdin:
    said = pathlib.Path(sys.argv[1]).read_text()
    print(said or time.sleep(60), flush=True)
"""


def says(path: Path, name: str) -> LocalRay:
    path.write_text(json.dumps({"servers": [{"name": name, "state": "silent"}], "builds": [{"entry": name}]}))
    return LocalRay(str(path), "disabled", "")


@pytest.fixture
def rays(monkeypatch: pytest.MonkeyPatch) -> list[LocalRay]:
    found: list[LocalRay] = []
    monkeypatch.setattr(clusters, "ASK", ASK)
    monkeypatch.setattr(clusters, "ANSWER_S", 1.0)
    monkeypatch.setattr(clusters, "IMPORT_S", 5.0)
    monkeypatch.setattr(own_rays, "living", lambda: list(found))
    return found


def names(runs: OwnRuns) -> list[str]:
    seen = runs.look()
    assert seen is not None
    return [one["name"] for one in seen["servers"]]


def test_runs_come_and_go_and_several_are_told_apart(rays: list[LocalRay], tmp_path: Path) -> None:
    runs = OwnRuns()
    assert runs.look() is None
    rays.append(says(tmp_path / "a", "sft"))
    assert names(runs) == ["sft"]
    (first,) = runs._asked.values()
    rays.append(says(tmp_path / "b", "sft"))
    assert names(runs) == [f"sft @{tmp_path}/a", f"sft @{tmp_path}/b"]
    assert runs._asked[rays[0]] is first, "one process asks as long as its Ray is there"
    (tmp_path / "b").unlink()  # the asker of b fails
    assert names(runs) == [f"sft @{tmp_path}/a"]
    says(tmp_path / "b", "back")
    assert names(runs) == [f"sft @{tmp_path}/a", f"back @{tmp_path}/b"]
    del rays[0]
    assert names(runs) == ["back"]
    assert first.poll() is not None
    left = list(runs._asked.values())
    runs.close()
    assert all(one.poll() is not None for one in left)


def test_a_ray_that_hangs_is_left_out_and_asked_again(rays: list[LocalRay], tmp_path: Path) -> None:
    rays += [says(tmp_path / "a", "sft"), says(tmp_path / "b", "dpo")]
    runs = OwnRuns()
    try:
        assert len(names(runs)) == 2
        (tmp_path / "a").write_text("")
        begin = time.monotonic()
        assert names(runs) == [f"dpo @{tmp_path}/b"]
        assert time.monotonic() - begin < 5
        says(tmp_path / "a", "sft")
        assert len(names(runs)) == 2
    finally:
        runs.close()


def test_ps_and_top_show_all_runs_without_joining_one(
    rays: list[LocalRay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raysvc.cluster.is_joined", lambda: False)
    monkeypatch.setattr("raysvc.cluster.connect", lambda *_: sys.exit("joined"))
    rays += [says(tmp_path / "a", "sft"), says(tmp_path / "b", "dpo")]
    expected = [f"dpo @{tmp_path}/b", f"sft @{tmp_path}/a"]
    for command in (["ps", "--json"], ["top", "--json", "--count", "1"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])["servers"]
        assert sorted(one["name"] for one in found) == expected
