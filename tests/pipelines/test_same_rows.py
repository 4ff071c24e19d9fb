"""The same rows give the same tokens, whatever kind of file they come in."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from raysvc.chat.slice_tokenizer import SliceResult, SliceTokenizer
from raysvc.chat.source.detect import resolve_format
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig, TextSpec, TokenizerConfig
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.tokenize import tokenize_slice

TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}"""
Json = dict[str, Any]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": words,
        "days": st.integers(-(2**63), 2**63 - 1),
        "rate": st.floats(allow_nan=False, allow_infinity=False),
        "flags": st.lists(st.booleans(), max_size=2),
        "place": st.fixed_dictionaries({}, optional={"name": words, "floor": st.integers(0, 9)}),
    },
)


def _ordered(given: Json, names: tuple[str, ...]) -> Json:
    """A table has one order of fields."""
    return {name: given[name] for name in names if name in given}


def call(given: Json) -> Json:
    given = _ordered(given, ("city", "days", "rate", "flags", "place"))
    if "place" in given:
        given["place"] = _ordered(given["place"], ("name", "floor"))
    function = {"name": "look", "arguments": given}
    return {"type": "function", "function": function}


def row(texts: list[str], given: list[Json], system: str) -> Json:
    messages: list[Json] = [{"role": "user", "content": texts[0]}]
    if given:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(one) for one in given]})
        messages.append({"role": "tool", "content": texts[1]})
    messages.append({"role": "assistant", "content": "x" + texts[2]})
    return {"messages": messages, **({"system": system} if system else {})}


FIRST = row(
    ["a", "b", "c"],
    [{"city": "Oslo", "days": 1, "rate": 0.5, "flags": [True], "place": {"name": "x", "floor": 1}}],
    "s",
)
SAID = "a call says \x93 it's <too>"  # which a user or a tool's result said before
chats = st.lists(
    st.builds(row, st.lists(words, min_size=3, max_size=3), st.lists(arguments, max_size=2), words),
    max_size=4,
).map(lambda rows: [FIRST, *rows])


def lines(rows: list[Json]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in rows).encode()


def delimited(rows: list[Json], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    names = sorted({name for one in rows for name in one})
    writer.writerow(names)
    for one in rows:
        values = [one.get(name, "") for name in names]
        writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in values])
    return text.getvalue().encode()


def parquet(rows: list[Json]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(_aligned(rows)), sink, row_group_size=2)
    return sink.getvalue()


def arrow(rows: list[Json]) -> bytes:
    return arrow_of(pa.Table.from_pylist(_aligned(rows)))


def arrow_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _aligned(rows: list[Json]) -> list[Json]:
    """With a null for every column that a row lacks: Arrow takes the columns of the first row."""
    names = {name: None for one in rows for name in one}
    return [{**names, **one} for one in rows]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


BOM = b"\xef\xbb\xbf"
FILES: dict[str, Callable[[list[Json]], bytes]] = {
    "rows.json": lambda rows: json.dumps(rows).encode(),
    "pretty.json": lambda rows: json.dumps(rows, indent=2).encode(),
    "data.json": lambda rows: json.dumps({"version": "1", "data": rows}).encode(),
    "pretty_data.json": lambda rows: json.dumps({"data": rows}, indent=2).encode(),
    "lines.json": lines,
    "bom.jsonl": lambda rows: BOM + lines(rows),
    "bom.json": lambda rows: BOM + json.dumps(rows).encode(),
    "bom.csv": lambda rows: BOM + delimited(rows, ","),
    "rows.csv": lambda rows: delimited(rows, ","),
    "rows.tsv": lambda rows: delimited(rows, "\t"),
    "rows.csv.gz": lambda rows: gzip.compress(delimited(rows, ",")),
    "rows.parquet": parquet,
    "rows.arrow": arrow,
    "rows.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "rows.jsonl.zst": lambda rows: zstd(lines(rows)),
}


@pytest.fixture(scope="module")
def tokenizer(sample: dict[str, str]) -> Callable[[], SliceTokenizer]:
    config = TokenizerConfig(name=sample["tokenizer"], chat_template=TEMPLATE)
    made = SliceTokenizer(TextSpec(tokenizer=config, format="chat"))
    return lambda: made


def tokens_of(made: SliceTokenizer, source: SourceConfig) -> list[SliceResult]:
    return [tokenize_slice(made, piece, {}) for piece in look_at(source).slices]


