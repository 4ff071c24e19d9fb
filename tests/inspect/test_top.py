"""`raysvc top`: lines from two snapshots, and a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.inspect.live import Line, Snapshot, cells_of, lines, snapshot, text

FACTS = {
    "name": "a", "state": "held", "holder": "host:1:x", "frontier": 10, "num_steps": 100,
    "rss_bytes": 50_000_000, "seen_s": 2.0,
}  # fmt: skip


def exposition(stall_s: float, ahead: float) -> str:
    return (
        f'ray_raysvc_stall_seconds_total{{server="a",role="trainer"}} {stall_s}\n'
        f'ray_raysvc_look_ahead_steps{{server="a"}} {ahead}\n'
        'ray_raysvc_look_ahead_bytes{server="a"} 3000000\n'
        f'ray_raysvc_stall_read_seconds_total{{server="a"}} {stall_s / 2}\n'
        f'ray_raysvc_stall_collate_seconds_total{{server="a"}} {stall_s}\n'
        'ray_raysvc_look_ahead_steps{server="b"} 9\nother 3\n'
    )


def test_rates_and_shares_are_between_two_looks() -> None:
    before = snapshot(100.0, [FACTS], [exposition(1.0, 2)])
    now = snapshot(104.0, [{**FACTS, "frontier": 18}], [exposition(1.5, 2), "garbage"])
    (line,) = lines(now, before)
    causes = {"collate": 1.5, "read": 0.75}
    assert line == Line(
        "a", "host:1:x", 18, 100, 2.0, 0.125, 1.5, causes, 2, 3_000_000, 50_000_000, 2.0, None
    )
    assert list(line.causes or ()) == ["collate", "read"], "largest first"
    assert text(line) == (
        "server=a trainer=host:1:x step=18/100 steps/s=2.00 stall=12.5% stalled=1.5s "
        "why=collate:1.5s,read:0.8s ahead=2 ahead MB=3.0 memory=50MB lease=2s"
    )


def test_a_trainer_of_ones_own_has_its_waits_for_steps() -> None:
    def seen(time_s: float, waited_s: float) -> Snapshot:
        name = "ray_raysvc_fetch_seconds"
        return snapshot(
            time_s, [FACTS], [f'{name}_sum{{server="a"}} {waited_s}\n{name}_count{{server="a"}} 9\n']
        )

    (line,) = lines(seen(14.0, 3.0), seen(10.0, 1.0))
    assert (line.stall_s, line.stall) == (3.0, 0.5)


def test_ctrl_c_is_how_one_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(interval: float, count: int | None) -> Iterator[list[Line]]:
        yield [Line("a")]
        raise KeyboardInterrupt

    monkeypatch.setattr("raysvc.cli.top._looks", looks)
    monkeypatch.setattr("raysvc.inspect.servers.join_cluster", lambda address: None)
    result = CliRunner().invoke(app, ["top"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "server=a\n", "")


def test_what_is_not_known_is_a_dash_and_not_zero() -> None:
    (line,) = lines(snapshot(1.0, [{**FACTS, "holder": None}], []))
    assert (line.steps_per_s, line.stall, line.stall_s, line.look_ahead, line.lease_age_s) == (None,) * 5
    assert (line.causes, line.look_ahead_bytes) == (None, None)
    assert cells_of(line)["stall"] == "-"
    (silent,) = lines(snapshot(1.0, [{"name": "x", "state": "silent", "cause": "dead"}], []))
    assert silent == Line("x")


def test_a_server_that_came_between_two_looks_has_no_rate() -> None:
    before = snapshot(0.0, [FACTS], [])
    now = snapshot(1.0, [FACTS, {**FACTS, "name": "b"}], [exposition(1, 1)])
    first, second = lines(now, before)
    assert (first.steps_per_s, second.steps_per_s) == (0.0, None)
    assert second.look_ahead == 9


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
    raysvc.serve(job, name="watched-too")
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
