"""Extension types of Arrow: columns of `arrow.json` and others give the tokens of the same rows in JSON lines."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.detect import resolve_format
from raysvc.chat.source.json_rows import UnreadableValue
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig, TextSpec, TokenizerConfig
from raysvc.pipelines.reading.arrow_rows import rows_of_table
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.tokenize import tokenize_slice
from tests.pipelines.test_same_rows import TEMPLATE, arguments, arrow_of, call, lines, words

Json = dict[str, Any]
NAMED = {b"ARROW:extension:name": b"arrow.json"}


def of_json(name: str) -> pa.Field:
    """As other writers than pyarrow make one: text, and the name of the type beside it."""
    return pa.field(name, pa.string(), metadata=NAMED)


PLACE = pa.struct([("name", pa.string()), ("floor", pa.int64())])
GIVEN = pa.struct(
    [
        ("city", pa.string()),
        ("days", pa.int64()),
        ("rate", pa.float64()),
        ("flags", pa.list_(pa.bool_())),
        ("place", PLACE),
    ]
)


def schema_of(places: frozenset[str]) -> pa.Schema:
    """The schema of chats, with JSON text at these places."""

    def at(name: str, kind: Callable[[], pa.DataType], place: str | None = None) -> pa.Field:
        return of_json(name) if (place or name) in places else pa.field(name, kind())

    def function() -> pa.DataType:
        return pa.struct([("name", pa.string()), at("arguments", lambda: GIVEN)])

    def a_call() -> pa.DataType:
        return pa.struct([("type", pa.string()), at("function", function)])

    def a_message() -> pa.DataType:
        calls = at("tool_calls", lambda: pa.list_(at("item", a_call, "call")))
        return pa.struct([("role", pa.string()), at("content", pa.string), calls])

    def a_tool() -> pa.DataType:
        about = pa.struct([("name", pa.string()), ("description", pa.string())])
        return pa.struct([("type", pa.string()), ("function", about)])

    return pa.schema(
        [
            at("messages", lambda: pa.list_(at("item", a_message, "message"))),
            at("tools", lambda: pa.list_(at("item", a_tool, "tool"))),
            at("system", pa.string),
        ]
    )


def stored(value: Any, field: pa.Field) -> Any:
    """What Arrow stores for a value of JSON."""
    if value is None:
        return None
    if field.metadata == NAMED:
        return json.dumps(value)
    if pa.types.is_struct(field.type):
        return {one.name: stored(value.get(one.name), one) for one in field.type}
    if pa.types.is_list(field.type):
        return [stored(one, field.type.value_field) for one in value]
    return value


def table_of(rows: list[Json], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(
        [{f.name: stored(row.get(f.name), f) for f in schema} for row in rows], schema
    )


PLACES = (
    "messages", "message", "content", "tool_calls", "call", "function", "arguments", "tools", "tool", "system"
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "description": 'say "it" / 1'}}


def chat(texts: list[str], given: list[Json], tools: bool, parts: bool, places: frozenset[str]) -> Json:
    mixed = parts and not {"content", "message", "messages"}.isdisjoint(places)
    messages: list[Json] = [{"role": "user", "content": texts[0]}]
    if given:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(one) for one in given]})
        messages.append({"role": "tool", "content": texts[1]})
    said: Any = "x" + texts[2]
    messages.append({"role": "assistant", "content": [{"type": "text", "text": said}] if mixed else said})
    return {
        "messages": messages,
        **({"tools": [TOOL]} if tools else {}),
        **({"system": texts[1]} if parts else {}),
    }


@st.composite
def chats(draw: st.DrawFn) -> tuple[list[Json], frozenset[str]]:
    places = draw(st.frozensets(st.sampled_from(PLACES), min_size=1, max_size=4))
    texts = st.lists(words | st.sampled_from(['"', "12", "null", '{"a": 1}', "[1]"]), min_size=3, max_size=3)
    one = st.builds(
        chat, texts, st.lists(arguments, max_size=2), st.booleans(), st.booleans(), st.just(places)
    )
    return draw(st.lists(one, min_size=1, max_size=4)), places


@pytest.fixture(scope="module")
def tokenizer(sample: dict[str, str]) -> Callable[[], SliceTokenizer]:
    config = TokenizerConfig(name=sample["tokenizer"], chat_template=TEMPLATE)
    made = SliceTokenizer(TextSpec(tokenizer=config, format="chat"))
    return lambda: made


def tokens(made: SliceTokenizer, source: SourceConfig) -> list[Json]:
    results = [tokenize_slice(made, piece, {}) for piece in look_at(source).slices]
    for result in results:
        assert not result.row_counts.quarantined, result.examples
    return [one for result in results for one in result.table.to_pylist()]


def auto(made: SliceTokenizer, source: SourceConfig) -> list[Json]:
    """The same with the format that is found from the first row."""
    first = look_at(source).first_row()
    assert first is not None
    spec = TextSpec(tokenizer=made.spec.tokenizer)
    form = resolve_format(spec, first)
    return tokens(
        SliceTokenizer(spec.model_copy(update={"format": form.name, "columns": dict(form.columns)})), source
    )


def at(path: Path) -> SourceConfig:
    return SourceConfig(path=(str(path),))


EVERYWHERE = frozenset({"content", "arguments", "tool", "system"})


@settings(
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(case=([chat(["a", "12", "c"], [{"city": '"', "rate": 0.1}], True, True, EVERYWHERE)], EVERYWHERE))
@given(case=chats())
def test_json_columns_give_the_tokens_of_json_lines(
    case: tuple[list[Json], frozenset[str]],
    tokenizer: Callable[[], SliceTokenizer],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows, places = case
    folder, made = tmp_path_factory.mktemp("rows"), tokenizer()
    (folder / "rows.jsonl").write_bytes(lines(rows))
    wanted = tokens(made, at(folder / "rows.jsonl"))
    (folder / "rows.arrow").write_bytes(arrow_of(table_of(rows, schema_of(places))))
    typed = pa.ipc.open_stream((folder / "rows.arrow").read_bytes()).read_all()
    pq.write_table(typed, folder / "rows.parquet", row_group_size=2)
    for name in ("rows.arrow", "rows.parquet"):
        assert tokens(made, at(folder / name)) == wanted, (name, places)


MIXED: dict[str, list[Json]] = {
    "contents": [
        {"messages": [{"role": "user", "content": "say \"a\""}, {"role": "assistant", "content": "b"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
            ]
        },
    ],
    "text": [{"text": "hello \"you\""}, {"text": "12 /é\n"}],
    "alpaca": [
        {"instruction": "add", "input": "1 + 1", "output": "it is two", "n": 1},
        {"instruction": "say", "input": "", "output": "say \"hi\"", "n": "x"},
    ],
    "prompts": [
        {"prompt": "q", "completion": "a"},
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    ],
    "calls": [
        {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "", "tool_calls": [call({"city": "Oslo", "place": {"floor": 1}})]},
                {"role": "tool", "content": "x"},
                {"role": "assistant", "content": "done"},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"enum": [1, "a", None]}}}],
        },
        {"messages": [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}], "tools": []},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_what_datasets_makes_of_mixed_columns_gives_the_tokens_of_the_rows(
    name: str, tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    import datasets

    rows, made = MIXED[name], tokenizer()
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    wanted = auto(made, at(tmp_path / "rows.jsonl"))
    assert len(wanted) == len(rows)
    data = datasets.Dataset.from_list(rows, features=_features(name))
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    for source in (SourceConfig(dataset=str(tmp_path / "saved")), at(tmp_path / "rows.parquet")):
        assert auto(made, source) == wanted


def _features(name: str) -> Any:
    from datasets import Features, Json, List, Value

    text, message = Value("string"), {"role": Value("string"), "content": Json()}
    return Features(
        {
            "contents": {"messages": List(message)},
            "text": {"text": Json()},
            "alpaca": {"instruction": Json(), "input": text, "output": Json(), "n": Json()},
            "prompts": {"prompt": Json(), "completion": Json()},
            "calls": {"messages": List(Json()), "tools": List(Json())},
        }[name]
    )


def test_what_load_dataset_reads_as_json_gives_the_tokens_of_the_file(
    tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    import datasets

    made, rows = tokenizer(), [*MIXED["contents"], MIXED["calls"][0]]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    wanted = tokens(made, at(tmp_path / "rows.jsonl"))
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert "Json" in str(loaded.features)
    loaded.save_to_disk(str(tmp_path / "saved"))
    loaded.to_parquet(str(tmp_path / "rows.parquet"))
    for source in (SourceConfig(dataset=str(tmp_path / "saved")), at(tmp_path / "rows.parquet")):
        assert tokens(made, source) == wanted


def values(column: pa.Array | pa.Table) -> list[Any]:
    """Values of the one column of a table, as rows have them."""
    table = column if isinstance(column, pa.Table) else pa.table({"x": column})
    return [row.data.get("x") for row in rows_of_table(table, 0) if row.data is not None]


def test_known_extension_types_become_what_they_mean_also_inside_lists() -> None:
    ids = [uuid.UUID(int=7), None]
    of_bytes = pa.array([None if one is None else one.bytes for one in ids], pa.uuid())
    truth = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0, 5], pa.int8()))
    numbers = np.arange(12).reshape(2, 2, 3)
    flat = pa.array(numbers.reshape(2, 6).tolist(), pa.list_(pa.int64(), 6))
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), (2, 3), permutation=[1, 0]), flat
    )
    assert values(of_bytes) == [str(ids[0]), None]
    assert values(truth) == [True, None, False, True]
    assert values(tensor) == tensor.to_numpy_ndarray().tolist()  # pyarrow's own order of axes
    assert np.array(values(tensor)).shape == (2, 3, 2)
    offsets = pa.array([0, 2], pa.int32())
    assert values(pa.ListArray.from_arrays(offsets, of_bytes)) == [[str(ids[0]), None]]
    nested = pa.StructArray.from_arrays([truth, of_bytes.take(pa.array([0, 0, 1, 1]))], ["a", "b"])
    assert values(nested)[1:3] == [{"b": str(ids[0])}, {"a": False}]


class Secret(pa.ExtensionType):
    """Text whose letters are not what it says."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "test.rot13")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Secret:
        return cls()


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_an_unknown_extension_type_is_named_by_the_rows_that_use_it_and_by_no_others(
    name: str, registered: bool, tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    secret = pa.ExtensionArray.from_storage(Secret(), pa.array(["uryyb", "jbeyq"]))
    texts = pa.array(["a", "b"])
    used = pa.table({"question": secret, "answer": texts})
    beside = pa.table({"question": texts, "answer": texts, "other": secret})
    made = SliceTokenizer(TextSpec(tokenizer=tokenizer().spec.tokenizer))
    if registered:
        pa.register_extension_type(Secret())
    try:
        for table, written in ((used, 0), (beside, 2)):
            if name == "rows.arrow":
                (tmp_path / name).write_bytes(arrow_of(table))
            else:
                pq.write_table(table, tmp_path / name)
            (piece,) = look_at(at(tmp_path / name)).slices
            result = tokenize_slice(made, piece, {})
            assert result.row_counts.rows_written == written
            said = [str(one) for one in result.examples]
            assert all("a value cannot be read" in one and "'test.rot13'" in one for one in said)
            assert len(said) == 2 - written
    finally:
        if registered:
            pa.unregister_extension_type("test.rot13")


def test_broken_json_in_a_column_of_json_sets_aside_its_row(
    tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    good, broken = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]', '[{"role"'
    table = pa.Table.from_pylist([{"messages": good}, {"messages": broken}], pa.schema([of_json("messages")]))
    (tmp_path / "rows.arrow").write_bytes(arrow_of(table))
    (piece,) = look_at(at(tmp_path / "rows.arrow")).slices
    result = tokenize_slice(tokenizer(), piece, {})
    assert (result.row_counts.rows_written, dict(result.row_counts.quarantined)) == (
        1,
        {"a value cannot be read": 1},
    )
    assert "JSON is broken" in str(result.examples[0])


def test_nulls_inside_json_text_stay_and_nulls_of_a_struct_do_not() -> None:
    schema = pa.schema([pa.field("x", pa.struct([of_json("json"), pa.field("text", pa.string())]))])
    table = pa.Table.from_pylist(
        [{"x": {"json": '{"a": null}', "text": None}}, {"x": {"json": "null"}}], schema
    )
    assert values(table) == [{"json": {"a": None}}, {}]


def test_encodings_of_arrow_hold_the_values_that_they_encode() -> None:
    words = ["b", "a", "b"]
    assert values(pa.array(words).dictionary_encode()) == words
    assert values(pa.RunEndEncodedArray.from_arrays([2, 3], ["b", "a"])) == ["b", "b", "a"]
    assert values(pa.table({"x": pa.RunEndEncodedArray.from_arrays([2, 3], ["b", "a"])}).slice(1)) == [
        "b",
        "a",
    ]
    for kind in (pa.string_view(), pa.large_string()):
        assert values(pa.array(words, kind)) == words
    day = datetime.date(2024, 1, 5)
    dates = pa.array([day, day])
    assert values(dates.dictionary_encode()) == ["2024-01-05"] * 2
    assert values(pa.RunEndEncodedArray.from_arrays([2], dates[:1])) == ["2024-01-05"] * 2
    for make in (pa.decimal32, pa.decimal64, pa.decimal128, pa.decimal256):
        assert values(pa.array([Decimal("1.10")], make(5, 2))) == ["1.10"]
    inside = pa.struct([("d", pa.decimal64(5, 2)), ("v", pa.string_view()), ("n", pa.large_string())])
    lists = pa.array([[{"d": Decimal("2.50"), "v": "x", "n": None}]], pa.large_list_view(inside))
    assert values(lists) == [[{"d": "2.50", "v": "x"}]]
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([{"a": "1", "b": None}]))
    assert values(coded) == [{"a": "1"}] * 2


def test_what_pandas_stores_as_numbers_is_named_and_not_taken_for_them(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"text": ["a"], "x": pd.period_range("2020", periods=1, freq="D")})
    frame.to_parquet(tmp_path / "rows.parquet")
    (piece,) = look_at(at(tmp_path / "rows.parquet")).slices
    (row,) = read_rows(piece, {})
    assert row.data is not None
    assert isinstance(row.data["x"], UnreadableValue)
    assert "'pandas.period'" in row.data["x"].why


def test_polars_writes_values_that_are_read_as_they_are(tmp_path: Path) -> None:
    import polars as pl

    frame = pl.DataFrame(
        {
            "category": pl.Series(["a"], dtype=pl.Categorical),
            "enum": pl.Series(["b"], dtype=pl.Enum(["a", "b"])),
            "decimal": pl.Series(["1.10"]).cast(pl.Decimal(10, 2)),
            "array": pl.Series([[[1, 2]]], dtype=pl.Array(pl.Array(pl.Int8, 2), 1)),
        }
    )
    wanted = {"category": "a", "enum": "b", "decimal": "1.10", "array": [[1, 2]]}
    frame.write_parquet(tmp_path / "rows.parquet")
    frame.write_ipc_stream(tmp_path / "rows.arrow")
    for name in ("rows.arrow", "rows.parquet"):
        (piece,) = look_at(at(tmp_path / name)).slices
        assert [row.data for row in read_rows(piece, {})] == [wanted]
    frame.write_ipc(tmp_path / "file.arrow")  # a file, with its dictionaries behind the batches
    with pytest.raises(SourceError, match=r"dictionaries behind its batches.*write_parquet"):
        _ = look_at(at(tmp_path / "file.arrow")).slices


class Runs:
    """What writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("inside", [False, True])
def test_pickled_objects_of_ray_data_are_refused_unread(tmp_path: Path, inside: bool) -> None:
    from ray.data.block import BlockAccessor

    block = BlockAccessor.batch_to_block({"thing": np.array([Runs(str(tmp_path / "ran"))], object)})
    if inside:
        column = block.column("thing").combine_chunks()
        block = pa.table({"outer": pa.StructArray.from_arrays([column], ["thing"])})
    pq.write_table(block, tmp_path / "rows.parquet")
    with pytest.raises(SourceError, match="holds Python objects"):
        list(rows_of_table(pq.read_table(tmp_path / "rows.parquet"), 0))
    assert not (tmp_path / "ran").exists()
