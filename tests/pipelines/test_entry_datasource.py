"""Finished entries as Ray Datasets: what pyarrow reads of their files, planned by the manifest alone."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import raysvc
from raysvc.builds.cache_entry import CacheEntry
from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.find import open_finished
from raysvc.cache.key import ADDED, cache_key
from raysvc.cache.local.checksum import BLOCK
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.cache.writer import EntryWriter
from raysvc.errors import ConfigError, EntryError
from raysvc.job.carried import MARK
from raysvc.pipelines.ray_data.entry_datasource import EntryDatasource
from raysvc.row_ids import slice_base, source_base

pytestmark = pytest.mark.ray
SIZES = (5, 0, 7)


def rows_of(num_rows: int, seed: int, tokens: int = 9) -> pa.Table:
    """Columns of every kind that a part holds."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, tokens + 1, num_rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())
    experts = pa.array(rng.integers(0, 255, 6 * total).astype(np.uint8))
    shaped = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(experts, 3), 2)
    halves = pa.array(rng.integers(0, 1 << 16, total).astype(np.uint16))
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(
                offsets, pa.array(rng.integers(0, 999, total).astype("i4"))
            ),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(rng.integers(0, 2, total).astype("u1"))),
            "experts": pa.ListArray.from_arrays(offsets, shaped),
            "logprobs": pa.ListArray.from_arrays(offsets, halves),
            "flags": pa.ListArray.from_arrays(offsets, pa.array(rng.integers(0, 2, total).astype(bool))),
            "source_row": pa.array(np.arange(num_rows)),
            "solved": pa.array(rng.integers(0, 2, num_rows).astype(bool)),
            "domain": pa.array([f"d{number % 3}" for number in range(num_rows)], pa.string()),
        }
    )
    marked = table.schema.field("logprobs").with_metadata({MARK: b"bfloat16"})
    return table.cast(table.schema.set(table.schema.get_field_index("logprobs"), marked))


def build(store: Store, sizes: tuple[int, ...] = SIZES, tokens: int = 9, seed: int = 0) -> Entry:
    recipe: dict[str, Any] = {"sizes": list(sizes), "tokens": tokens, "seed": seed}
    writer = EntryWriter(store, cache_key(recipe))
    parts = [writer.write_part(i, rows_of(size, seed + i, tokens), {}) for i, size in enumerate(sizes)]
    writer.commit(parts, recipe, {})
    return Entry.open(store, writer.folder)


def read_by_pyarrow(folder: Path) -> pa.Table:
    """The part files in the order of their slices, by pyarrow alone."""
    files = sorted(path for path in folder.iterdir() if names.PART.fullmatch(path.name))
    tables = []
    for file in files:
        with pa.ipc.open_stream(pa.memory_map(str(file))) as reader:
            tables.append(reader.read_all())
    return pa.concat_tables(tables)


def table_of(data: Any) -> pa.Table:
    """All rows of a Ray Dataset, by their ids."""
    import ray

    return pa.concat_tables(ray.get(data.to_arrow_refs())).sort_by("row_id")


@pytest.fixture
def small(tmp_path: Path) -> Entry:
    return build(open_store(str(tmp_path / "cache")))


def test_it_is_what_pyarrow_reads_of_the_files_and_each_row_has_its_id(
    small: Entry, ray_session: None
) -> None:
    expected = read_by_pyarrow(Path(small.uri))
    data = raysvc.read_entry(small.uri)
    assert data.schema().base_schema == pa.schema([("row_id", pa.int64()), *expected.schema])
    found = table_of(data)
    assert found.column("row_id").to_pylist() == [*range(5), *(slice_base(2) + row for row in range(7))]
    assert found.drop_columns(["row_id"]).equals(expected)
    assert str(found.schema.field("logprobs").type) == "list<item: uint16>", "bfloat16 as it is stored"
    read = CacheEntry((small,)).row(found.column("row_id")[6].as_py())
    assert read["input_ids"] == found.column("input_ids")[6].as_py()


