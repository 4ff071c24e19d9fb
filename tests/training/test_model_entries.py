"""A model that lacks an id of the rows is refused in one line before Ray starts; one that lacks an unused id is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app
from raysvc.errors import ConfigError
from raysvc.job.job_file import load_job
from raysvc.training import train as train_module
from raysvc.training.model_entries import check_entries, may_lack_entries


class RayWasAskedFor(Exception):
    pass


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(*_: Any, **__: Any) -> Any:
        raise RayWasAskedFor

    monkeypatch.setattr(train_module, "starting", starting)


@pytest.fixture(scope="module", name="sample")
def with_an_unused_token(sample: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from transformers import AutoTokenizer

    folder = str(tmp_path_factory.mktemp("tokenizer"))
    hf = AutoTokenizer.from_pretrained(sample["tokenizer"])
    hf.add_tokens(["<|nobody says this|>"])
    hf.save_pretrained(folder)
    return {**sample, "tokenizer": folder}


def model(folder: Path, entries: int, nested: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    sizes = {"vocab_size": entries}
    told = {"model_type": "gemma3", "text_config": sizes} if nested else {"model_type": "llama", **sizes}
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "model.safetensors").touch()
    return str(folder)


def job_file(folder: Path, sample: dict[str, str], name: str, **plan: Any) -> Path:
    path = folder / "job.yaml"
    sections = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "trainer": {"model": name, "max_steps": 1, "run_dir": str(folder / "run")},
        "plan": {"layout": "packed", **plan},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.fixture(scope="module")
def ids(sample: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("ids")
    entry = raysvc.tokenize(load_job(job_file(folder, sample, "tiny")))
    rows: list[list[int]] = entry.table()["input_ids"].to_pylist()
    return rows


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_without_an_id_of_the_rows_is_refused_in_one_line_before_ray_starts(
    nested: bool, tmp_path: Path, sample: dict[str, str], ids: list[list[int]]
) -> None:
    highest = max(map(max, ids))
    row = next(place for place, own in enumerate(ids) if highest in own)
    job = job_file(tmp_path, sample, model(tmp_path / "model", highest, nested))
    result = CliRunner().invoke(app, ["-q", "train", "-c", str(job)])
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1] == (
        f"error: trainer.model: has {highest} entries, and row {row} has the id {highest}; "
        "give a model of the tokenizer that the rows were made with"
    )
    assert "Traceback" not in result.output


def test_a_model_without_an_id_that_no_row_uses_is_trained(
    tmp_path: Path, sample: dict[str, str], ids: list[list[int]]
) -> None:
    job = load_job(job_file(tmp_path, sample, model(tmp_path / "model", max(map(max, ids)) + 1)))
    assert may_lack_entries(job)
    with pytest.raises(RayWasAskedFor):
        raysvc.train(job)


def test_the_padding_needs_an_entry_too(
    tmp_path: Path, sample: dict[str, str], ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = max(map(max, ids)) + 1
    job = load_job(job_file(tmp_path, sample, model(tmp_path / "model", entries), layout="padded_right"))
    entry = raysvc.tokenize(job)
    check_entries(job, entry)
    monkeypatch.setitem(entry.report, "pad_token_id", entries)
    with pytest.raises(ConfigError, match=f"has {entries} entries, and the padding the id {entries}"):
        check_entries(job, entry)


@pytest.mark.parametrize("name", ["tiny", "/nowhere/at/all"])
def test_a_model_that_says_nothing_is_not_looked_at(
    name: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    job = load_job(job_file(tmp_path, sample, name))
    assert not may_lack_entries(job)
    check_entries(job, raysvc.tokenize(job))
