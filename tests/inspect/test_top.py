"""`raysvc top`: lines from two snapshots, and a real cluster."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.errors import ServerError
from raysvc.inspect.live import Line, Snapshot, cells_of, lines, text

FACTS = {
    "name": "a", "state": "held", "holder": "host:1:x", "frontier": 10, "num_steps": 100,
    "rss_bytes": 50_000_000, "seen_s": 2.0, "version": "0.1.0",
}  # fmt: skip


TOLD = {
    "version": "0.1.0", "steps": 10, "tokens": 500, "stall_s": 1.5, "causes": {"read": 0.75, "collate": 1.5}, "stall": 0.125,
    "steps_per_s": 0.5, "tokens_per_s": 25.0, "elapsed_s": 20.0, "look_ahead": 2, "look_ahead_bytes": 3_000_000,
}  # fmt: skip


def test_a_line_is_what_the_trainer_says_and_steps_are_between_two_looks() -> None:
    facts = {**FACTS, "trainer": TOLD}
    before, now = Snapshot(100.0, [facts]), Snapshot(104.0, [{**facts, "frontier": 18}])
    (first,) = lines(before)
    assert first.steps_per_s == 0.5, "one look has the trainer's own rate"
    (line,) = lines(now, before)
    assert (line.steps_per_s, line.tokens_per_s, line.stall, line.stall_s) == (2.0, 25.0, 0.125, 1.5)
    assert list(line.causes or ()) == ["collate", "read"], "largest first"
    assert text(line) == (
        "server=a state=held trainer=host:1:x version=0.1.0 step=18/100 left=41s steps/s=2.00 tokens/s=25 waiting=12.5% waited=1.5s "
        "waited for=collate:1.5s,read:0.8s ahead=2 ahead MB=3.0 memory=50MB heard=2s ago"
    )


def test_a_trainer_that_went_back_to_its_checkpoint_has_no_negative_rate() -> None:
    facts = {**FACTS, "trainer": TOLD}
    (line,) = lines(Snapshot(104.0, [{**facts, "frontier": 4}]), Snapshot(100.0, [facts]))
    assert (line.step, line.steps_per_s) == (4, 0.5), "the trainer's own rate"
    assert cells_of(line)["left"] == "3m12s"


def test_what_a_dead_trainer_said_is_not_shown() -> None:
    (line,) = lines(Snapshot(1.0, [{**FACTS, "state": "lapsed", "seen_s": 99.0, "trainer": TOLD}]))
    assert (line.trainer, line.step, line.lease_age_s) == ("host:1:x", 10, 99.0)
    assert (line.stall, line.steps_per_s, line.tokens_per_s, line.look_ahead, line.causes) == (None,) * 5


def test_a_trainer_of_another_version_is_named() -> None:
    (line,) = lines(Snapshot(1.0, [{**FACTS, "trainer": {**TOLD, "version": "0.1.9"}}]))
    assert line.versions == "0.1.0 (trainer 0.1.9)"


def test_ctrl_c_is_how_one_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(*_: Any) -> Iterator[tuple[Any, list[Line]]]:
        yield {}, [Line("a")]
        raise KeyboardInterrupt

    monkeypatch.setattr("raysvc.cli.top._looks", looks)
    monkeypatch.setattr("raysvc.inspect.clusters.looking", lambda *_, **__: nullcontext())
    result = CliRunner().invoke(app, ["top"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "server=a state=silent\n", "")


def test_what_is_not_known_is_a_dash_and_not_zero() -> None:
    (line,) = lines(Snapshot(1.0, [{**FACTS, "holder": None, "state": "free"}]))
    assert (line.steps_per_s, line.stall, line.stall_s, line.look_ahead, line.lease_age_s) == (None,) * 5
    assert (line.causes, line.look_ahead_bytes) == (None, None)
    assert cells_of(line)["waiting"] == "-"
    (silent,) = lines(Snapshot(1.0, [{"name": "x", "state": "silent", "cause": "dead"}]))
    assert silent == Line("x")


def test_a_server_that_came_between_two_looks_has_no_rate_of_its_own() -> None:
    now = Snapshot(1.0, [FACTS, {**FACTS, "name": "b"}])
    first, second = lines(now, Snapshot(0.0, [FACTS]))
    assert (first.steps_per_s, second.steps_per_s) == (0.0, None)


def test_a_server_of_rollouts_has_no_last_step() -> None:
    (line,) = lines(Snapshot(1.0, [{**FACTS, "num_steps": None, "trainer": TOLD}]))
    assert (cells_of(line)["step"], cells_of(line)["left"]) == ("10", "-")


@pytest.mark.parametrize(
    ("rate", "left"), [(10.0, "9s"), (1.0, "1m30s"), (0.01, "2h30m"), (None, "-"), (0.0, "-")]
)
def test_what_is_left_is_told_at_the_rate_of_now(rate: float | None, left: str) -> None:
    assert cells_of(Line("a", step=10, num_steps=100, steps_per_s=rate))["left"] == left


@pytest.mark.parametrize("width", [40, 80, 110, 250])
def test_a_table_fits_its_width_and_what_has_no_room_stands_under_it(width: int) -> None:
    from rich.console import Console

    from raysvc.cli.top import _table

    one = {**FACTS, "name": "sft-1", "trainer": TOLD, "node": "10.0.0.1"}
    found = lines(Snapshot(4.0, [one, {**one, "name": "a-second-server"}]))
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    console.print(_table(found, width))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown, "no cell is cut"
    told = " ".join(shown.split())
    for line in found:
        for name, value in cells_of(line).items():
            if value != "-":
                assert name in told, name
                assert value.split(",")[0] in told, name
    header = shown.splitlines()[1]
    assert ("tokens/s" in header) == (width >= 80), "the important ones first"
    assert (": " in shown.split("└")[1]) == (width < 250), "under the table only what has no room in it"


@pytest.mark.ray
def test_it_watches_the_servers_of_a_cluster(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": "watched"},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }
    raysvc.serve(job)
    raysvc.serve(job, name="watched-too", trainer={"run_dir": str(tmp_path / "another")})
    with raysvc.attach("watched", look_ahead_steps=1) as client:
        client.commit(next(iter(client)).index)
        result = CliRunner().invoke(app, ["top", "--json", "--interval", "0.2"])
        assert result.exit_code == 0, result.output
        (line,) = [
            one for one in json.loads(result.stdout.splitlines()[-1])["servers"] if one["name"] == "watched"
        ]
        assert set(line) == set(asdict(Line("x")))
        assert (line["num_steps"], line["trainer"]) == (15, client_holder(client))
        assert line["steps_per_s"] >= 0
        assert line["node"].count(".") == 3
        plain = CliRunner().invoke(app, ["top", "--count", "1"])
        names = [line.split()[0] for line in plain.stdout.splitlines() if line.startswith("server=watched")]
        assert names == ["server=watched", "server=watched-too"], "a line a server, by name"
    stop_server("watched")
    stop_server("watched-too")


def client_holder(client: object) -> str:
    from raysvc.inspect.servers import list_servers

    return next(str(facts["holder"]) for facts in list_servers() if facts["name"] == "watched")


@pytest.mark.ray
def test_a_trainer_that_only_waits_is_shown_while_it_waits(tmp_path: Path, ray_session: None) -> None:
    """Nobody puts rollouts: all of the trainer's time is a wait for its first step, which has not ended."""
    import raysvc
    from raysvc import Group
    from raysvc.actors.launch import stop_server

    plan = {"batch_size": 2, "mini_batch_size": 2}
    raysvc.serve_rollouts("starved", run_dir=str(tmp_path), pad_token_id=0, plan=plan, wait_s=60.0)
    client = raysvc.attach_rank("starved", rank=0)  # as HF Trainer, torchrun and SkyRL's loops do
    waiting = threading.Thread(target=lambda: suppressed(client), daemon=True)
    waiting.start()
    try:
        line = eventually(lambda: seen("starved"), lambda line: (line["stall"] or 0) > 0.5)
        assert line["stall_s"] > 0.5
        assert line["num_steps"] is None
        assert f":{os.getpid()}:" in line["trainer"], "which process holds it"
        assert line["rollouts"] == {"ready": 0, "waiting": 0, "weight_version": 0, "producers": 0}
        table = CliRunner().invoke(app, ["ps", "--json"])
        (facts,) = [one for one in json.loads(table.stdout)["servers"] if one["name"] == "starved"]
        assert facts["trainer"]["stall"] > 0.5
        rows = [np.arange(3, dtype=np.int32)]
        mask = [np.ones(3, bool)]
        raysvc.rollouts("starved").put_groups([Group(f"p{n}", rows, mask) for n in range(2)])
        line = eventually(lambda: seen("starved"), lambda line: "groups" in (line["causes"] or {}))
        assert next(iter(line["causes"])) == "groups", "the largest: producers were late"
    finally:
        client.detach()
        waiting.join()
    assert seen("starved")["stall"] is None, "it has left"
    stop_server("starved")


