"""Ids of rows as they are written and typed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.job.row_id_file import read_row_ids
from raysvc.row_ids import MOST_SLICES, MOST_SOURCES, parse, split, written

PLACES = st.tuples(
    st.integers(0, MOST_SOURCES - 1), st.integers(0, MOST_SLICES - 1), st.integers(0, 2**32 - 1)
)


@given(PLACES)
def test_what_is_written_is_the_place_of_the_row_and_is_read_back(place: tuple[int, int, int]) -> None:
    row_id = (place[0] << 52) + (place[1] << 32) + place[2]
    assert written(row_id) == ":".join(map(str, place))
    assert parse(written(row_id)) == parse(str(row_id)) == row_id
    assert tuple(int(one[0]) for one in split(np.array([row_id]))) == place


def test_a_place_without_a_source_is_of_the_first_one() -> None:
    assert parse("17:451") == parse("0:17:451") == parse(" 0 : 17 : 451 ") == (17 << 32) + 451


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1:2:3:4",
        "-1",
        "1:-2:3",
        "a",
        "1.5",
        "2048:0:0",
        "0:1048576:0",
        "0:0:4294967296",
        str(1 << 63),
        "²",
    ],
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a row id|too large for the id of a row"):
        parse(text)


def test_a_file_holds_ids_in_any_form(tmp_path: Path) -> None:
    lines = tmp_path / "bad.txt"
    lines.write_text('2:17:451  # bad\n5\n{"row_id": "0:1:2"}\n{"row_id": 6}\n')
    wanted = (5, 6, (1 << 32) + 2, (2 << 52) + (17 << 32) + 451)
    assert read_row_ids(str(lines)) == wanted
    lines.write_text('["2:17:451", 5, "0:1:2", 6]')
    assert read_row_ids(str(lines)) == wanted
    lines.write_text("5\n2:x:1\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is not a row id"):
        read_row_ids(str(lines))
