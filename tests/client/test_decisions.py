"""Decisions of a driver over Ray: when they hold, what survives the death of the server, and that steps are made again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.spec import MixtureSpec, ServeSpec
from raysvc.collate.shard import read_shard
from raysvc.errors import ConfigError, EntryError, ServerError, StateMismatch, StepOutOfOrder
from raysvc.inspect.replay_run import replay_run
from raysvc.row_ids import written

pytestmark = pytest.mark.ray
ROWS = (90, 60)


@pytest.fixture
def mixed(serve: Callable[..., Any], entry: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """Starts a server of two sources, a and b, with 3 and 1 of every 4 rows; 15 steps of 8 rows."""

    def start(name: str, **fields: Any) -> Any:
        uris = tuple(entry(rows, seed=rows) for rows in ROWS)
        mixture = MixtureSpec(names=("a", "b"), stages=((0, (90, 30)),))
        run = {"journal": str(tmp_path / name / "server"), "plan": {"epochs": 1}}
        return serve(name, sources=uris, mixture=mixture, **{**run, **fields})

    return start


def rows_of(step: Any) -> list[int]:
    return [row for mini in step.mini_batches for row in mini.info.row_ids.tolist()]


def of_b(step: Any) -> int:
    return sum(row >= ROWS[0] for row in rows_of(step))


def kill(server: Any) -> None:
    import ray

    os.kill(ray.get(server.stats.remote())["pid"], signal.SIGKILL)


def digests(step: Any) -> list[str]:
    import ray

    return [read_shard(ray.get(shard)).digest() for mini in step.mini_batches for shard in mini.shards]


@pytest.mark.parametrize("collators", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_weights_hold_beyond_the_look_ahead_through_a_killed_server_and_are_replayed(
    mixed: Callable[..., Any], tmp_path: Path, collators: int
) -> None:
    import ray

    name = f"decided-{collators}"
    server = mixed(name, collators=collators)
    spec = ServeSpec.model_validate_json(ray.get(server.spec_json.remote())[0])
    ServedRecords(str(tmp_path / name / "server"), {}).keep(0, spec)
    handed: dict[int, list[str]] = {}
    came: dict[int, int] = {}
    with raysvc.attach(name, dp_size=1, look_ahead_steps=3) as client:
        for step in client:
            handed[step.index], came[step.index] = digests(step), of_b(step)
            if step.index == 2:
                with pytest.raises(StepOutOfOrder, match="refused step 5: expected step 6 or a later one"):
                    client.decisions.set_mixture_weights({"a": 0, "b": 1}, from_step=5)
                sizes = client.outline(8).nbytes
                assert client.decisions.set_mixture_weights({"a": 0, "b": 1}) == 6
                assert client.outline(8).nbytes != sizes
                kill(server)
                assert client.decisions.set_mixture_weights({"a": 1, "b": 0}, from_step=10) == 10
            if step.index == 8:
                kill(server)
                assert client.decisions.set_mixture_weights({"a": 1, "b": 0}, from_step=10) == 10
            client.commit(step.index)
        state = client.state_dict()
        assert [one["from_step"] for one in client.decisions] == [6, 10]
    assert [came[step] for step in range(15)] == [2] * 6 + [8] * 4 + [0] * 5
    assert [mark[0] for mark in state["plan"]["decided"]] == [6, 10]
    for step, sums in handed.items():
        made = replay_run(str(tmp_path / name), step, dp_size=1)
        assert [shard.digest() for shard in made.chosen()] == sums
    assert made.schedule.num_steps == 15


def test_a_resumed_trainer_goes_on_with_what_was_decided_and_what_it_reported(
    mixed: Callable[..., Any],
) -> None:
    server = mixed("reporting")
    with raysvc.attach("reporting", dp_size=1, look_ahead_steps=0) as client:
        first = next(iter(client.steps(stop=1)))
        rows = rows_of(first)
        client.report_rows(0, rows, loss=np.arange(8), reward=[0.5] * 8)
        with pytest.raises(ConfigError, match="step 0 was reported already"):
            client.report_rows(0, rows, loss=np.arange(8))
        client.commit(0)
        state = client.state_dict()
        assert client.decisions.skip_rows(range(40), from_step=3) == 3
    kill(server)
    with raysvc.attach("reporting", dp_size=2, look_ahead_steps=0, takeover=True) as client:
        client.load_state_dict(state)
        client.report_rows(0, rows, loss=np.zeros(8))
        found = client.decisions.row_outcomes(0, 4)
        assert found.steps.tolist() == [0] * 8
        assert found.row_ids.tolist() == rows
        assert found.columns["loss"].tolist() == list(range(8))
        assert found.columns["reward"].tolist() == [0.5] * 8
        seen = {step.index: rows_of(step) for step in client}
        assert any(row < 40 for step in (1, 2) for row in seen[step])
        assert not any(row < 40 for step in range(3, 15) for row in seen[step])


def test_what_a_client_may_not_decide_or_report_is_refused_by_name(
    mixed: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path
) -> None:
    mixed("careful")
    with raysvc.attach("careful", dp_size=1) as client:
        for weights, complaint in (
            ({"a": -1, "b": 1}, "must be at least 0"),
            ({"a": float("nan"), "b": 1}, "finite"),
            ({"a": 0, "b": 0}, "none above 0"),
            ({"a": "much", "b": 1}, "is not a number"),
            ([1, 2], "not a mapping"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                client.decisions.set_mixture_weights(weights)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="names no row"):
            client.decisions.skip_rows([])
        with pytest.raises(ConfigError, match="give row ids"):
            client.report_rows(0, [1, 2])
        with pytest.raises(ConfigError, match=r"report_rows\(loss\).*give one number a row"):
            client.report_rows(0, [1, 2], loss=[0.5])
        wrong: list[Any] = [[-1], [1.5], ["1.5"], [2**63], [None], [[1, 2], [3]], [True]]
        for rows in wrong:
            with pytest.raises(ConfigError, match=r"skip_rows\(row_ids\)"):
                client.decisions.skip_rows(rows)
            with pytest.raises(ConfigError, match=r"report_rows\(row_ids\)"):
                client.report_rows(0, rows, loss=[0.5])
        with pytest.raises(ConfigError, match=r"report_rows\(loss\).*numbers"):
            client.report_rows(0, [1], loss=["much"])  # type: ignore[list-item]
        client.report_rows(
            0, [], loss=[]
        )  # as the loop of the guide does when all rows of a step were left out
        assert list(client.decisions) == []
    serve("kept-in-memory", journal=None)
    with raysvc.attach("kept-in-memory", dp_size=1) as client, pytest.raises(ServerError, match="no journal"):
        client.decisions.skip_rows([1])
    assert not (tmp_path / "careful" / "server" / "feedback").exists()


def test_a_replay_without_the_decisions_of_its_run_is_an_error_and_so_is_a_resume(
    mixed: Callable[..., Any], tmp_path: Path
) -> None:
    import json
    import shutil

    import ray

    server, run = mixed("cut"), tmp_path / "cut"
    spec = ServeSpec.model_validate_json(ray.get(server.spec_json.remote())[0])
    ServedRecords(str(run / "server"), {}).keep(0, spec)
    with raysvc.attach("cut", dp_size=1) as client:
        client.decisions.set_mixture_weights({"a": 0, "b": 1}, from_step=2)
        lines = []
        for step in client:
            row_ids = [mini.info.row_ids.tolist() for mini in step.mini_batches if mini.info]
            lines += [
                {"step": step.index, "mini": place, "row_ids": list(map(written, rows))}
                for place, rows in enumerate(row_ids)
            ]
            client.commit(step.index)
        state = client.state_dict()
    (run / "rows.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    assert replay_run(str(run), 4, dp_size=1).info.index == 4
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    shutil.rmtree(run / "server" / "feedback")
    with pytest.raises(EntryError, match="step 4 had other rows than those that can be made again"):
        replay_run(str(run), 4, dp_size=1)
    assert replay_run(str(run), 1, dp_size=1).info.index == 1
    assert replay_run(str(moved), 4, dp_size=1).info.index == 4, "a run folder may be moved"
    kill(server)
    with (
        raysvc.attach("cut", dp_size=1) as client,
        pytest.raises(StateMismatch, match=r"followed decisions from steps \[2\] on"),
    ):
        client.load_state_dict(state)
