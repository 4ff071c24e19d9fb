"""The job that a run keeps in its folder: commands that are given the folder have it, and say what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.cli.sample_data import write_rows
from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.training.run_job import FILE, differences, job_of_run, keep_job

BASE: dict[str, Any] = {
    "source": {"path": "rows.jsonl", "format": "chat"},
    "tokenizer": "tok",
    "cache": {"root": "s3://bucket/cache", "storage_options": {"secret": "hidden"}},
    "plan": {"batch_size": 4, "skip_rows": ["0:0:3"]},
    "trainer": {"run_dir": "runs/a", "dp_size": 1},
}


def kept(folder: Path, **sections: Any) -> JobConfig:
    folder.mkdir(exist_ok=True)
    keep_job(folder, load_job({**BASE, **sections}))
    return job_of_run(folder)


def test_paths_are_absolute_and_a_moved_folder_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    kept(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.chdir("/")
    job = job_of_run(tmp_path / "two")
    assert job.source.path == (str(tmp_path / "rows.jsonl"),)
    assert job.tokenizer.name == str(tmp_path / "tok")
    assert job.cache.root == "s3://bucket/cache"
    assert job.run_dir == str(tmp_path / "two")
    assert job.plan == load_job(BASE).plan


@pytest.mark.parametrize(
    "sections",
    [
        {"evals": {"held": {"source": {"path": "held.jsonl"}}}},
        {"mixture": {"sources": {"a": {"source": {"path": "a"}, "weight": 1}}}, "source": None},
        {"source": {"dataset": "some/rows", "split": "train"}},
    ],
)
def test_every_kind_of_source_is_kept(tmp_path: Path, sections: dict[str, Any]) -> None:
    given = {name: one for name, one in {**BASE, **sections}.items() if one is not None}
    keep_job(tmp_path, load_job(given))
    assert differences(load_job(given), job_of_run(tmp_path)) == {}


def test_no_credential_is_written(tmp_path: Path) -> None:
    assert kept(tmp_path).cache.storage_options == {}
    assert "hidden" not in (tmp_path / FILE).read_text()


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"plan": {"batch_size": 4, "order": "os:system"}}, "plan.order"),
        ({"tokenizer": {"name": "tok", "trust_remote_code": True}}, "tokenizer.trust_remote_code"),
    ],
)
def test_a_stored_job_names_no_code(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"job\.json: names code that would run \({key}\); write -c job.yaml"
    ):
        kept(tmp_path, **sections)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    kept(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    for damaged in (data.replace(b'"batch_size":4', b'"batch_size":5'), data[:-3], b"", b"[]"):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"job\.json: .*remove it, and write -c job\.yaml"):
            job_of_run(tmp_path)


@pytest.mark.ray
def test_a_report_is_of_the_job_that_the_run_had(
    tmp_path: Path, sample: dict[str, str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raysvc

    write_rows(tmp_path / "rows.jsonl", 24)
    job = {
        "source": {"path": str(tmp_path / "rows.jsonl"), "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 8},
        "server": {"name": "kept", "num_cpus": 0},
        "trainer": {"dp_size": 1, "model": "tiny", "run_dir": str(tmp_path / "runs" / "b")},
    }
    raysvc.train(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**job, "plan": {"batch_size": 12}}))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Any:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done

    (tmp_path / "rows.jsonl").open("a").write((tmp_path / "rows.jsonl").read_text().splitlines()[0] + "\n")
    logged = (tmp_path / "runs" / "b" / "rows.jsonl").read_text().splitlines()
    told = run("report", "job.yaml", "--out", "one.html")
    assert "plan.batch_size was 8 and is 12" in told.stderr
    assert run("report", "b", "--out", "two.html").stderr == ""
    assert (tmp_path / "one.html").read_text() == (tmp_path / "two.html").read_text()
    assert ">24<" in (tmp_path / "two.html").read_text(), "rows of the entry that the run had"
    for words in (["show", "--step", "2", "--rows"], ["replay", "--step", "2"]):
        ours, theirs = run(*words, "job.yaml"), run(*words, "b")
        assert "plan.batch_size was 8 and is 12" in ours.stderr
        assert ours.stdout == theirs.stdout
    assert "batch_size was 8" in run("export", "job.yaml", "--out", "model").stderr
    planned = json.loads(run("plan", "b", "--step", "2", "--json").stdout)["rows"]
    assert {row["row_id"] for row in planned} == set(json.loads(logged[2])["row_ids"])
    today = run("plan", "job.yaml", "--json")
    assert "batch_size was 8 and is 12" in today.stderr
    assert json.loads(today.stdout)["num_rows"] == 25, "a plan of a job.yaml is of what is there now"
    refused = CliRunner().invoke(app, ["plan", "b", "-c", "other.yaml"])
    assert refused.exit_code == 2
    assert "is a run, and there is another job" in refused.output


def test_a_summary_without_what_is_shown_of_it_is_named(tmp_path: Path) -> None:
    from raysvc.errors import StateMismatch
    from raysvc.training.run_folder import RunFolder

    for text in ("{}", '{"stalls": {"by_cause": [], "last": []}}', '{"stalls": {"by_caus": {}, "last": []}}'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(StateMismatch, match=r"summary\.json: is not the JSON that was written"):
            RunFolder(tmp_path).summary()


def test_credentials_come_from_the_job_and_all_else_from_the_run(tmp_path: Path) -> None:
    ran = kept(tmp_path)
    today = load_job({**BASE, "cache": {"root": "s3://other", "storage_options": {"secret": "hidden"}}})
    found = job_of_run(ran.run_dir, today)
    assert found.cache.root == "s3://bucket/cache"
    assert found.cache.storage_options == {"secret": "hidden"}


def test_arguments_of_a_function_that_makes_a_source_are_not_written(tmp_path: Path) -> None:
    keep_job(tmp_path, load_job({**BASE, "source": {"ray": "rows:read", "args": {"password": "hidden"}}}))
    assert "hidden" not in (tmp_path / FILE).read_text()
    with pytest.raises(ConfigError, match=r"names code that would run \(source\.ray\)"):
        job_of_run(tmp_path)
    today = {**BASE, "source": {"ray": "rows:read", "args": {"password": "new"}}}
    assert job_of_run(tmp_path, load_job(today)).source.args == {"password": "new"}, (
        "the user's file names it"
    )
    with pytest.raises(ConfigError, match="names code"):
        job_of_run(tmp_path, load_job({**today, "source": {"ray": "rows:other"}}))
