"""Shares of rows by length, counted slice by slice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.builds.build_report import percentiles


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3000), max_size=30), max_size=5))
def test_percentiles_of_slices_are_those_of_all_rows(slices: list[list[int]]) -> None:
    whole = [length for lengths in slices for length in lengths]
    wanted = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = percentiles(np.array(lengths, np.int32) for lengths in slices)
    assert found == ({name: int(np.percentile(whole, q)) for name, q in wanted.items()} if whole else {})
