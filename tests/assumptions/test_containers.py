"""What we assume of pyarrow, datasets, pandas and polars about the types that they store.

`raysvc.pipelines.reading` reads values by these; where one of them changes, a reader has to.
"""

from __future__ import annotations

import io
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NAME = b"ARROW:extension:name"


def as_file(table: pa.Table) -> pa.Table:
    """A table as Parquet gives it back."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return pq.ParquetFile(sink).read()


def as_stream(table: pa.Table) -> pa.Table:
    """A table as a stream of Arrow gives it back."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


TENSOR = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=[1, 0]),
    pa.array([[1, 2, 3, 4, 5, 6]], pa.list_(pa.int32(), 6)),
)


@pytest.mark.parametrize("through", [as_file, as_stream])
def test_pyarrow_gives_the_storage_of_json_and_of_tensors_as_the_value(through: Any) -> None:
    """`to_pylist` of `arrow.json` is the JSON text, and that of a tensor is flat and in the order of its memory."""
    back = through(pa.table({"json": pa.array(['"a"'], pa.json_()), "tensor": TENSOR}))
    assert back.schema.field("json").type.extension_name == "arrow.json"
    assert back.to_pylist() == [{"json": '"a"', "tensor": [1, 2, 3, 4, 5, 6]}]
    tensor = back["tensor"].combine_chunks()
    assert tensor.to_numpy_ndarray().tolist() == [[[1, 4], [2, 5], [3, 6]]]
    flat = np.array([1, 2, 3, 4, 5, 6], object)
    assert flat.reshape(2, 3).transpose(1, 0).tolist() == tensor.to_numpy_ndarray()[0].tolist()


@pytest.mark.parametrize("through", [as_file, as_stream])
def test_pyarrow_gives_uuids_and_truth_values_as_objects_of_python(through: Any) -> None:
    """`arrow.uuid` gives `uuid.UUID` and `arrow.bool8` gives `bool`."""
    given = uuid.UUID(int=9)
    truth = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([3], pa.int8()))
    back = through(pa.table({"id": pa.array([given.bytes], pa.uuid()), "truth": truth}))
    assert back.to_pylist() == [{"id": given, "truth": True}]


