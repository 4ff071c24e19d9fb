"""The text of rows that an entry left out, as their source has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raysvc
from raysvc.cli.sample_data import write_rows
from raysvc.inspect import source_texts
from raysvc.inspect.source_texts import with_texts
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

ODD = '{"messages": [{"role": "alien", "content": "<b>Ünïcode</b>"}]}'


def job_of(folder: Path, tokenizer: str, *, mixed: bool = False) -> JobConfig:
    sources = {}
    for name in ("a", "b") if mixed else ("a",):
        path = write_rows(folder / f"{name}.jsonl", 8)
        path.open("a").write(f"{ODD.replace('alien', name)}\nno JSON {name}\n")
        sources[name] = {"source": {"path": str(path), "format": "chat"}, "weight": 1.0}
    where = {"mixture": {"sources": sources}} if mixed else {"source": sources["a"]["source"]}
    return load_job(
        {**where, "tokenizer": tokenizer, "cache": {"root": str(folder / "cache")}, "max_quarantine": 0.5}
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_that_was_left_out_has_the_text_of_its_own_source(
    mixed: bool, tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_of(tmp_path, sample["tokenizer"], mixed=mixed)
    entry = raysvc.tokenize(job)
    told = with_texts(job, entry, entry.report["examples"])
    assert len(told) == (4 if mixed else 2)
    for row in told:
        name = row["dataset"] or "a"
        if row["source_row"] == 8:
            assert json.loads(row["text"]) == json.loads(ODD.replace("alien", name))
        else:
            assert row["text"].strip() == f"no JSON {name}"


def test_a_long_text_is_cut_and_a_source_that_is_another_or_gone_says_so(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, sample["tokenizer"])
    entry = raysvc.tokenize(job)
    rows = entry.report["examples"]
    monkeypatch.setattr(source_texts, "TEXT_CHARS", 5)
    assert (
        with_texts(job, entry, rows)[0]["text"] == f'{{"mes… ({len(ODD) - len("lien") - 5} more characters)'
    )
    monkeypatch.setattr(source_texts, "READ_SLICES", 0)
    assert "is not read for this page" in with_texts(job, entry, rows)[0]["text"]
    path = tmp_path / "a.jsonl"
    path.write_text(ODD + "\n" + path.read_text())
    assert "cannot be read any more: source: holds other rows now" in with_texts(job, entry, rows)[0]["text"]
    path.unlink()
    assert "cannot be read any more: source" in with_texts(job, entry, rows)[0]["text"]
