"""Nulls that `Dataset.to_json` fills in: counted, warned about, and read as in a table where a job says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.row_counts import warnings_of
from raysvc.chat.slice_tokenizer import SliceResult, SliceTokenizer
from raysvc.job.config import JobConfig, SourceConfig, TextSpec, TokenizerConfig
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.tokenize import tokenize_slice
from tests.pipelines.test_same_rows import TEMPLATE

Tokenize = Callable[[str, bool], SliceResult]


def chat(place: int) -> dict[str, Any]:
    """A row whose call has other arguments than the next one's, and whose tool another schema."""
    given = {"city": "Oslo"} if place % 2 else {"days": place, "flags": [True]}
    properties = {
        name: {"type": "string", "enum": ["a", None]} if name == "city" else {"type": "x"} for name in given
    }
    call = {"type": "function", "function": {"name": "look", "arguments": given}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": properties}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": f"done {place}"},
    ]
    return {"messages": messages, "tools": [tool]}


@pytest.fixture
def tokenize(sample: dict[str, str]) -> Tokenize:
    config = TokenizerConfig(name=sample["tokenizer"], chat_template=TEMPLATE)

    def run(path: str, drop_nulls: bool) -> SliceResult:
        made = SliceTokenizer(TextSpec(tokenizer=config, format="chat", drop_nulls=drop_nulls))
        (piece,) = look_at(SourceConfig(path=(path,))).slices
        return tokenize_slice(made, piece, {})

    return run


@pytest.fixture
def written(tmp_path: Path) -> dict[str, str]:
    """One data set as `datasets` writes it in two ways."""
    import datasets

    data = datasets.Dataset.from_list([chat(place) for place in range(8)])
    data.to_json(str(tmp_path / "rows.jsonl"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    return {kind: str(tmp_path / f"rows.{kind}") for kind in ("jsonl", "parquet")}


def test_one_data_set_gives_the_same_ids_as_json_lines_and_as_parquet_where_nulls_are_dropped(
    written: dict[str, str], tokenize: Tokenize
) -> None:
    table = tokenize(written["parquet"], False)
    filled, dropped = tokenize(written["jsonl"], False), tokenize(written["jsonl"], True)
    assert table.row_counts.rows_written == 8
    assert dropped.table.to_pylist() == table.table.to_pylist() != filled.table.to_pylist()
    assert dropped.sampled > 0  # rows were compared with apply_chat_template
    assert not warnings_of(dropped.row_counts.to_json())
    assert not warnings_of(table.row_counts.to_json())


def test_filled_nulls_are_counted_and_warned_about_with_the_setting_that_drops_them(
    written: dict[str, str], tokenize: Tokenize
) -> None:
    counts = tokenize(written["jsonl"], False).row_counts
    assert dict(counts.normalized) == {"nulls in arguments of calls": 8, "nulls in tools": 8}
    [warning] = warnings_of(counts.to_json())
    assert warning.startswith("8 rows have nulls")
    assert "source.drop_nulls: true" in warning


def test_filled_nulls_are_warned_about_where_few_rows_have_calls_at_all(
    written: dict[str, str], tmp_path: Path, tokenize: Tokenize
) -> None:
    plain = [{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "no"}]}] * 150
    path = tmp_path / "mixed.jsonl"
    path.write_text(Path(written["jsonl"]).read_text() + "".join(json.dumps(row) + "\n" for row in plain))
    [warning] = warnings_of(tokenize(str(path), False).row_counts.to_json())
    assert warning.startswith("8 rows have nulls")


def test_a_null_that_few_rows_have_a_default_and_a_list_warn_of_nothing(
    tmp_path: Path, tokenize: Tokenize
) -> None:
    rows = [chat(1) for _ in range(120)]
    rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["note"] = None
    for row in rows:
        row["tools"][0]["function"]["parameters"]["properties"]["city"]["default"] = None
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = tokenize(str(path), False).row_counts
    assert dict(counts.normalized) == {"nulls in arguments of calls": 1}
    assert not warnings_of(counts.to_json())


def test_dropping_nulls_gives_another_key_and_not_dropping_them_leaves_the_recipe_as_it_was(
    sample: dict[str, str], tmp_path: Path
) -> None:
    from raysvc.builds.build_plan import plan_build
    from raysvc.cache.store.open import open_store

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(chat(place)) + "\n" for place in range(2)))
    tokenizer = TokenizerConfig(name=sample["tokenizer"])
    source = SourceConfig(path=(str(path),))
    store = open_store(str(tmp_path / "cache"))
    kept, dropped = (
        plan_build(JobConfig(source=one, tokenizer=tokenizer), store)
        for one in (source, source.model_copy(update={"drop_nulls": True}))
    )
    assert "drop_nulls" not in json.dumps(kept.recipe)
    assert kept.key != dropped.key
