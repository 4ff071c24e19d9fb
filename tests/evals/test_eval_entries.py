"""The rows of evals, and what is told of those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysvc.api import entry_or_build
from raysvc.errors import ConfigError, QuarantineExceeded, SourceError, UserMistake, keys_under
from raysvc.evals.eval_entries import _eval_entry
from raysvc.job.job_file import load_job
from raysvc.progress import silent


def job_of(folder: Path, sample: dict[str, str], **source: Any) -> Any:
    return load_job(
        source={"path": sample["rows"]},
        tokenizer=sample["tokenizer"],
        cache={"root": str(folder / "cache")},
        evals={"held": {"source": source}},
    )


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"path": "ROWS", "split": "train[:32]"}, "source.split"),
        ({"path": "nowhere.jsonl"}, "source.path"),
        ({"path": "ROWS", "columns": {"messages": "nothing"}}, "source"),
    ],
)
def test_a_mistake_in_an_eval_has_its_own_key_and_no_row_is_tokenized(
    tmp_path: Path, sample: dict[str, str], source: dict[str, Any], key: str
) -> None:
    source = {name: sample["rows"] if one == "ROWS" else one for name, one in source.items()}
    with pytest.raises(UserMistake) as refused:
        entry_or_build(job_of(tmp_path, sample, **source), None, silent)
    assert refused.value.where == f"evals.held.{key}"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".arrow" or "part" in path.name]


def test_rows_of_an_eval_that_cannot_be_verified_are_told_as_its_own(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    path = tmp_path / "held.jsonl"
    rows = [json.loads(line) for line in Path(sample["rows"]).read_text().splitlines()[:4]]
    path.write_text("\n".join([*map(json.dumps, rows), *['{"messages": 3}'] * 4]) + "\n")
    with pytest.raises(UserMistake) as refused:
        _eval_entry(job_of(tmp_path, sample, path=str(path), format="chat"), "held")
    assert refused.value.where.startswith("evals.held")


def test_only_keys_of_the_source_get_the_section_in_front() -> None:
    for where, told in (
        ("source", "evals.a.source"),
        ("source.path", "evals.a.source.path"),
        ("source: row 3", "evals.a.source: row 3"),
        ("sources", "sources"),
        ("tokenizer", "tokenizer"),
    ):
        for kind in (SourceError, ConfigError, QuarantineExceeded):
            with pytest.raises(kind) as refused, keys_under("evals.a"):
                raise kind(where, "is wrong", "mend it")
            assert str(refused.value) == f"{told}: is wrong; mend it"
