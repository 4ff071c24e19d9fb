"""Arrow arrays from numbers and bytes, and back, without pandas.

`pa.array`, `to_numpy` and whatever else converts a Python object import pandas where it is installed, which takes longer
than a small build.

Always true:
- numbers are not copied when they lie one after the other;
- pandas is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.ragged import offsets_of


def arrow_of(numbers: npt.NDArray[np.number[Any]]) -> pa.Array:
    """Does what `pa.array` does, for numbers without nulls."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), buffers)


def numpy_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Does what `to_numpy` does, for numbers or truth values without nulls; the array is read-only."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if pa.types.is_boolean(column.type):
        return numpy_of(column.cast(pa.uint8())).view(np.bool_)
    parts = [np.from_dlpack(chunk) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.zeros(0, column.type.to_pandas_dtype()), *parts])


def binary_array(pieces: Sequence[bytes]) -> pa.LargeBinaryArray:
    """Does what `pa.array(pieces, pa.large_binary())` does."""
    offsets = offsets_of([*map(len, pieces)])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(pieces))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(pieces), buffers)
