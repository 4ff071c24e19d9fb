"""Mistakes that are told at once: before Ray starts, before a row is tokenized, and with the whole key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.errors import UserMistake
from raysvc.job.config import idle_ranks
from raysvc.job.job_file import load_job
from raysvc.training import train as of_train


def job_of(folder: Path, sample: dict[str, str], sections: dict[str, Any]) -> dict[str, Any]:
    """ROWS, NONE and BARE stand for rows, for a folder that is not there, and for a model without weights."""
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100}))
    names = {"ROWS": sample["rows"], "NONE": str(folder / "none"), "BARE": str(bare)}
    base = {
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "trainer": {"run_dir": str(folder / "run")},
    }
    text = json.dumps({"source": {"path": "ROWS"}, **sections})
    for name, path in names.items():
        text = text.replace(f'"{name}', f'"{path}')
    given = json.loads(text)
    return {**base, **given, "trainer": {**base["trainer"], **given.get("trainer", {})}}


A_PART = {"path": "ROWS", "split": "train[:32]"}
MIXED = {
    "mixture": {
        "sources": {"a": {"source": {"path": "ROWS"}, "weight": 1}, "b": {"source": A_PART, "weight": 1}}
    }
}


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"source": A_PART}, "source.split"),
        ({"source": {"path": "NONE.jsonl"}}, "source.path"),
        ({**MIXED, "source": {"path": "ROWS"}}, "mixture.sources.b.source.split"),
        ({"evals": {"held": {"source": A_PART}}}, "evals.held.source.split"),
        ({"evals": {"held": {"source": {"path": "NONE.jsonl"}}}}, "evals.held.source.path"),
        ({"trainer": {"model": "NONE"}}, "trainer.model"),
        ({"trainer": {"model": "BARE"}}, "trainer.model"),
        ({"trainer": {"model": "./none"}}, "trainer.model"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_ray_starts(
    tmp_path: Path,
    sample: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    where: str,
) -> None:
    monkeypatch.setattr(of_train, "starting", lambda *_, **__: pytest.fail("Ray starts"))
    monkeypatch.setattr(of_train, "starts_own", lambda _: True)
    with pytest.raises(UserMistake) as refused:
        raysvc.train(job_of(tmp_path, sample, sections))
    assert refused.value.where == where
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("plan", "ranks", "idle"),
    [
        ({"batch_size": 8}, 16, 8),
        ({"batch_size": 1}, 2, 1),
        ({"batch_size": 8, "mini_batch_size": 2}, 4, 2),
        ({"batch_size": 8}, 8, 0),
        ({"batch_size": 1, "layout": "stream", "window": 64}, 2, 0),
    ],
)
def test_ranks_that_get_no_row_are_known_before_the_rows(plan: dict[str, Any], ranks: int, idle: int) -> None:
    job = load_job(source={"path": "x"}, tokenizer="t", plan=plan, trainer={"dp_size": ranks})
    assert idle_ranks(job) == idle
