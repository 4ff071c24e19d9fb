"""Arrays that may be larger than memory: small ones are held, large ones are a mapped file without a name.

Always true:
- the file ends with the array, however the process ends;
- its disk space is taken before it is written, so that a full disk is an error and not a signal.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import StoreError

HELD_BYTES = 256 << 20


def large_array(count: int, dtype: npt.DTypeLike, held_bytes: int = HELD_BYTES) -> npt.NDArray[Any]:
    """An array [count] to be written, of undefined content; above `held_bytes` in `RAYSVC_PART_CACHE_DIR`, else the temporary folder.

    Raises:
        StoreError: the disk has no room for it.
    """
    num_bytes = count * np.dtype(dtype).itemsize
    if num_bytes <= held_bytes:
        return np.empty(count, dtype)
    folder = os.environ.get("RAYSVC_PART_CACHE_DIR") or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="raysvc-lengths-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return np.memmap(file, dtype, "r+", shape=(count,))
    except OSError as error:
        what = f"no room for {num_bytes} bytes of row lengths ({error})"
        raise StoreError(folder, what, "use plan.shuffle: window, or set RAYSVC_PART_CACHE_DIR") from error


def concatenated(arrays: Sequence[npt.NDArray[Any]], held_bytes: int = HELD_BYTES) -> npt.NDArray[Any]:
    """The arrays one after the other; a single one is not copied."""
    if len(arrays) == 1:
        return arrays[0]
    out = large_array(sum(len(one) for one in arrays), np.result_type(*arrays), held_bytes)
    return np.concatenate(arrays, out=out)
