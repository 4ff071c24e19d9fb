"""Several entries read as one; oracle: the tables they were built from, one after the other."""

from __future__ import annotations

import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry
from raysvc.cache.key import cache_key
from raysvc.cache.rows import Rows
from raysvc.cache.store.open import open_store
from raysvc.errors import EntryError
from raysvc.row_ids import parse

from .helpers import RECIPE, build, make_slices

SIZES = ((5, 3), (4,), (0, 6))


def entry_of(slices: list[pa.Table], name: str) -> Entry:
    store, recipe = open_store(f"memory://{uuid.uuid4().hex}"), {**RECIPE, "name": name}
    build(store, slices, recipe)
    found = find_entry(store, cache_key(recipe))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tables() -> list[list[pa.Table]]:
    return [make_slices(sizes, seed) for seed, sizes in enumerate(SIZES)]


@pytest.fixture(scope="module")
def joined(tables) -> Rows:
    return Rows([entry_of(slices, str(number)) for number, slices in enumerate(tables)])


@pytest.fixture(scope="module")
def rows(tables) -> list[dict]:
    return [row for slices in tables for row in pa.concat_tables(slices).to_pylist()]


def test_rows_and_tokens_are_those_of_all_entries(joined, rows):
    lengths = [len(row["input_ids"]) for row in rows]
    assert (joined.num_rows, joined.num_tokens) == (len(rows), sum(lengths))
    assert joined.lengths().tolist() == lengths
    assert joined.uri.split(", ") == [entry.uri for entry in joined.entries]
    assert joined.table().to_pylist() == [
        {name: row[name] for name in joined.table().column_names} for row in rows
    ]


def test_the_key_follows_from_the_keys_of_the_entries_and_their_order(joined):
    assert joined.key == Rows(joined.entries).key
    assert joined.key != Rows(joined.entries[::-1]).key


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, sum(map(sum, SIZES)) - 1), max_size=20))
def test_any_rows_in_any_order_are_those_of_their_entries(joined, rows, ids):
    chosen = joined.row_ids()[np.array(ids, np.int64)]
    joined.prefetch(chosen)
    batch = joined.read(chosen)
    assert batch.row_ids.tolist() == chosen.tolist()
    for place, row in enumerate(ids):
        begin, end = batch.offsets[place : place + 2]
        for name in ("input_ids", "loss_mask", "logprobs"):
            assert batch.tokens[name][begin:end].tolist() == rows[row][name]
        for name in ("source_row", "reward", "uid"):
            assert batch.rows[name][place] == rows[row][name]


def test_one_row_is_the_row_of_its_entry(joined, rows):
    assert [joined.row(row_id)["source_row"] for row_id in joined.row_ids()] == [
        row["source_row"] for row in rows
    ]


def test_places_count_from_both_ends_over_all_entries(joined):
    ids = joined.row_ids().tolist()
    assert [joined.id_at(place) for place in range(len(ids))] == ids
    assert [joined.id_at(place) for place in range(-len(ids), 0)] == ids
    for beyond in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError, match="no row"):
            joined.id_at(beyond)


@pytest.mark.parametrize("row", [-1, parse("3:0:0"), parse("0:9:0"), parse("1:0:99"), parse("2:0:0")])
def test_a_row_that_is_not_there_is_an_error(joined, row):
    with pytest.raises(IndexError, match="no row"):
        joined.read(np.array([row]))


def test_a_column_that_one_entry_lacks_is_not_there(tables):
    without = [table.drop_columns(["logprobs", "reward"]) for table in tables[1]]
    joined = Rows([entry_of(tables[0], "all"), entry_of(without, "fewer")])
    batch = joined.read(joined.row_ids())
    assert "logprobs" not in batch.tokens
    assert "reward" not in batch.rows
    assert "logprobs" not in joined.table().column_names


def test_a_column_of_two_types_becomes_one_that_holds_both(tables):
    place = tables[1][0].schema.get_field_index("source_row")
    as_float = [
        table.set_column(place, "source_row", table["source_row"].cast(pa.float64())) for table in tables[1]
    ]
    joined = Rows([entry_of(tables[0], "int"), entry_of(as_float, "float")])
    batch = joined.read(joined.row_ids())
    assert batch.rows["source_row"].dtype == np.float64
    assert batch.rows["source_row"].tolist() == [*range(8), *range(4)]


def test_a_column_of_two_shapes_is_refused_with_both(tables):
    def vectors(width: int) -> list[pa.Table]:
        return [
            table.append_column("score", pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(width * len(table))), width))
            for table in tables[1]
        ]  # fmt: skip

    joined = Rows([entry_of(vectors(2), "two"), entry_of(vectors(3), "three")])
    with pytest.raises(EntryError, match=r"column score is \(2,\) and \(3,\) in different entries"):
        joined.read(joined.row_ids()[[0, -1]])
