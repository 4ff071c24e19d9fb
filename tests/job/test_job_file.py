"""Reading a job: files, overrides, and what is said of a mistake."""

from __future__ import annotations

from datetime import date as day
from pathlib import Path

import pytest

from raysvc.errors import ConfigError
from raysvc.job.job_file import load_job

MIXED = {"tokenizer": "folder"}
JOB = {"source": {"path": "rows.jsonl"}, "tokenizer": "folder"}


def test_a_file_a_mapping_and_overrides_say_the_same(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("source: {path: rows.jsonl}\ntokenizer: folder\nplan: {batch_size: 7}\n")
    assert (
        load_job(path) == load_job({**JOB, "plan": {"batch_size": 7}}) == load_job(JOB, ["plan.batch_size=7"])
    )


def test_the_last_override_wins_and_leaves_its_neighbours():
    job = load_job({**JOB, "plan": {"batch_size": 7, "seed": 3}}, ["plan.batch_size=8", "plan.batch_size=9"])
    assert (job.plan.batch_size, job.plan.seed) == (9, 3)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({**JOB, "plan": {"batchsize": 7}}, "plan.batchsize: unknown key; did you mean 'batch_size'?"),
        ({**JOB, "tokenizer": {"path": "folder"}}, "tokenizer.path: unknown key; known are name, "),
        ({**JOB, "zzz": 1}, "zzz: unknown key; known are source, mixture, "),
        ({"source": {"path": "rows.jsonl"}}, "tokenizer: is missing; every job needs source and tokenizer"),
        ({**JOB, "plan": {"batch_size": 0}}, "plan.batch_size: "),
        ({**JOB, "plan": {"cost": [1]}}, "plan.cost.1: is missing; give it a value"),
        ({**JOB, "evals": {"x": {"path": "y"}}}, "evals.x.path: unknown key; write evals.x.source.path"),
        ({**MIXED, "mixture": {}}, "mixture.sources: is missing; give it a value"),
        ({**MIXED, "mixture": {"sources": {}}}, "mixture.sources: is empty; name at least one"),
        ({**MIXED, "mixture": {"sources": {"a": {"weight": 1}}}}, "mixture.sources.a.source: is missing; "),
        ({**MIXED, "mixture": {"sources": {"a": {"source": {"paths": "x"}, "weight": 1}}}},
         "mixture.sources.a.source.paths: unknown key; did you mean 'path'?"),
        ({**MIXED, "mixture": {"sources": {"a": {"source": JOB["source"], "wait": 1}}}},
         "mixture.sources.a.wait: unknown key; did you mean 'weight'?"),
        ({**JOB, "plan": None}, "plan: should be keys with values (given None); give it a value, or leave"),
        ({**JOB, "trainer": {"resume": "maybe"}}, "trainer.resume: should be true or false or should be 'changed' (given 'maybe')"),
        ({**JOB, "trainer": {"loss": "constant"}}, "belong together; give both or neither"),
        ({**JOB, "trainer": {"learning_rate": float("inf")}}, "trainer.learning_rate: should be a finite number (given inf)"),
        ({**JOB, "source": {"path": 5}}, "source.path: should be a path or a list of paths (given 5); change this value"),
        ({**JOB, "trainer": {"run_dir": day(2026, 11, 23)}}, "trainer.run_dir: should be text (given 2026-11-23); put it in quotes"),
        ({**JOB, "server": {"name": "a b"}}, "server.name: should have letters, digits, "),
        ({**JOB, "plan": {"columns": []}}, "plan.columns: names no column (given []); name each array once"),
        ({**JOB, "plan": {"columns": ["labels", "labels"]}}, "plan.columns: names a column twice"),
        (7, "job: 7 is not a job; give the path of a job.yaml, a mapping or a JobConfig"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read (No such file or directory); give the path of a job.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_where_what_and_what_to_do(job, told):
    with pytest.raises(ConfigError) as caught:
        load_job(job)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("source: {path: [rows\ntokenizer: folder", "is not valid YAML (line 2: "),
        (
            "source: {path: rows.jsonl}\ntokenizer: {date: 2026-02-31}",
            "is not valid YAML (day is out of range",
        ),
        (
            "source: {path: a.jsonl}\ntokenizer: t\nplan: {seed: 1}\nplan: {epochs: 2}",
            "is not valid YAML (line 4: 'plan' stands twice)",
        ),
        ("- source", "has no keys; begin with source: and tokenizer:"),
        ("", "has no keys"),
    ],
)
def test_a_file_that_is_no_job_is_named_with_the_line(tmp_path, text, told):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert str(caught.value).startswith(str(path))
    assert told in str(caught.value)


def test_what_is_no_override_is_refused():
    with pytest.raises(ConfigError, match=r"is neither KEY=VALUE nor a run; write plan\.batch_size=64"):
        load_job(JOB, ["batch_size"])


@pytest.mark.parametrize("where", ["source", "cache"])
def test_a_password_in_an_address_is_refused_without_being_repeated(where):
    address = "s3://key:hunter2@bucket/rows.jsonl"
    job = {**JOB, "source": {"path": address}} if where == "source" else {**JOB, "cache": {"root": address}}
    with pytest.raises(ConfigError, match="holds credentials in its address") as caught:
        load_job(job)
    assert "hunter2" not in str(caught.value)


def test_a_key_merged_from_an_anchor_may_be_given_anew(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "source: &a {path: a.jsonl}\ntokenizer: t\nevals: {x: {source: {<<: *a, path: b.jsonl}}}\n"
    )
    assert load_job(path).evals["x"].source.path == ("b.jsonl",)


def test_a_pad_may_be_no_number():
    job = load_job({**JOB, "plan": {"pad_values": {"reward": float("-inf")}}})
    assert job.plan.pad_values == {"reward": float("-inf")}


@pytest.mark.parametrize("typed", ["2:17:45", '"2:17:45"', str((2 << 52) + (17 << 32) + 45)])
def test_a_row_is_typed_as_it_is_written(tmp_path: Path, typed: str) -> None:
    """PyYAML counts `2:17:45` in base 60, as YAML 1.1 did."""
    path = tmp_path / "job.yaml"
    text = "source: {path: x}\ntokenizer: t\nplan:\n  skip_rows: "
    for listed in (f"[{typed}]", f"\n    - {typed}"):
        path.write_text(text + listed + "\n")
        assert load_job(path).plan.skip_rows == (2 * 2**52 + 17 * 2**32 + 45,)
    assert load_job(path, [f"plan.skip_rows=[{typed}]"]).plan.skip_rows == (2 * 2**52 + 17 * 2**32 + 45,)
