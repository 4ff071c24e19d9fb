"""The rows of evals, and what is told of those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.api import entry_or_build, serve_spec
from raysvc.errors import ConfigError, QuarantineExceeded, SourceError, UserMistake, keys_under
from raysvc.evals.eval_entries import _eval_entry, check_evals
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


PAIR = {"prompt": "2 + 2 = ", "chosen": "yes.", "rejected": "never."}


def pair_job(folder: Path, sample: dict[str, str], held: list[dict[str, Any]], **more: Any) -> Any:
    for name, rows in (("rows", [{**PAIR, "prompt": f"{n}: "} for n in range(4)]), ("held", held)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_job(
        {
            "source": {"path": str(folder / "rows.jsonl"), **more.pop("source", {})},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(folder / "cache")},
            "trainer": {"objective": "dpo"},
            "evals": {"held": {"source": {"path": str(folder / "held.jsonl")}}},
            **more,
        }
    )


CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


@pytest.mark.parametrize(
    ("held", "more", "where", "what"),
    [
        (CHAT, {}, "source", "has chat rows, and trainer.objective dpo evaluates preference"),
        (PAIR, {"trainer": {"objective": "sft"}}, "source", "has preference rows, and trainer.objective sft evaluates examples"),
        (PAIR, {"source": {"carry": ["ref_logprobs"]}}, "source.carry", "lacks ref_logprobs, which the rows of training carry"),
    ],
)  # fmt: skip
def test_rows_of_an_eval_that_the_objective_cannot_evaluate_are_refused_before_any_is_tokenized(
    tmp_path: Path, sample: dict[str, str], held: Any, more: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        check_evals(pair_job(tmp_path, sample, [held], **more))
    assert refused.value.where == f"evals.held.{where}"


def test_rows_of_an_eval_have_the_reference_that_the_rows_of_training_have(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = pair_job(tmp_path, sample, [{**PAIR, "prompt": f"{n}: "} for n in (2, 3)])
    entry, _ = entry_or_build(job, None, silent)
    found = _eval_entry(job, "held")
    (held,) = found.entries
    assert found.hit, "it was computed before anything is served"
    ours = entry.rows.read(entry.row_ids()[4:])
    theirs = held.read(held.row_ids())
    assert theirs.tokens["ref_logprobs"].tolist() == ours.tokens["ref_logprobs"].tolist()
    spec = serve_spec(job, entry).evals["held"]
    assert "ref_logprobs" not in spec.without
    assert spec.sources[0].uri == held.uri


@pytest.mark.parametrize("cache", [{"force": True}, {"enabled": False}])
def test_rows_of_an_eval_are_scored_once_also_where_the_cache_is_not_trusted(
    tmp_path: Path, sample: dict[str, str], cache: dict[str, Any]
) -> None:
    job = pair_job(tmp_path, sample, [PAIR], cache={"root": str(tmp_path / "cache"), **cache})
    made = []
    for _ in range(2):
        entry, _ = entry_or_build(job, None, silent)
        uris = {_eval_entry(job, "held").uri, serve_spec(job, entry).evals["held"].sources[0].uri}
        assert len(uris) == 1, "workers may hold the devices by now"
        made.append(uris.pop())
    assert made[0] != made[1]


def test_a_loader_computes_no_column_of_an_eval_and_enrich_does(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = pair_job(tmp_path, sample, [PAIR])
    raysvc.enrich(job.model_copy(update={"evals": {}}))
    loader = raysvc.load(job)
    with pytest.raises(ConfigError, match="wants ref_logprobs, which a model computes"):
        loader.eval("held")
    raysvc.enrich(job)
    (micro,) = loader.eval("held")
    assert "ref_logprobs" in micro.tensors


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
