"""Parts: tables in, files and flat views out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.parts import PartView, decode_offsets, decode_part, encode_part
from raysvc.errors import EntryError

from .helpers import make_table

NAME = "part-00000-0123456789abcdef.arrow"
sizes = st.integers(0, 12)
quick = settings(max_examples=50)


def assert_contract(table: pa.Table, view: PartView) -> None:
    """Every line of the module's contract that can be seen on a view."""
    rows = table.to_pylist()
    assert view.table.num_rows == len(rows) == len(view.offsets) - 1
    assert view.offsets.dtype == np.int32
    for name, values in view.tokens.items():
        spans = zip(view.offsets, view.offsets[1:], strict=False)
        assert [values[a:b].tolist() for a, b in spans] == [row[name] for row in rows]
        assert not values.flags.owndata
    for name, values in view.rows.items():
        assert values.tolist() == [row[name] for row in rows]
    for name, texts in view.texts.items():
        assert texts.to_pylist() == [row[name] for row in rows]
    assert set(view.tokens) | set(view.rows) | set(view.texts) == set(table.column_names)


@quick
@given(sizes, st.integers(0, 99))
def test_a_part_holds_what_the_table_held(num_rows, seed):
    table = make_table(num_rows, seed)
    part = encode_part(NAME, table)
    view = decode_part(pa.py_buffer(part.data), part.info, "here")
    assert_contract(table, view)
    assert part.info.num_rows == num_rows
    assert part.info.num_tokens == len(view.tokens["input_ids"])
    assert part.info.num_bytes == len(part.data)
    assert part.info.checksum == checksum_of(part.data)


@quick
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 5), st.randoms())
def test_equal_rows_give_equal_bytes(chunks, cut, rng):
    pieces = [make_table(size, first_row=index) for index, size in enumerate(chunks)]
    whole = pa.concat_tables(pieces)
    columns = whole.column_names
    rng.shuffle(columns)
    padded = pa.concat_tables([make_table(cut, 7), *pieces]).slice(cut)
    annotated = whole.combine_chunks().replace_schema_metadata({"pandas": "{}"})
    large = pa.table(
        [pa.array(whole[name].to_pylist(), _large(whole[name].type)) for name in whole.column_names],
        names=whole.column_names,
    )
    expected = bytes(encode_part(NAME, whole).data)
    for other in (padded, annotated, whole.select(columns), large):
        assert bytes(encode_part(NAME, other).data) == expected


def _large(kind: pa.DataType) -> pa.DataType:
    return (
        pa.large_list(kind.value_type)
        if pa.types.is_list(kind)
        else pa.large_string()
        if kind == pa.string()
        else kind
    )


@quick
@given(st.integers(1, 12), st.integers(0, 99))
def test_lengths_can_be_read_alone(num_rows, seed):
    table = make_table(num_rows, seed)
    part = encode_part(NAME, table)
    start = part.info.offsets_start
    offsets = decode_offsets(bytes(part.data[start : start + 4 * (num_rows + 1)]), part.info, "here")
    assert np.diff(offsets).tolist() == [len(row) for row in table["input_ids"].to_pylist()]


def test_damaged_lengths_are_refused():
    part = encode_part(NAME, make_table(3))
    with pytest.raises(EntryError, match=r"here/part.*lengths are damaged"):
        decode_offsets(bytes(16), part.info, "here")


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"loss_mask": pa.array([[1]], pa.list_(pa.uint8()))}, "column input_ids: it is missing"),
        ({"input_ids": pa.array([[1]], pa.list_(pa.int64()))}, "column input_ids.*must be list<int32>"),
        ({"other": pa.array([[1.0, 2.0]])}, "column other.*not as long as input_ids"),
        ({"input_ids": pa.array([[None]], pa.list_(pa.int32()))}, "column input_ids.*holds 1 nulls"),
        ({"loss_mask": pa.array([None], pa.list_(pa.uint8()))}, "column loss_mask.*holds 1 nulls"),
        ({"reward": pa.array([None], pa.float32())}, "column reward.*holds 1 nulls"),
        ({"when": pa.array([0], pa.timestamp("s"))}, "column when.*cannot be cached"),
        ({"blob": pa.array([b"x"])}, "column blob.*cannot be cached"),
        ({"nested": pa.array([[[1]]])}, "column nested.*cannot be cached"),
        ({"words": pa.array([["x"]])}, "column words.*cannot be cached"),
    ],
)
def test_a_column_that_a_part_cannot_hold_is_named(columns, what):
    good = {
        "input_ids": pa.array([[1]], pa.list_(pa.int32())),
        "loss_mask": pa.array([[1]], pa.list_(pa.uint8())),
    }
    table = pa.table(columns if "missing" in what else good | columns)
    with pytest.raises(EntryError, match=what):
        encode_part(NAME, table)


@pytest.mark.parametrize("value", [-1, 1 << 30])
def test_token_offsets_that_go_back_are_refused(value):
    part = encode_part(NAME, make_table(6))
    damaged = bytearray(part.data)
    place = part.info.offsets_start + 8
    damaged[place : place + 4] = value.to_bytes(4, "little", signed=True)
    with pytest.raises(EntryError, match="it is damaged"):
        decode_part(pa.py_buffer(damaged), part.info, "here", checked=True)


def test_text_offsets_that_lead_out_of_the_file_are_refused():
    part = encode_part(NAME, make_table(6))
    buffer = pa.py_buffer(bytearray(part.data))
    with pa.ipc.open_stream(buffer) as reader:
        offsets = reader.read_all()["uid"].chunk(0).buffers()[1]
    place = offsets.address - buffer.address
    memoryview(buffer).cast("B")[place + 8 : place + 12] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(EntryError, match="it is damaged"):
        decode_part(buffer, part.info, "here", checked=True)


def test_text_may_be_missing():
    table = make_table(2).drop(["uid"]).append_column("uid", pa.array(["a", None]))
    part = encode_part(NAME, table)
    view = decode_part(pa.py_buffer(part.data), part.info, "here", checked=True)
    assert view.texts["uid"].to_pylist() == ["a", None]


@given(st.data())
@settings(max_examples=150)
def test_a_file_that_is_not_the_part_is_refused_and_never_crashes(data):
    part = encode_part(NAME, make_table(6, 1))
    damaged = bytearray(part.data)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))]
    try:
        view = decode_part(pa.py_buffer(bytes(damaged)), part.info, "here", checked=True)
    except EntryError:
        return
    assert view.offsets[-1] == part.info.num_tokens