def test_counts_schema_and_sizes_come_from_the_manifest_and_gc_keeps_away(
    small: Entry, ray_session: None
) -> None:
    expected = read_by_pyarrow(Path(small.uri)).drop_columns(["domain"])
    whole = EntryDatasource([small]).get_read_tasks(1)
    data = CacheEntry((small,)).ray_dataset(["row_id", *expected.column_names])
    for path in Path(small.uri).glob("part-*"):
        path.unlink()
    assert data.count() == 12
    assert data.schema().names == ["row_id", *expected.column_names]
    buffers = sum(chunk.nbytes for column in expected.columns for chunk in column.chunks)
    assert data.size_bytes() == pytest.approx(buffers + 8 * 12, rel=0.05)
    assert [task.metadata.num_rows for task in whole] == [5, 7], "one task a part, none for an empty one"
    assert any(names.USE.fullmatch(path.name) for path in Path(small.uri).iterdir())


def test_columns_that_nobody_asks_for_are_not_read(tmp_path: Path, ray_session: None) -> None:
    entry = build(open_store(str(tmp_path / "cache")), (2000,), 400)
    view = next(entry.parts.views())
    first, nbytes = view.places["experts"] if view.places else (0, 0)
    assert first > 2 * BLOCK
    (path,) = Path(entry.uri).glob("part-*.arrow")
    with path.open("r+b") as file:
        file.seek(first + 40 * nbytes + BLOCK)
        damaged = bytes([file.read(1)[0] ^ 1])
        file.seek(-1, 1)
        file.write(damaged)
    expected = read_by_pyarrow(Path(entry.uri)).column("input_ids")
    data = raysvc.read_entry(entry.uri)
    assert table_of(data.select_columns(["row_id", "input_ids"])).column("input_ids").equals(expected)
    with pytest.raises(Exception, match="are not those that were written"):
        data.select_columns(["experts"]).take_all()


def test_what_people_do_with_a_dataset_works(small: Entry, tmp_path: Path, ray_session: None) -> None:
    import ray.data
    import torch

    expected = read_by_pyarrow(Path(small.uri))
    data = raysvc.read_entry(small.uri)
    batches = list(data.select_columns(["source_row", "solved"]).iter_torch_batches(batch_size=5))
    assert sorted(torch.cat([one["source_row"] for one in batches]).tolist()) == sorted(
        expected.column("source_row").to_pylist()
    )
    lengths = data.map_batches(
        lambda table: pa.table({"n": pa.compute.list_value_length(table["input_ids"])}),
        batch_format="pyarrow",
    )
    assert lengths.sum("n") == small.num_tokens
    data.write_parquet(str(tmp_path / "out"))
    written = pa.parquet.read_table(tmp_path / "out").sort_by("row_id")
    assert written.drop_columns(["row_id"]).cast(expected.schema).equals(expected)
    assert ray.data.read_parquet(str(tmp_path / "out")).count() == 12
    assert len(data.limit(3).take_all()) == 3
    assert pickle.loads(pickle.dumps(data)).count() == 12


def test_a_range_of_rows_and_chosen_columns(small: Entry, ray_session: None) -> None:
    expected = read_by_pyarrow(Path(small.uri))
    for rows in (range(3, 8), range(5), range(6, 12)):
        data = CacheEntry((small,)).ray_dataset(["domain", "row_id", "experts"], rows=rows)
        found = table_of(data)
        assert found.column_names == ["domain", "row_id", "experts"]
        assert found.drop_columns(["row_id"]).equals(
            expected.select(["domain", "experts"]).slice(rows.start, len(rows))
        )
    none = CacheEntry((small,)).ray_dataset(["domain"], rows=range(12, 12))
    assert (none.count(), none.schema().names, none.take_all()) == (0, ["domain"], [])
    cases: list[dict[str, Any]] = [
        {"columns": ["nothing"]}, {"columns": []}, {"columns": ["domain", "domain"]},
        {"rows": range(13)}, {"rows": range(0, 4, 2)}, {"rows": (0, 4)},
    ]  # fmt: skip
    for wrong in cases:
        with pytest.raises(ConfigError):
            CacheEntry((small,)).ray_dataset(**wrong)


