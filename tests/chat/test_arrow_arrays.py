"""Arrow arrays made without pandas are those that pyarrow makes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from raysvc.chat.arrow_arrays import arrow_of, binary_array, numpy_of

KINDS = [np.uint8, np.int32, np.int64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 3])
def test_numbers_become_the_array_that_pyarrow_makes(kind: type, step: int) -> None:
    numbers = np.arange(100, dtype=kind)[::step]
    assert arrow_of(numbers).equals(pa.array(numbers))


@pytest.mark.parametrize("chunks", [[], [[]], [[1, 2, 3]], [[1], [], [2, 3]]])
def test_a_column_becomes_the_numbers_that_pyarrow_gives(chunks: list[list[int]]) -> None:
    column = pa.chunked_array(chunks, pa.int64())
    assert numpy_of(column).tolist() == column.to_pylist()
    assert numpy_of(column).dtype == np.int64
    truth = column.cast(pa.bool_())
    assert numpy_of(truth).tolist() == truth.to_pylist()
    assert numpy_of(truth).dtype == np.bool_


def test_a_slice_of_an_array_keeps_its_place() -> None:
    whole = pa.array([5, 6, 7, 8], pa.int32())
    assert numpy_of(whole[1:3]).tolist() == [6, 7]
    truth = pa.array([True, False, False, True])
    assert numpy_of(truth[1:]).tolist() == [False, False, True]


def test_pieces_become_the_array_that_pyarrow_makes() -> None:
    pieces = [b"a", b"", b"\xff\x00"]
    assert binary_array(pieces).equals(pa.array(pieces, pa.large_binary()))
    assert binary_array([]).equals(pa.array([], pa.large_binary()))


def test_nothing_here_imports_pandas() -> None:
    code = """
import sys
import numpy as np
from raysvc.chat.arrow_arrays import arrow_of, binary_array, numpy_of
binary_array([b"a"]).take(arrow_of(np.zeros(3, np.int32)))
numpy_of(arrow_of(np.arange(3)))
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
