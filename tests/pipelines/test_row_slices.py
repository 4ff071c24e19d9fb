"""How the rows of an entry are cut for columns that are computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.pipelines import row_slices as module
from raysvc.pipelines.row_slices import RowSlice, row_slices


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 200))
def test_slices_touch_cover_all_rows_and_have_about_the_tokens(lengths: list[int], tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_TOKENS", 1)
        patch.setattr(module, "MOST_TOKENS", tokens)
        patch.setattr(module, "SLICES", 1)
        slices = row_slices(np.array(lengths), 4)
    assert [one.index for one in slices] == list(range(len(slices)))
    assert [one.first_row for one in slices] == np.cumsum(
        [0, *(one.num_rows for one in slices[:-1])]
    ).tolist()
    assert sum(one.num_rows for one in slices) == len(lengths)
    for one in slices:
        inside = lengths[one.first_row : one.first_row + one.num_rows]
        assert one.num_rows > 0
        assert sum(inside[:-1]) < max(tokens, 1)  # without its last row it is smaller


def test_a_small_entry_is_one_slice_and_a_large_one_64() -> None:
    assert row_slices(np.full(100, 50), 4) == (RowSlice(0, 0, 100),)
    assert len(row_slices(np.full(64_000, 1000), 4)) == 64
    assert len(row_slices(np.full(1_000_000, 1000), 4)) > 900  # at most a million tokens each


def test_wide_columns_make_smaller_slices() -> None:
    assert len(row_slices(np.full(2_000, 1000), 8 * 64)) == len(row_slices(np.full(2_000, 1000), 4))
    assert len(row_slices(np.full(64_000, 1000), 8 * 512)) == 64_000_000 // (1 << 14) + 1


def test_rows_longer_than_a_slice_are_one_each() -> None:
    assert [one.num_rows for one in row_slices(np.array([1 << 21] * 3), 4)] == [1, 1, 1]
