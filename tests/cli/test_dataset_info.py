"""`raysvc init dataset_info.json:NAME`: entries as LLaMA-Factory documents them; oracle: the messages that it makes of their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raysvc
from raysvc.cli.dataset_info import source_of
from raysvc.cli.main import app
from raysvc.errors import SourceError
from raysvc.job.job_file import load_job

ENTRIES: dict[str, dict[str, Any]] = {
    "plain": {"file_name": "plain.json"},
    "alpaca": {
        "file_name": "alpaca.json",
        "columns": {"prompt": "ask", "query": "more", "response": "say", "system": "rules", "history": "before"},
    },
    "share": {"file_name": "share.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "openai": {
        "file_name": "openai.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "tagged": {
        "file_name": "tagged.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "asker", "assistant_tag": "helper"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"},
    },
    "share_pairs": {
        "file_name": "share_pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto": {
        "file_name": "kto.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}  # fmt: skip
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"instruction": "q", "input": "", "output": "a"}],
    "alpaca": [{"ask": "q", "more": "", "say": "a", "rules": "s", "before": [["x", "y"]]}],
    "share": [{"conversations": [HUMAN, GPT]}],
    "openai": [{"messages": CHAT}],
    "tagged": [{"talk": [{"who": "asker", "says": "q"}, {"who": "helper", "says": "a"}]}],
    "pairs": [{"instruction": "q", "input": "", "good": "a", "bad": "no"}],
    "share_pairs": [{"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}}],
    "kto": [{"messages": CHAT, "label": True}, {"messages": [CHAT[0], {**CHAT[1], "content": "no"}], "label": False}],
}  # fmt: skip
SYSTEM, BEFORE = (
    {"role": "system", "content": "s"},
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
)
NO = [CHAT[0], {"role": "assistant", "content": "no"}]
MEANT = {  # the conversations of each row
    **{name: [CHAT] for name in ("plain", "share", "openai", "tagged")},
    "alpaca": [[SYSTEM, *BEFORE, *CHAT]],
    "pairs": [CHAT, NO],
    "share_pairs": [CHAT, NO],
    "kto": [CHAT, NO, NO, CHAT],
}
FORMATS = {
    "pairs": "preference",
    "share_pairs": "preference",
    "kto": "kto",
    "plain": "alpaca",
    "alpaca": "alpaca",
}


@pytest.fixture
def info(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps(ENTRIES))
    return tmp_path / "dataset_info.json"


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_becomes_a_job_that_trains_the_conversations_it_means(
    name: str, info: Path, sample: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "job.yaml"
    arguments = ["init", f"{info}:{name}", "--tokenizer", sample["tokenizer"], "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    job = load_job(out)
    assert job.source.format == FORMATS.get(name, "chat")
    cache = job.cache.model_copy(update={"root": str(tmp_path / "cache")})
    entry = raysvc.tokenize(job.model_copy(update={"cache": cache}))
    hf = AutoTokenizer.from_pretrained(sample["tokenizer"])
    wanted = [hf.apply_chat_template(one, tokenize=True, return_dict=False) for one in MEANT[name]]
    found = entry.table()["input_ids"].to_pylist()
    assert found == wanted


def test_a_hub_entry_names_its_dataset_and_split() -> None:
    found = source_of("rows.jsonl")
    assert (found.path, found.format) == (("rows.jsonl",), "auto")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"file_name": "a.json", "num_samples": 5}, "has num_samples, which a job cannot say"),
        ({"script_url": "a"}, "has script_url"),
        ({"file_name": "a.json", "formatting": "odd"}, "has the formatting 'odd'"),
        ({"file_name": "a.json", "columns": {"promt": "a"}}, "maps promt"),
        (
            {"file_name": "a.json", "columns": {"prompt": "a", "response": "b", "kto_tag": "c"}},
            "maps kto_tag",
        ),
        ({}, "has neither file_name nor hf_hub_url"),
    ],
)
def test_what_a_job_cannot_say_is_refused_by_name(entry: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    with pytest.raises(SourceError, match=why):
        source_of(f"{tmp_path}/dataset_info.json:mine")


def test_an_entry_that_is_not_there_is_told_with_the_nearest(info: Path) -> None:
    with pytest.raises(SourceError, match=r"has no entry 'shares'; name one: dataset_info\.json:share"):
        source_of(f"{info}:shares")
    with pytest.raises(SourceError, match="has no entry ''"):
        source_of(str(info))


def test_an_entry_of_the_hub_names_dataset_subset_and_split(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(
        json.dumps(
            {"hub": {"hf_hub_url": "org/name", "ms_hub_url": "other", "subset": "en", "split": "test"}}
        )
    )
    found = source_of(f"{tmp_path}/dataset_info.json:hub")
    assert (found.dataset, found.subset, found.split, found.format) == ("org/name", "en", "test", "alpaca")
    assert found.columns == {}
