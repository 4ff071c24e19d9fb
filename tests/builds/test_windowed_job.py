"""Jobs with `plan.shuffle: window`: served, shown, replayed and mixed; rows are numbered by slice everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc import row_ids
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.api import serve_spec
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.job_plan import plan_of
from raysvc.cli.main import app
from raysvc.collate.row_values import RowValues
from raysvc.job.job_file import load_job
from raysvc.plan.state import PlanState
from raysvc.training.loss_shares import LossShares

runner = CliRunner()


def conversations(folder: Path, name: str, count: int, turns: int) -> Path:
    """Conversation n has 1 to `turns` turns, and says its own number."""
    lines = []
    for number in range(count):
        texts = [f"{name} {number} {turn}" for turn in range(1 + number % turns)]
        messages = [{"role": role, "content": text} for text in texts for role in ("user", "assistant")]
        lines.append(json.dumps({"messages": messages}))
    path = folder / f"{name}.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def job_file(folder: Path, sample: dict[str, str], rows: Path, **sections: Any) -> Path:
    job = {
        "source": {"path": str(rows), "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "train_on": "each_assistant_turn",
        "cache": {"root": str(folder / "cache")},
        "workers": {"slice_mb": rows.stat().st_size / 9 / 1e6},
        "plan": {"batch_size": 7, "mini_batch_size": 4, "shuffle": "window(3)", "epochs": 2},
        "server": {"name": "windowed"},
        "trainer": {"dp_size": 2, "run_dir": str(folder / "run")},
        **sections,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def stream_of(job_path: Path) -> tuple[EntryStream, CacheEntry]:
    job = load_job(job_path)
    entry = raysvc.tokenize(job)
    spec = serve_spec(job, entry)
    recipe = Recipe(spec.plan, spec.pad_token_id)
    return EntryStream(spec.sources, spec.storage_options, recipe, spec.mixture), entry


def run_json(*arguments: str) -> dict[str, Any]:
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_served_step_has_the_rows_that_its_ids_name(tmp_path: Path, sample: dict[str, str]) -> None:
    path = job_file(tmp_path, sample, conversations(tmp_path, "talk", 90, 4))
    stream, entry = stream_of(path)
    slices = entry.entries[0].slice_starts  # type: ignore[union-attr]
    assert len(slices) - 1 >= 8
    table = entry.rows.table().to_pylist()
    rows = {(row["source_row"], tuple(row["input_ids"])): None for row in table}
    seen: list[tuple[int, tuple[int, ...]]] = []
    for step in range(stream.schedule.steps_per_epoch):
        info, shards = stream.make(step, (2,))
        ids = [row for mini in info.mini_batches for row in mini.row_ids.tolist()]
        for row in ids:
            place = row_ids.split(np.array([row]))
            plain = table[int(slices[place.slice[0]] + place.row[0])]
            assert plain == entry.row(row)
            seen.append((plain["source_row"], tuple(plain["input_ids"])))
        for shard in shards:
            for index, row in enumerate(shard.row_ids.tolist()):
                if row >= 0:
                    length = int(shard.arrays["seq_lengths"][index])
                    assert shard.arrays["input_ids"][index, :length].tolist() == entry.row(row)["input_ids"]
    assert len(seen) == len(set(seen)) == len(rows)
    assert set(seen) == set(rows)


def test_conversations_that_were_left_out_have_a_place_and_no_rows(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    """One of them is dropped, and one cannot be read."""
    rows = conversations(tmp_path, "talk", 40, 4)
    lines = rows.read_text().splitlines()
    lines[3] = '{"messages": [{"role": "user", "content": "alone"}]}'
    lines[5] = "not json"
    rows.write_text("\n".join(lines) + "\n")
    path = job_file(tmp_path, sample, rows, max_quarantine=0.5)
    job = load_job(path)
    entry = raysvc.tokenize(job)
    plan = plan_of(job, entry)
    assert plan.schedule.num_groups == 40
    steps = [plan.step(step, 1) for step in range(plan.schedule.steps_per_epoch)]
    ids = [row for step in steps for mini in step.mini_batches for row in mini.row_ids.tolist()]
    assert {entry.row(row)["source_row"] for row in ids} == set(range(40)) - {3, 5}
    assert sum(mini.num_groups for step in steps for mini in step.mini_batches) == 38


def test_plan_show_and_replay_speak_of_the_same_rows(tmp_path: Path, sample: dict[str, str]) -> None:
    path = job_file(tmp_path, sample, conversations(tmp_path, "talk", 60, 3))
    stream, entry = stream_of(path)
    info, shards = stream.make(3, (2,))
    served = sorted(row_ids.written(row) for mini in info.mini_batches for row in mini.row_ids.tolist())
    planned = run_json("plan", "-c", str(path), "--step", "3")["rows"]
    assert sorted(row["row_id"] for row in planned) == served
    assert {row["row_id"]: row["source_row"] for row in planned} == {
        row: entry.row(row)["source_row"] for row in served
    }
    shown = run_json("show", "-c", str(path), "--step", "3", "--rows")["rows"]
    assert sorted(row["row_id"] for row in shown if row["row_id"] is not None) == served
    replayed = run_json("replay", "-c", str(path), "--step", "3")
    assert [shard["sha256"] for shard in replayed["shards"]] == [shard.digest() for shard in shards]
    for row in served[:4]:
        one = run_json("show", "-c", str(path), "--row", row)
        assert one["source_row"] == entry.row(row)["source_row"]
        assert one["turn"] == list(entry.turns([row])[0] or ())
    wrong = runner.invoke(app, ["show", "-c", str(path), "--row", str(99 << 32)])
    assert wrong.exit_code == 2
    assert f"there is no row 0:99:0; the entry has {entry.num_rows:,}; " in wrong.stderr


def test_a_number_that_no_row_can_have_is_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(tmp_path, sample, conversations(tmp_path, "rows", 9, 2))
    for row in (1 << 51, 1 << 70):
        result = runner.invoke(app, ["show", str(job), "--row", str(row)])
        assert result.exit_code == 2
        assert "error: row: " in result.stderr
        assert "0:524288:0" in result.stderr or str(row) in result.stderr


def test_a_mixture_of_a_windowed_and_a_full_source_is_served_and_counted_by_source(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    talk, tale = conversations(tmp_path, "talk", 60, 3), conversations(tmp_path, "tale", 20, 2)
    sources = {
        "talk": {"source": {"path": str(talk), "format": "chat"}, "epochs": 1},
        "tale": {"source": {"path": str(tale), "format": "chat"}, "epochs": 2, "shuffle": "full"},
    }
    path = job_file(tmp_path, sample, talk, mixture={"sources": sources})
    data = yaml.safe_load(path.read_text())
    del data["source"]
    path.write_text(yaml.safe_dump(data))
    stream, entry = stream_of(path)
    assert stream.schedule.num_groups == 100
    by_source = {"talk": 0, "tale": 0}
    every: list[int] = []
    for step in range(stream.schedule.steps_per_epoch):
        info, _ = stream.make(step, (2,))
        ids = [row for mini in info.mini_batches for row in mini.row_ids.tolist()]
        every += ids
        for (name, number), source in zip(entry.origins(ids), entry.sources_of(ids), strict=True):
            assert name == source
            by_source[name] += 1
            assert number < {"talk": 60, "tale": 20}[name]
    assert by_source["talk"] == sum(1 + n % 3 for n in range(60))
    assert by_source["tale"] == 2 * sum(1 + n % 2 for n in range(20))
    texts = {"talk": "talk", "tale": "tale"}
    for row, name in zip(every[:30], entry.sources_of(every[:30]), strict=True):
        assert texts[name] in entry.row(row).text
    planned = run_json("plan", "-c", str(path), "--step", "3")["rows"]
    assert {row["source"] for row in planned} <= {"talk", "tale"}
    values = RowValues(
        np.array(every),
        np.full(len(every), 9),
        {},
        {"loss": np.ones(len(every)), "targets": np.ones(len(every))},
    )
    shares = LossShares(entry).of([[SimpleNamespace(rows=values)]])  # type: ignore[list-item]
    assert shares["by_source"] == {name: [count, count] for name, count in by_source.items()}


def test_weights_of_a_mixture_are_shares_of_the_rows_of_the_source(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    talk, tale = conversations(tmp_path, "talk", 400, 1), conversations(tmp_path, "tale", 400, 1)
    lines = talk.read_text().splitlines()
    talk.write_text("".join(line + "\n" if n % 2 else "not json\n" for n, line in enumerate(lines)))
    sources = {
        name: {"source": {"path": str(path), "format": "chat"}, "weight": 1}
        for name, path in (("talk", talk), ("tale", tale))
    }
    path = job_file(tmp_path, sample, talk, mixture={"sources": sources}, max_quarantine=0.6)
    data = yaml.safe_load(path.read_text())
    del data["source"]
    path.write_text(yaml.safe_dump(data))
    job = load_job(path)
    entry = raysvc.tokenize(job)
    plan = plan_of(job, entry)
    ids = [
        row
        for step in range(plan.schedule.steps_per_epoch)
        for mini in plan.step(step, 1).mini_batches
        for row in mini.row_ids.tolist()
    ]
    names = entry.sources_of(ids)
    assert plan.schedule.num_groups == 800
    assert names.count("talk") == 200  # half of its rows cannot be read, and leave holes
    assert names.count("tale") == 400


@pytest.mark.ray
@pytest.mark.slow
def test_a_windowed_run_goes_on_in_the_middle_of_a_window_on_other_ranks(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    rows = conversations(tmp_path, "talk", 60, 3)
    plan = {"batch_size": 8, "mini_batch_size": 4, "shuffle": "window(3)", "epochs": 2, "layout": "packed",
            "micro_batch_tokens": 512}  # fmt: skip

    def job(name: str) -> Path:
        trainer = {
            "dp_size": 2,
            "model": "tiny",
            "run_dir": str(tmp_path / name),
            "checkpoint_every_steps": 5,
        }
        return job_file(tmp_path, sample, rows, plan=plan, server={"name": name}, trainer=trainer)

    whole = raysvc.train(job("whole")).metrics
    raysvc.train(job("cut"), trainer={"max_steps": 5})
    rest = raysvc.train(job("cut"), trainer={"dp_size": 1, "resume": "changed"}).metrics
    assert rest["resumed_from"] == 5
    assert rest["steps"] == whole["steps"] == 16
    logs = [(tmp_path / name / "rows.jsonl").read_bytes() for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    known = plan_of(load_job(job("whole")), raysvc.tokenize(job("whole")))
    logged = [json.loads(line) for line in logs[0].decode().splitlines()]
    for line in logged:
        mini = known.step(line["step"], 3).mini_batches[line["mini"]]
        assert line["row_ids"] == list(map(row_ids.written, mini.row_ids.tolist()))
    assert PlanState.of(known, 4).to_json()["groups"] == 40
