"""Looking back: a step shown and made again, equal to what its trainer was handed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app
from raysvc.collate.shard import read_shard
from raysvc.inspect.row_view import DUMMY, padding_cells, shard_pictures
from raysvc.job.config import PlanConfig
from raysvc.row_ids import parse, written

runner = CliRunner()


def run_json(*arguments: str) -> dict[str, Any]:
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str], ray_session: None
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("replay")
    path = folder / "job.yaml"
    sections = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 14, "mini_batch_size": 7, "layout": "packed", "micro_batch_tokens": 512},
        "server": {"name": "looked-back-at"},
        "trainer": {"dp_size": 2, "run_dir": str(folder / "run")},
    }
    path.write_text(yaml.safe_dump(sections))
    raysvc.tokenize(path)
    return path


@pytest.mark.ray
def test_a_replayed_step_has_the_bytes_that_its_trainer_was_handed(job: Path, tmp_path: Path) -> None:
    import ray

    from raysvc.actors.launch import stop_server

    raysvc.serve(job)
    with raysvc.attach("looked-back-at", dp_size=2) as client:
        step = client.fetch(5)
        handed = [read_shard(ray.get(shard)) for mini in step.mini_batches for shard in mini.shards]
        row_ids = [mini.info.row_ids.tolist() for mini in step.mini_batches if mini.info]
    stop_server("looked-back-at")

    again = run_json("replay", "-c", str(job), "--step", "5", "--out", str(tmp_path / "step.npz"))
    assert [shard["sha256"] for shard in again["shards"]] == [shard.digest() for shard in handed]
    with np.load(tmp_path / "step.npz") as arrays:
        for shard in handed:
            for name, array in shard.arrays.items():
                assert np.array_equal(arrays[f"mini{shard.mini}.rank{shard.rank}.{name}"], array)
    one = run_json(
        "replay", "-c", str(job), "--step", "5", "--rank", "1", "--out", str(tmp_path / "r.safetensors")
    )
    assert [shard["sha256"] for shard in one["shards"]] == [s.digest() for s in handed if s.rank == 1]
    from safetensors.numpy import load_file

    assert np.array_equal(
        load_file(tmp_path / "r.safetensors")["mini1.rank1.labels"], handed[3].arrays["labels"]
    )

    rows = run_json("show", "-c", str(job), "--step", "5", "--rows")["rows"]
    for mini, ids in enumerate(row_ids):
        real = [row for row in rows if row["mini"] == mini and row["row_id"] is not None]
        assert {row["row_id"] for row in real} == set(map(written, ids))
        assert all(row["row_id"] == f"0:0:{row['source_row']}" and row["source"] for row in real)
        positions = {row["row_id"]: row["plan_position"] for row in real}
        assert [positions[written(row)] for row in ids] == list(range(70 + 7 * mini, 70 + 7 * mini + 7))


@pytest.mark.ray
def test_what_is_shown_of_a_step_names_rows_turns_and_dummies(job: Path, tmp_path: Path) -> None:
    plain = runner.invoke(app, ["show", "-c", str(job), "--step", "0", "trainer.dp_size=4"]).stdout
    assert "14 rows" in plain or "of them dummies" in plain
    assert "mini 0 rank 0 micro 0 line 0 columns 0–" in plain
    assert "»" in plain
    page = tmp_path / "step.html"
    result = runner.invoke(app, ["show", "-c", str(job), "--step", "0", "--rank", "1", "--out", str(page)])
    assert result.exit_code == 0, result.stderr
    assert "<b>" in page.read_text()
    assert "<script" not in page.read_text()
    assert runner.invoke(app, ["show", "-c", str(job), "--step", "0", "--rank", "2"]).exit_code == 2
    assert runner.invoke(app, ["show", "-c", str(job), "--rank", "0"]).exit_code == 2
    for command in ("replay", "show"):
        beyond = runner.invoke(app, [command, "-c", str(job), "--step", "999"])
        assert beyond.exit_code == 2
        assert re.search(r"--step: 999 is not below the \d+ steps; give a smaller one", beyond.stderr)


def shards_of(layout: str, **plan: Any) -> tuple[Any, ...]:
    from raysvc.actors.server.make_step import Recipe, make_step
    from raysvc.plan.plan import Plan
    from raysvc.row_batch import RowBatch

    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 30, 23).astype(np.int32)
    offsets = np.append(0, np.cumsum(lengths))
    ids = np.arange(10_000, 10_000 + int(offsets[-1]), dtype=np.int32)
    mask = rng.integers(0, 2, int(offsets[-1])).astype(np.uint8)

    def read(mini: Any) -> RowBatch:
        cells = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in mini.row_ids])
        own = np.append(0, np.cumsum(lengths[mini.row_ids]))
        return RowBatch(mini.row_ids, own, {"input_ids": ids[cells], "loss_mask": mask[cells]}, {})

    config = PlanConfig(batch_size=7, layout=layout, **plan)  # type: ignore[arg-type]
    return make_step([Plan(config, lengths).step(1, 4)], read, [Recipe(config, 0)])[1]


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        ("padded_right", {"micro_batch_size": 2}),
        ("padded_left", {"micro_batch_tokens": 64}),
        ("packed", {"micro_batch_tokens": 64, "align": 4}),
        ("stream", {"window": 16, "micro_batch_size": 2}),
    ],
)
def test_pictures_cover_the_tokens_and_the_loss_of_a_shard(layout: str, plan: dict[str, Any]) -> None:
    dummies, trained = 0, 0
    for shard in shards_of(layout, **plan):
        pictures = shard_pictures(shard)
        assert [picture.row_id for picture in pictures] == shard.row_ids.tolist()
        for picture in pictures:
            dummies += picture.row_id == DUMMY
            trained += picture.trained
            tokens = [int(word) for stretch in picture.stretches for word in stretch.text.split()]
            assert len(tokens) == picture.length == picture.last - picture.first + 1
            if picture.row_id != DUMMY:
                assert tokens == list(range(tokens[0], tokens[0] + len(tokens))), "neighbours in the source"
                assert tokens[0] >= 10_000
        padding, cells = padding_cells(shard)
        assert padding + sum(p.length for p in pictures if p.row_id != DUMMY) == cells
    assert trained == shard.denominators.tokens
    assert dummies > 0 or layout != "padded_right"


@pytest.mark.slow
@pytest.mark.ray
def test_rows_that_a_file_takes_out_in_mid_run_leave_holes_from_there_on(
    job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "dp_size": 1}
    raysvc.train(job, trainer={**options, "max_steps": 1})
    before = run_json("plan", "-c", str(job), "--step", "1")["rows"]
    seen = run_json("plan", "-c", str(job), "--step", "0")["rows"]
    bad = sorted([before[0]["row_id"], before[5]["row_id"], seen[0]["row_id"]])
    skip = tmp_path / "bad.txt"
    skip.write_text(f"# looked odd\n{bad[2]}\n{bad[0]}  # twice\n" + json.dumps({"row_id": bad[1]}) + "\n")
    other = tmp_path / "job.yaml"
    sections = yaml.safe_load(job.read_text())
    sections["plan"]["skip_rows"] = str(skip)
    sections["trainer"] = {**options, "max_steps": 2, "resume": "changed"}
    other.write_text(yaml.safe_dump(sections))
    summary = raysvc.train(other).metrics
    assert (summary["resumed_from"], summary["rows"]) == (1, 14 + 12)
    assert "plan.skip_rows changed at step 1: it had 0 rows and has 3" in caplog.text

    lines = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    for step in (0, 1):  # each as it was made then, whatever the job says now
        rows = run_json("show", "-c", str(other), "--step", str(step), "--rows")["rows"]
        real = [row["row_id"] for row in rows if row["row_id"] is not None]
        assert sorted(real) == sorted(
            row for line in lines if line["step"] == step for row in line["row_ids"]
        )
        assert bool(set(bad) & set(real)) == (step == 0)
    again = run_json("replay", "-c", str(other), "--step", "0", "plan.layout=padded_right")
    assert again["recorded"] is True
    assert again["dp_size"] == 1
    log = tmp_path / "run" / "rows.jsonl"
    numbered = [{**line, "row_ids": [parse(row) for row in line["row_ids"]]} for line in lines]
    log.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in numbered))
    old = runner.invoke(app, ["replay", "-c", str(other), "--step", "0"])
    assert old.exit_code == 2
    assert "names rows by numbers, as raysvc did before" in old.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\nx\n", "line 2"),
        ("[1, 2.5]", "item 2"),
        ("[1,", "not a JSON list"),
        ("-1", "line 1"),
        ("true", "line 1"),
    ],
)
def test_a_file_of_row_ids_with_something_else_in_it_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "skip"
    path.write_text(text)
    with pytest.raises(raysvc.errors.ConfigError, match=said) as caught:
        raysvc.tokenize(source={"path": "x"}, tokenizer="t", plan={"skip_rows": str(path)})
    assert caught.value.where == "plan.skip_rows"
    path.write_text("[3, 1, 3]")
    assert PlanConfig(skip_rows=str(path)).skip_rows == (1, 3)  # type: ignore[arg-type]


@pytest.mark.ray
def test_a_step_of_rollouts_comes_again_from_the_spool_until_that_is_gone(
    tmp_path: Path, ray_session: None
) -> None:
    import ray

    from raysvc.actors.launch import stop_server

    run = tmp_path / "run"
    raysvc.serve_rollouts("again", run_dir=str(run), pad_token_id=0, plan={"batch_size": 2}, wait_s=20)
    groups = [
        raysvc.Group(
            uid=f"g{n}", input_ids=[[1, 2, 3 + n], [4, 5]], loss_mask=[[0, 1, 1], [0, 1]], weight_version=0
        )
        for n in range(4)
    ]
    raysvc.rollouts("again").put_groups(groups)
    with raysvc.attach("again", dp_size=2) as client:
        step = next(iter(client))
        handed = [read_shard(ray.get(shard)).digest() for mini in step.mini_batches for shard in mini.shards]
        client.commit(step.index)
    stop_server("again")

    arguments = ["replay", str(run), "--step", "0"]
    assert runner.invoke(app, arguments).exit_code == 2  # its dp_size was the trainer's alone
    again = run_json(*arguments, "--dp-size", "2")
    assert [shard["sha256"] for shard in again["shards"]] == handed
    shutil.rmtree(run / "server" / "rollouts" / "groups")
    gone = runner.invoke(app, [*arguments, "--dp-size", "2"])
    assert gone.exit_code == 2
    assert "the groups that were put are gone" in gone.stderr


def test_what_a_run_keeps_of_its_server_holds_no_credentials_and_damage_to_it_is_said(tmp_path: Path) -> None:
    from raysvc.actors.server.kept.served_records import ServedRecords
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.builds.serve_log import read_served
    from raysvc.errors import ConfigError

    secret = {"secret": "hush-7f3a91"}
    spec = ServeSpec(
        name="s", sources=["/e"], plan=PlanConfig(), pad_token_id=0, journal=None, storage_options=secret
    )
    records = ServedRecords(f"{tmp_path}/server", {})
    records.keep(0, spec)
    records.keep(4, spec)
    file = tmp_path / "server" / "served" / "000000000000.json"
    assert list(file.parent.iterdir()) == [file], "the same spec once"
    assert "hush" not in file.read_text()
    found = read_served(str(tmp_path), 7, secret)
    assert found is not None
    assert (found.step, found.dp_size, found.spec) == (0, None, spec)
    assert read_served(str(tmp_path / "elsewhere"), 0) is None
    records.keep(9, spec.model_copy(update={"pad_token_id": 5}))
    later = read_served(str(tmp_path), 9, secret)
    assert later is not None
    assert (later.step, later.spec.pad_token_id) == (9, 5)
    assert read_served(str(tmp_path), 8, secret) == found, "what was said before stays"
    whole = file.read_text() + "\n"
    file = tmp_path / "served.jsonl"
    for damaged in ("{", "[]", whole.replace('"name":"s",', ""), whole.replace('"step":0', '"step":"x"')):
        file.write_text(damaged + "\n")
        with pytest.raises(ConfigError, match="cannot be understood"):
            read_served(str(tmp_path), 7)
    file.write_text(whole + '{"step": 3')  # the run was killed while it wrote
    assert read_served(str(tmp_path), 7, secret) == found
