"""Other tools read an entry without our code."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

from raysvc.cache.export.parquet_export import export_parquet
from raysvc.cache.find import open_finished
from raysvc.cache.store.open import open_store
from raysvc.errors import EntryError

from .helpers import KEY, build, make_slices

COLUMNS = ["input_ids", "loss_mask", "logprobs", "source_row", "solved", "reward", "uid"]


@pytest.fixture
def built(tmp_path):
    slices = make_slices((5, 0, 7))
    build(open_store(str(tmp_path)), slices)
    return open_finished(f"{tmp_path}/{KEY}"), pa.concat_tables(slices)


def test_parts_are_plain_arrow_streams(built):
    polars = pytest.importorskip("polars")
    duckdb = pytest.importorskip("duckdb")
    entry, expected = built
    paths = [f"{entry.uri}/{part.name}" for part in entry.manifest.parts]
    tables = []
    for path in paths:
        with pa.memory_map(path) as source, pa.ipc.open_stream(source) as reader:
            tables.append(reader.read_all())
    rows = pa.concat_tables(tables)
    assert rows.select(COLUMNS).equals(expected.select(COLUMNS))
    frame = polars.concat([polars.read_ipc_stream(path) for path in paths])
    assert frame["input_ids"].to_list() == expected["input_ids"].to_pylist()
    assert frame["uid"].to_list() == expected["uid"].to_pylist()
    data = pyarrow.dataset.dataset(rows)
    found = (
        duckdb.connect()
        .from_arrow(data)
        .aggregate("sum(len(input_ids)) as tokens, count(*) as n")
        .fetchall()[0]
    )
    assert found == (entry.num_tokens, 12)


def test_the_export_is_read_by_all_three(built, tmp_path):
    polars = pytest.importorskip("polars")
    duckdb = pytest.importorskip("duckdb")
    entry, expected = built
    paths = export_parquet(entry, tmp_path / "out")
    assert [path.name for path in paths] == [f"part-{n:05d}.parquet" for n in range(3)]
    read = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert read.select(COLUMNS).to_pylist() == expected.select(COLUMNS).to_pylist()
    glob = f"{tmp_path}/out/*.parquet"
    assert polars.scan_parquet(glob).collect()["source_row"].to_list() == list(range(12))
    found = duckdb.sql(f"select source_row, list_sum(input_ids) from '{glob}' order by source_row").fetchall()
    assert [row for row, _ in found] == list(range(12))
    assert [total or 0 for _, total in found] == [sum(ids) for ids in expected["input_ids"].to_pylist()]


def test_an_export_writes_nothing_over(built, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(EntryError, match="not empty"):
        export_parquet(built[0], tmp_path / "out")


def test_an_export_of_a_damaged_part_is_refused(built, tmp_path):
    entry, _ = built
    path = f"{entry.uri}/{entry.manifest.parts[2].name}"
    data = np.fromfile(path, np.uint8)
    data[len(data) // 2] ^= 1
    data.tofile(path)
    with pytest.raises(EntryError, match="part-00002"):
        export_parquet(entry, tmp_path / "out")