class Unheard(pa.ExtensionType):
    """A type that only this test knows."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "test.unheard")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


@pytest.mark.parametrize("through", [as_file, as_stream])
def test_pyarrow_reads_a_type_that_is_not_registered_as_its_storage(through: Any) -> None:
    """The name of an unregistered type is in the metadata of its field, and nowhere else."""
    field = through(pa.table({"x": pa.ExtensionArray.from_storage(Unheard(), pa.array(["a"]))})).schema.field(
        "x"
    )
    assert (field.type, field.metadata[NAME]) == (pa.string(), b"test.unheard")


def test_pyarrow_makes_a_registered_type_of_the_name_in_the_metadata() -> None:
    """Text with the name `arrow.json` beside it, as other writers have it, comes back as that type, also inside a list."""
    inner = pa.field("item", pa.string(), metadata={NAME: b"arrow.json"})
    back = as_stream(pa.table({"x": pa.array([['"a"']], pa.list_(inner))}))
    assert back.schema.field("x").type.value_type == pa.json_()


def test_pyarrow_decodes_dictionaries_runs_and_views_by_itself() -> None:
    """`to_pylist` gives the values of dictionaries, of runs (also of a slice), of views, and of 16-bit floats."""
    runs = pa.RunEndEncodedArray.from_arrays([2, 5], ["a", "b"])
    assert runs.slice(1, 2).to_pylist() == ["a", "b"]
    assert pa.table({"x": runs}).slice(3, 1).to_pylist() == [{"x": "b"}]
    assert pa.array(["a", None]).dictionary_encode().to_pylist() == ["a", None]
    assert pa.array(["a"], pa.string_view()).to_pylist() == ["a"]
    assert pa.array([[1]], pa.list_view(pa.int8())).to_pylist() == [[1]]
    assert type(pa.array([1.5], pa.float16()).to_pylist()[0]) is float


def test_pyarrow_cannot_read_a_file_as_a_stream_whose_dictionaries_come_late() -> None:
    """Polars writes dictionaries of a file behind its batches; `open_file` reads that, `open_stream` says so by this text."""
    import polars as pl

    from raysvc.pipelines.reading.arrow_file import batches_from_start

    sink = io.BytesIO()
    pl.DataFrame({"x": pl.Series(["a"], dtype=pl.Categorical)}).write_ipc(sink)
    assert pa.ipc.open_file(sink.getvalue()).read_all().to_pylist() == [{"x": "a"}]
    with pytest.raises(Exception, match="dictionaries behind its batches"):
        list(batches_from_start(io.BytesIO(sink.getvalue())))


def test_datasets_stores_columns_of_several_types_as_json_text(tmp_path: Path) -> None:
    """`load_dataset("json")` makes `arrow.json` of them, keeps nulls inside, and its rows are the values."""
    import datasets

    rows = [
        {"messages": [{"role": "user", "content": "12"}], "n": 1},
        {"messages": [{"content": [{"a": None}]}], "n": "x"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    table = data.with_format("arrow")[:]
    assert table.schema.field("messages").type.value_type == pa.json_()
    assert [json.loads(one) for row in table.to_pylist() for one in row["messages"]] == [
        one for row in rows for one in row["messages"]
    ]
    assert [data[place] for place in range(2)] == rows


def test_datasets_takes_a_text_that_is_json_for_json() -> None:
    """Encoded with `Json`, the text "12" becomes the number, and a quoted text loses its quotes: before we see it."""
    from datasets import Dataset, Features, Json

    data = Dataset.from_list([{"x": "12"}, {"x": '"a"'}, {"x": 'say "a"'}], features=Features({"x": Json()}))
    assert data.with_format("arrow")[:].to_pylist() == [{"x": "12"}, {"x": '"a"'}, {"x": '"say \\"a\\""'}]
    assert data["x"][:] == [12, "a", 'say "a"']


def test_datasets_writes_floats_of_json_with_few_digits() -> None:
    """`Json` keeps some nine digits of a float: rows with longer ones differ from their JSON lines before we see them."""
    from datasets import Dataset, Features, Json

    data = Dataset.from_list([{"x": {"a": 0.12345678901234567}}], features=Features({"x": Json()}))
    assert json.loads(data.with_format("arrow")[:].to_pylist()[0]["x"])["a"] != 0.12345678901234567


def test_datasets_stores_arrays_as_lists_in_lists() -> None:
    """The value of `Array2D` is its storage, under this name."""
    from datasets import Array2D, Dataset, Features

    data = Dataset.from_list([{"x": [[1, 2], [3, 4]]}], features=Features({"x": Array2D((2, 2), "int32")}))
    table = data.with_format("arrow")[:]
    assert table.schema.field("x").type.extension_name == "datasets.features.features.Array2DExtensionType"
    assert table.to_pylist() == [{"x": [[1, 2], [3, 4]]}]


def test_datasets_writes_a_null_for_every_key_of_a_struct_that_a_row_lacks(tmp_path: Path) -> None:
    """`to_json` gives the fields of all rows to every row; `to_pylist` does so too, and there we leave nulls out."""
    import datasets

    data = datasets.Dataset.from_list([{"x": {"a": 1}}, {"x": {"b": 2}}])
    data.to_json(str(tmp_path / "rows.jsonl"))
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert first == data.with_format("arrow")[:].to_pylist()[0] == {"x": {"a": 1, "b": None}}


def test_pandas_stores_periods_and_intervals_under_names_of_its_own() -> None:
    """A period is stored as a number of its unit, which is not what it says."""
    import pandas as pd

    frame = pd.DataFrame({"p": pd.period_range("2020", periods=1, freq="D"), "i": pd.interval_range(0, 1)})
    sink = io.BytesIO()
    frame.to_parquet(sink)
    schema = pq.ParquetFile(sink).read().schema
    assert [field.type.extension_name for field in schema] == ["pandas.period", "pandas.interval"]


def test_polars_stores_its_types_as_plain_ones_of_arrow() -> None:
    """Categories are dictionaries, decimals decimals, arrays lists of fixed size: none is an extension type."""
    import polars as pl

    frame = pl.DataFrame(
        {
            "category": pl.Series(["a"], dtype=pl.Categorical),
            "enum": pl.Series(["a"], dtype=pl.Enum(["a", "b"])),
            "decimal": pl.Series(["1.10"]).cast(pl.Decimal(10, 2)),
            "array": pl.Series([[1, 2]], dtype=pl.Array(pl.Int8, 2)),
        }
    )
    sink = io.BytesIO()
    frame.write_parquet(sink)
    schema = pq.ParquetFile(sink).read().schema
    assert not any(isinstance(field.type, pa.BaseExtensionType) for field in schema)
    assert not any(NAME in (field.metadata or {}) for field in schema)
    kinds = [pa.types.is_dictionary, pa.types.is_dictionary, pa.types.is_decimal, pa.types.is_fixed_size_list]
    assert [test(field.type) for test, field in zip(kinds, schema, strict=True)] == [True] * 4
