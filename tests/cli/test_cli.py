"""Commands that look: plan, show, cache. Their JSON is the last line of stdout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app

pytestmark = pytest.mark.ray
runner = CliRunner()


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str], ray_session: None
) -> Iterator[Path]:
    """A job whose entry is built."""
    folder = tmp_path_factory.mktemp("cli")
    path = folder / "job.yaml"
    sections = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 16, "micro_batch_tokens": 512},
        "trainer": {"dp_size": 2},
    }
    path.write_text(yaml.safe_dump(sections))
    raysvc.tokenize(path)
    return path


def run(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").splitlines()[-1])
    return found


def root_of(job: Path) -> str:
    return str(job.parent / "cache")


def test_plan_counts_the_steps_of_the_job(job: Path) -> None:
    report = run_json("plan", "-c", str(job))
    assert (report["num_rows"], report["num_steps"], report["optimizer_steps"]) == (240, 15, 15)
    assert report["share_padding"] < 0.5
    told = run("plan", "-c", str(job))
    assert f"\nsteps: {report['num_steps']}, " in told
    assert "MB" in told
    assert not re.search(r"\b[a-z]+_[a-z]+\b", told), "names of fields are no words"


def test_the_steps_of_a_plan_list_every_row_once(job: Path) -> None:
    rows = [
        row for step in range(15) for row in run_json("plan", "-c", str(job), "--step", str(step))["rows"]
    ]
    assert sorted(row["source_row"] for row in rows) == list(range(240))
    assert all(row["row_id"] == f"0:0:{row['source_row']}" for row in rows)


def test_show_marks_what_is_trained(job: Path, sample: dict[str, str]) -> None:
    first = json.loads(Path(sample["rows"]).read_text().splitlines()[0])
    spans = run_json("show", "-c", str(job), "--row", "0")["spans"]
    assert [text for text, trained in spans if trained] == [first["messages"][1]["content"] + "<|im_end|>"]
    assert f"»{first['messages'][1]['content']}" in run("show", "-c", str(job), "--row", "0").replace(
        "\n", ""
    )


def test_a_row_that_is_not_there_is_a_users_mistake(job: Path) -> None:
    assert runner.invoke(app, ["show", "-c", str(job), "--row", "999"]).exit_code == 2


def test_explain_says_hit_or_names_the_field_that_differs(job: Path) -> None:
    assert run_json("cache", "explain", "-c", str(job))["hit"] is True
    text = yaml.safe_load(job.read_text())
    other = job.with_name("other.yaml")
    other.write_text(yaml.safe_dump({**text, "train_on": "last_assistant_message"}))
    found = run_json("cache", "explain", "-c", str(other))
    assert found["hit"] is False
    assert found["differences"] == ["train_on: all_assistant_messages -> last_assistant_message"]


def test_entries_are_listed_shown_verified_and_damage_is_named(job: Path, tmp_path: Path) -> None:
    (entry,) = run_json("cache", "ls", "--root", root_of(job))["entries"]
    assert entry["state"] == "finished"
    info = run_json("cache", "info", entry["folder"][:6], "--root", root_of(job))
    assert info["rows"] == 240
    assert info["report"]["row_counts"]["rows_written"] == 240
    assert run_json("cache", "verify", entry["folder"][:6], "--root", root_of(job))["problems"] == []

    built = raysvc.tokenize(job, cache={"root": str(tmp_path / "mine")})
    part = next(Path(built.uri).glob("part-*.arrow"))
    data = bytearray(part.read_bytes())
    data[-20] ^= 1
    part.write_bytes(data)
    result = runner.invoke(app, ["cache", "verify", built.key[:8], "--root", str(tmp_path / "mine")])
    assert result.exit_code == 1
    assert part.name in result.stderr
    with pytest.raises(raysvc.errors.EntryError, match="damaged"):
        raysvc.open_entry(built.uri)
    rebuilt = raysvc.tokenize(job, cache={"root": str(tmp_path / "mine")})
    assert (rebuilt.hit, rebuilt.num_rows) == (False, 240)


def test_gc_removes_the_leftovers_of_a_dead_build_and_keeps_the_entry(job: Path) -> None:
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter

    whole = raysvc.tokenize(job)
    EntryWriter(open_store(root_of(job)), "ab" * 32).write_part(0, whole.table(), {})
    found = run_json("cache", "gc", "--root", root_of(job), "--grace-hours", "0")
    assert "ab" * 32 in {removal["folder"] for removal in found["removals"]}
    assert raysvc.tokenize(job).hit is True
