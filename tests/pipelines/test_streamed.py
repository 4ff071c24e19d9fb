"""Files of a `datasets` name, read slice by slice; the oracle is the streaming reader of `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources.look import look_at


def rows_of(config: SourceConfig) -> list[Any]:
    return [row.data for piece in look_at(config, 2000).slices for row in read_rows(piece, {})]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_are_those_that_datasets_streams(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        for shard in range(3):
            rows = [{"text": f"{split} {shard} {number}", "number": number} for number in range(50)]
            path = folder / f"{split}-0000{shard}-of-00003.{kind}"
            if kind == "parquet":
                pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = SourceConfig(dataset=str(tmp_path), split="train", stream=True)
    wanted = list(datasets.load_dataset(str(tmp_path), split="train", streaming=True))
    assert rows_of(config) == wanted
    assert len(look_at(config, 2000).slices) >= 3
    assert not list(tmp_path.rglob("*.arrow"))
    with pytest.raises(SourceError, match="is not one of"):
        look_at(config.model_copy(update={"split": "train[:10%]"}))
    with pytest.raises(SourceError, match="is not one of"):
        look_at(config.model_copy(update={"split": None}))


def test_files_that_are_read_in_a_way_of_their_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"data": [{"text": "a"}]}')
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.json\n  field: data\n---\n"
    )
    with pytest.raises(SourceError, match="sets field"):
        look_at(SourceConfig(dataset=str(tmp_path), stream=True))


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(SourceError, match="read by 'csv'"):
        look_at(SourceConfig(dataset=str(tmp_path), stream=True))


def test_stream_is_for_datasets() -> None:
    with pytest.raises(ValidationError, match="stream is for"):
        SourceConfig(path=("a.jsonl",), stream=True)