def content(results: list[SliceResult]) -> list[Json]:
    return [one for result in results for one in result.table.to_pylist()]


@settings(
    max_examples=15,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(rows=[FIRST, row([SAID, SAID, "c"], [{"city": SAID, "place": {"name": SAID}}], "")])
@given(rows=chats)
def test_the_same_rows_give_the_same_tokens_in_every_kind_of_file(
    rows: list[Json], tokenizer: Callable[[], SliceTokenizer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, made = tmp_path_factory.mktemp("rows"), tokenizer()
    truth = [made.tokenizer.reference_ids(_with_system(one), None) for one in rows]
    (folder / "rows.jsonl").write_bytes(lines(rows))
    wanted = content(tokens_of(made, SourceConfig(path=(str(folder / "rows.jsonl"),))))
    assert [one["input_ids"] for one in wanted] == truth
    for name, write in FILES.items():
        (folder / name).write_bytes(write(rows))
        assert content(tokens_of(made, SourceConfig(path=(str(folder / name),)))) == wanted, name


def _with_system(one: Json) -> list[Json]:
    system = one.get("system")
    return [{"role": "system", "content": system}, *one["messages"]] if system else one["messages"]


@pytest.mark.parametrize("name", FILES)
def test_columns_that_only_later_rows_have_are_used_in_every_kind_of_file(
    name: str, tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    rows = [{"instruction": "a", "response": "b"}, {"instruction": "c", "context": "you", "response": "d"}]
    (tmp_path / name).write_bytes(FILES[name](rows))
    source = SourceConfig(path=(str(tmp_path / name),))
    first = look_at(source).first_row()
    assert first is not None
    spec = TextSpec(tokenizer=tokenizer().spec.tokenizer)
    form = resolve_format(spec, first)
    spec = spec.model_copy(update={"format": form.name, "columns": dict(form.columns)})
    (result,) = tokens_of(SliceTokenizer(spec), source)
    texts = [tokenizer().tokenizer.hf.decode(ids) for ids in result.table["input_ids"].to_pylist()]
    assert ["you" in text for text in texts] == [False, True]


def test_a_saved_dataset_gives_them_too(tokenizer: Callable[[], SliceTokenizer], tmp_path: Path) -> None:
    import datasets

    second = row(["q", "r", "s"], [{"days": 3}], "")
    rows = [FIRST, second]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    wanted = content(tokens_of(tokenizer(), SourceConfig(path=(str(tmp_path / "rows.jsonl"),))))
    split = datasets.Dataset.from_list(_aligned(rows))
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "saved"))
    for name, expected in {
        "train": [0, 1],
        "train+test": [0, 1, 0, 1],
        "train[:1]+test[1:]": [0, 1],
        "test[50%:]+train": [1, 0, 1],
    }.items():
        found = content(tokens_of(tokenizer(), SourceConfig(dataset=str(tmp_path / "saved"), split=name)))
        assert [one["input_ids"] for one in found] == [wanted[n]["input_ids"] for n in expected], name
    with pytest.raises(SourceError, match="is not in the folder"):
        look_at(SourceConfig(dataset=str(tmp_path / "saved"), split="train+dev"))
    with pytest.raises(SourceError, match=r"^source\.split: is needed: the folder has train, test; name one"):
        look_at(SourceConfig(dataset=str(tmp_path / "saved")))


def pairs(folder: Path, name: str, data: bytes, tokenizer: SliceTokenizer) -> list[str]:
    """The text of every row of a file of questions and answers."""
    (folder / name).write_bytes(data)
    spec = TextSpec(tokenizer=tokenizer.spec.tokenizer)
    made = SliceTokenizer(spec)
    results = tokens_of(made, SourceConfig(path=(str(folder / name),)))
    assert all(not result.row_counts.quarantined for result in results)
    return [made.tokenizer.hf.decode(one["input_ids"]) for one in content(results)]


ANSWERS = ["007", "1e3", "2024-01-05", "true", "1.10", "", "NaN", "null", '"x"', "a,b\nc"]


@pytest.mark.parametrize(("name", "delimiter"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_fields_of_a_csv_file_are_text_as_they_stand(
    name: str, delimiter: str, tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    rows = [{"answer": "x" + answer, "question": answer} for answer in ANSWERS]
    found = pairs(tmp_path, name, delimited(rows, delimiter), tokenizer())
    assert found == [
        f"<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\nx{answer}<|im_end|>\n"
        for answer in ANSWERS
    ]


def test_dates_and_decimals_of_a_table_are_their_text(
    tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    values = [datetime.date(2024, 1, 5), datetime.datetime(2024, 1, 5, 15, 0, 1), Decimal("1.10")]
    for value, text in zip(values, ["2024-01-05", "2024-01-05T15:00:01", "1.10"], strict=True):
        (found,) = pairs(
            tmp_path, "rows.parquet", parquet([{"question": "when?", "answer": value}]), tokenizer()
        )
        assert f"assistant\n{text}<|im_end|>" in found


@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_every_kind_of_list_holds_the_same_messages(
    list_of: Callable[[pa.DataType], pa.DataType], tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    given = pa.struct([("city", pa.string()), ("day", pa.date32()), ("days", pa.int64())])
    function = pa.struct([("name", pa.string()), ("arguments", given)])
    calls = list_of(pa.struct([("type", pa.string()), ("function", function)]))
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", calls)])
    said = row(["when?", "", "x"], [], "")["messages"]
    look = {
        "type": "function",
        "function": {"name": "look", "arguments": {"day": datetime.date(2024, 1, 5), "days": 2}},
    }
    rows = pa.array([[said[0], {"role": "assistant", "content": "", "tool_calls": [look]}]], list_of(message))
    table, sink = pa.table({"messages": rows}), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "rows.arrow").write_bytes(sink.getvalue())
    (found,) = content(tokens_of(tokenizer(), SourceConfig(path=(str(tmp_path / "rows.arrow"),))))
    text = tokenizer().tokenizer.hf.decode(found["input_ids"])
    assert text.endswith('look {"day": "2024-01-05", "days": 2}<|im_end|>\n')


def test_a_column_that_is_there_twice_is_refused_as_in_csv(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.arrow").write_bytes(arrow_of(table))
    for name in ("rows.parquet", "rows.arrow"):
        (piece,) = look_at(SourceConfig(path=(str(tmp_path / name),))).slices
        with pytest.raises(SourceError, match="has the column 'text' twice"):
            list(read_rows(piece, {}))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_what_python_has_no_value_for_sets_aside_only_rows_that_use_it(
    name: str, tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    far = pa.array([0, 300_000_000_000], pa.timestamp("s"))  # in the year 11476
    odd = pa.array([0, 0], pa.timestamp("us", "Mars/Base"))
    texts = {"question": ["a", "b"], "answer": ["c", "d"]}
    for columns, quarantined in (({"at": far, "zone": odd}, 0), ({"system": far}, 1)):
        table = pa.table({**texts, **columns})
        if name == "rows.arrow":
            (tmp_path / name).write_bytes(arrow_of(table))
        else:
            pq.write_table(table, tmp_path / name)
        made = SliceTokenizer(TextSpec(tokenizer=tokenizer().spec.tokenizer))
        source = SourceConfig(path=(str(tmp_path / name),))
        assert look_at(source).first_row() is not None
        (result,) = tokens_of(made, source)
        assert sum(result.row_counts.quarantined.values()) == quarantined
        assert result.row_counts.rows_written == 2 - quarantined


def test_what_json_does_not_have_sets_aside_only_rows_that_use_it(
    tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    call = {"function": {"name": "f", "arguments": {"x": float("nan")}}}
    used = {"messages": [*FIRST["messages"][:1], {"role": "assistant", "tool_calls": [call]}]}
    beside = {**FIRST, "score": float("inf")}
    binary = pa.table({"messages": [FIRST["messages"]], "image_bytes": [b"\x00"]})
    (tmp_path / "a.jsonl").write_bytes(lines([used, beside]))
    (tmp_path / "b.json").write_text(json.dumps([used, beside]))
    pq.write_table(binary, tmp_path / "c.parquet")
    for name, written in {"a.jsonl": [1], "b.json": [1], "c.parquet": [0]}.items():
        (result,) = tokens_of(tokenizer(), SourceConfig(path=(str(tmp_path / name),)))
        assert result.table["source_row"].to_pylist() == written, name
        reasons = ["a number is NaN or infinite, which JSON does not have"] if written == [1] else []
        assert list(result.row_counts.quarantined) == reasons


@pytest.mark.parametrize("huge", ["1e400", "-1e400", "9" * 400 + ".0"])
@pytest.mark.parametrize("beside", ["1", "12345678901234567890"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_that_is_too_large_sets_aside_its_row_as_infinity_does(
    huge: str, beside: str, name: str, tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    call = {"function": {"name": "f", "arguments": {"x": "HUGE", "n": "BESIDE"}}}
    used = {"messages": [*FIRST["messages"][:1], {"role": "assistant", "tool_calls": [call]}]}
    rows = [used, {**FIRST, "score": "HUGE", "n": "BESIDE"}]
    text = lines(rows) if name == "a.jsonl" else json.dumps(rows).encode()
    text = text.replace(b'"HUGE"', huge.encode()).replace(b'"BESIDE"', beside.encode())
    (tmp_path / name).write_bytes(text)
    (result,) = tokens_of(tokenizer(), SourceConfig(path=(str(tmp_path / name),)))
    assert result.table["source_row"].to_pylist() == [1]
    assert list(result.row_counts.quarantined) == ["a number is NaN or infinite, which JSON does not have"]


def test_a_large_csv_file_with_line_ends_in_its_fields_is_read_whole(
    tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    long = "line\n" * 4000
    rows = [{"question": f"{n}\n{long}", "answer": "yes\n\nno"} for n in range(300)]
    (tmp_path / "rows.csv").write_bytes(delimited(rows, ","))
    assert (tmp_path / "rows.csv").stat().st_size > 5 << 20
    slices = look_at(SourceConfig(path=(str(tmp_path / "rows.csv"),)), 1 << 20).slices
    assert len(slices) > 1
    found = [one for piece in slices for one in read_rows(piece, {})]
    assert [one.data for one in found] == rows
    assert [one.source_row for one in found] == list(range(300))


def test_a_row_with_other_fields_than_the_header_is_named_and_keeps_its_number(
    tokenizer: Callable[[], SliceTokenizer], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\na,b\n\nc\nd,e,f\ng,h\n")
    made = SliceTokenizer(TextSpec(tokenizer=tokenizer().spec.tokenizer))
    (result,) = tokens_of(made, SourceConfig(path=(str(tmp_path / "rows.csv"),)))
    assert result.table["source_row"].to_pylist() == [0, 3]
    assert result.row_counts.quarantined == {"fields and header differ": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("open.csv", 'question,answer\na,b\nc,"d\ne,f\ng,h\n'),
        ("backslash.csv", 'question,answer\na,b\nc,"say \\"d\\" again"\ne,f\n'),
        ("unquoted.tsv", 'question\tanswer\na\tb\nc\t"d" he said\ne\tf\n'),
    ],
)
def test_a_quote_that_no_writer_leaves_is_an_error_and_never_other_rows(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    kind = name.partition(".")[2]
    with pytest.raises(
        SourceError, match=rf"{name}.*cannot be read as {kind}.*begins at line 3.*written twice"
    ):
        _ = look_at(SourceConfig(path=(str(tmp_path / name),))).slices


def test_lines_of_a_text_file_are_texts(tokenizer: Callable[[], SliceTokenizer], tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(BOM + b"one\r\n\n{two}\n")
    made = SliceTokenizer(TextSpec(tokenizer=tokenizer().spec.tokenizer))
    source = look_at(SourceConfig(path=(str(tmp_path / "rows.txt"),)))
    assert source.first_row() == {"text": ""}
    (result,) = [tokenize_slice(made, piece, {}) for piece in source.slices]
    hf = made.tokenizer.hf
    assert result.table["source_row"].to_pylist() == [0, 2]
    assert [hf.decode(ids).removesuffix(hf.eos_token) for ids in result.table["input_ids"].to_pylist()] == [
        "one",
        "{two}",
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b'{"messages": []}\n{"messages": []}', "lines"),
        (b'{"data": ["a", "b"]}\n', "lines"),
        (b'{"data": [{"a": 1}]}\n{"data": [{"a": 2}]}\n', "lines"),
        (b'{"data": [{"a": 1}]}\n', "json"),
        (b'{\n  "data": [\n    {"a": 1}\n  ]\n}', "json"),
        (b'{"messages": [{"role": "user", "data": [{"a": 1}]}]}', "lines"),
        (b' [{"a": 1}]', "json"),
        (b"{broken\n{}", "lines"),
    ],
)
def test_a_json_file_is_one_value_or_lines(text: bytes, kind: str) -> None:
    from raysvc.pipelines.reading.json_file import kind_of_json

    assert kind_of_json(text) == kind