def test_columns_that_were_added_are_read_with_their_rows(small: Entry, ray_session: None) -> None:
    lengths = small.lengths()
    recipe = {**small.recipe, ADDED: [{"to": small.key, "columns": {"ref": {"pad": 0}}}]}
    writer, cuts, receipts = EntryWriter(small.store, cache_key(recipe)), (0, 4, 9, 12), []
    flat = np.repeat(np.arange(12, dtype=np.float32), lengths)
    ends = np.cumsum([0, *lengths])
    for index, (first, stop) in enumerate(itertools.pairwise(cuts)):
        offsets = pa.array((ends[first : stop + 1] - ends[first]).astype(np.int32))
        values = pa.ListArray.from_arrays(offsets, pa.array(flat[ends[first] : ends[stop]]))
        receipts.append(writer.write_part(index, pa.table({"ref": values}), {}, {}))
    writer.commit(receipts, recipe, {}, base=small.folder)
    added = CacheEntry((Entry.open(small.store, writer.folder),))
    expected = read_by_pyarrow(Path(small.uri)).append_column(
        "ref", pa.array([[float(row)] * n for row, n in enumerate(lengths.tolist())], pa.list_(pa.float32()))
    )
    assert table_of(added.ray_dataset()).select(expected.column_names).equals(expected)
    some = table_of(added.ray_dataset(["row_id", "ref"], rows=range(2, 11)))
    assert some.column("ref").to_pylist() == expected.column("ref").to_pylist()[2:11]


def test_several_entries_are_one_dataset_and_one_that_grows_is_refused(
    small: Entry, ray_session: None
) -> None:
    other = build(small.store, (3,), seed=7)
    found = table_of(CacheEntry((small, other)).ray_dataset(["row_id", "input_ids"]))
    ids = found.column("row_id").to_pylist()
    assert ids[12:] == [source_base(1) + row for row in range(3)]
    assert found.column("input_ids").to_pylist()[12:] == other.table().column("input_ids").to_pylist()
    growing = Entry.open(small.store, small.folder)
    growing.coming = pa  # type: ignore[assignment]  # whatever is known of it
    with pytest.raises(EntryError, match="has not finished"):
        CacheEntry((growing,)).ray_dataset()


def test_an_entry_on_s3_is_read_with_its_storage_options(
    s3_server: Any, ray_session: None, tmp_path: Path
) -> None:
    region = {"client_kwargs": {"region_name": "us-east-1"}}
    root = s3_server.store().url
    options = {**s3_server.options, **region}
    remote = build(open_store(root, options))
    local = build(open_store(str(tmp_path / "cache")))
    found = table_of(raysvc.read_entry(remote.uri, options))
    assert found.drop_columns(["row_id"]).equals(read_by_pyarrow(Path(local.uri)))


def test_rows_that_people_filter_are_the_rows_that_a_server_gives_out(
    serve: Any, entry: Any, tmp_path: Path
) -> None:
    from ray.data.expressions import col

    uri = entry(40, per_part=9)
    lengths = dict(
        zip(CacheEntry((open_finished(uri),)).row_ids().tolist(), open_finished(uri).lengths(), strict=True)
    )
    long = raysvc.read_entry(uri, columns=["row_id", "input_ids"]).map_batches(
        lambda table: pa.table(
            {"row_id": table["row_id"], "n": pa.compute.list_value_length(table["input_ids"])}
        ),
        batch_format="pyarrow",
    )
    long.filter(expr=col("n") > 12).select_columns(["row_id"]).write_parquet(str(tmp_path / "long"))
    plan = {"rows": {"include": str(tmp_path / "long")}, "epochs": 1, "batch_size": 4, "mini_batch_size": 4}
    serve("filtered", plan=plan, sources=[uri])
    with raysvc.attach_rank("filtered", rank=0) as client:
        given = [row for step in client.steps() for shard in step.shards for row in shard.row_ids.tolist()]
    assert sorted(row for row in given if row >= 0) == [row for row, n in lengths.items() if n > 12]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_lance_takes_an_entry(small: Entry, tmp_path: Path, ray_session: None) -> None:
    lance = pytest.importorskip("lance")
    if int(lance.__version__.partition(".")[0]) > 2:
        pytest.skip("Ray 2.60 calls later versions of pylance with an argument that they lack")
    raysvc.read_entry(small.uri).write_lance(str(tmp_path / "entry.lance"))
    written = lance.dataset(str(tmp_path / "entry.lance")).to_table().sort_by("row_id")
    expected = read_by_pyarrow(Path(small.uri))
    assert written.select(expected.column_names).to_pylist() == expected.to_pylist()
