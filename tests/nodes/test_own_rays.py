"""Which Ray a command without an address means: the list in `raysvc.nodes.own_rays`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.nodes import own_rays


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / f"raysvc-{os.getuid()}" / "rays"


def test_the_newest_of_a_living_process_is_taken_and_dead_ones_are_forgotten(folder: Path) -> None:
    assert own_rays.living() == []
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own_rays.note("10.0.0.1:1")
        for number, pid in enumerate((gone.pid, other.pid), start=2):
            (folder / str(pid)).write_text(json.dumps([f"10.0.0.1:{number}", "disabled", ""]))
            os.utime(folder / str(pid), (time.time() + number, time.time() + number))
        assert [one.address for one in own_rays.living()] == ["10.0.0.1:3", "10.0.0.1:1"]
        assert not (folder / str(gone.pid)).exists()
    finally:
        other.kill()
        other.communicate()
    own_rays.forget()
    assert own_rays.living() == []


def test_a_ray_that_asks_for_another_token_is_not_taken_and_one_that_asks_for_ours_gets_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "one")
    own_rays.note("10.0.0.1:1")
    assert "one" not in (folder / str(os.getpid())).read_text(), "a digest of the token alone"
    monkeypatch.delenv("RAY_AUTH_MODE")
    (ray,) = own_rays.living()
    assert own_rays.enter(ray) == "10.0.0.1:1"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "two")
    assert own_rays.living() == []
    monkeypatch.setenv("RAY_AUTH_TOKEN", "one")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert own_rays.living() == []


@pytest.mark.parametrize(
    ("mode", "token", "says"),
    [(None, "mine", True), (None, "", False), ("token", "mine", False), ("disabled", "mine", False)],
)
def test_one_that_is_named_and_does_not_answer_may_ask_for_the_token_that_ray_was_not_told_to_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, token: str, says: bool
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    (tmp_path / "token").write_text(f"{token}\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert own_rays.may_need_a_token() is says


def test_a_folder_that_others_may_write_to_is_not_believed(folder: Path) -> None:
    own_rays.note("10.0.0.1:1")
    folder.parent.chmod(0o777)
    assert own_rays.living() == []


@pytest.mark.parametrize(
    "script",
    [
        "print('ready', flush=True)\nimport time\ntime.sleep(60)",
        "print('ready')\nraise SystemExit(1)",
        "1 / 0",
    ],
)
def test_a_ray_that_does_not_let_one_in_is_given_up_in_time_and_says_nothing(
    script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_rays, "JOIN", "import sys\nprint('a line of Ray', file=sys.stderr)\n" + script)
    begin = time.monotonic()
    assert own_rays.found_by_ray(answer_s=0.5) is None
    assert time.monotonic() - begin < 55, "the script itself sleeps for a minute"
    assert capfd.readouterr() == ("", "")


def test_a_command_that_finds_none_says_so_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_rays, "found_by_ray", lambda: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # of the tests
    done = CliRunner().invoke(app, ["ps"])
    assert done.exit_code == 2
    assert "no run of yours has one on this machine" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.ray
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_the_ray_of_a_run_is_met_without_an_address_while_another_one_runs(tmp_path: Path, mode: str) -> None:
    script = "import raysvc.cluster as c, ray\nc.connect()\nprint(ray.get_runtime_context().gcs_address, flush=True)\ninput()"
    env = {**os.environ, "TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    env.pop("RAY_ADDRESS", None)
    if mode == "token":  # as Ray does by itself
        env.pop("RAY_AUTH_MODE", None)
        env["RAY_AUTH_TOKEN"] = "a-token-of-this-test-" + "0" * 20
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert run.stdout is not None
        address = run.stdout.readline().strip()
        ask = "from raysvc.cluster import join_cluster\njoin_cluster(None)\nimport ray\nprint(ray.get_runtime_context().gcs_address)"
        met = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, env=env, timeout=200
        )
        assert met.stdout.strip() == address, met.stderr
        look = "from raysvc.inspect.clusters import OwnRuns\nruns = OwnRuns()\nruns.look()\nprint(*[one.address for one in runs._asked])\nruns.close()"
        met = subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, env=env, timeout=200
        )
        assert met.stdout.strip() == address, met.stderr
    finally:
        run.communicate("\n", timeout=200)
    assert list((tmp_path / f"raysvc-{os.getuid()}" / "rays").iterdir()) == []