def suppressed(client: Any) -> None:
    with suppress(ServerError):  # it is detached while it waits
        next(iter(client.steps()))


def seen(name: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["top", "--json", "--count", "1"])
    found = json.loads(result.stdout.splitlines()[-1])["servers"]
    return next(dict(one) for one in found if one["name"] == name)


def eventually(look: Callable[[], dict[str, Any]], good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until = time.monotonic() + 100
    while not good(found := look()):
        assert time.monotonic() < until, found
        time.sleep(0.2)
    return found


@pytest.mark.parametrize("kind", [(), ("--web",), ("--json", "--count", "2")])
def test_it_ends_with_its_cluster_in_one_line(kind: tuple[str, ...]) -> None:
    """Ray would wait for a minute and end the process by a signal; the cluster is a port that is closed here."""
    script = f"""
import sys, threading, types
from raysvc import cluster as cluster_module
hangs = lambda *_: threading.Event().wait()
context = types.SimpleNamespace(gcs_address=sys.argv[1])
def join(address):
    assert "ray" not in sys.modules, "it would not sign in as the cluster asks for it"
    sys.modules["ray"] = types.SimpleNamespace(get_runtime_context=lambda: context, nodes=hangs, is_initialized=lambda: False)
cluster_module.join_cluster = join
from raysvc.cli.top import top
top(address=sys.argv[1], interval=1.0, count=None, web={"--web" in kind}, port=0, as_json={"--json" in kind})
"""
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        command = [sys.executable, "-c", script, address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        cluster.accept()[0].close()
    out, said = process.communicate(timeout=200)
    assert (process.returncode, said) == ("--json" in kind, f"the cluster at {address} has ended\n")
    assert out.startswith("http://") if kind == ("--web",) else out == ""
