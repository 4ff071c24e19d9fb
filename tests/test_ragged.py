"""Offsets and runs, against plain lists."""

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raysvc import ragged

RUNS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=12)


@given(RUNS)
def test_runs_are_what_lists_say(runs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in runs], np.int64)
    lengths = np.array([length for _, length in runs], np.int64)
    cells = [cell for start, length in runs for cell in range(start, start + length)]
    assert ragged.cells_of_runs(starts, lengths).tolist() == cells
    assert ragged.offsets_of(lengths).tolist() == [int(lengths[:n].sum()) for n in range(len(runs) + 1)]


def test_the_examples_hold() -> None:
    assert doctest.testmod(ragged).failed == 0
