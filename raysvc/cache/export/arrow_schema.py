"""The Arrow types of an entry's columns, and how many bytes they take in memory, from its manifest alone.

Always true:
- a type is that of the column in a part, so bfloat16 is uint16, its bits;
- bytes are exact, except for text, whose share is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from raysvc.cache.part_info import PartInfo


def arrow_type(kind: str) -> pa.DataType:
    """The type that a part has where the manifest says `kind`.

    >>> str(arrow_type("list<bfloat16[2]>"))
    'list<item: fixed_size_list<item: uint16>[2]>'
    """
    import pyarrow as pa

    per_token, number, shape = _parsed(kind)
    made = pa.string() if number == "string" else pa.from_numpy_dtype(np.dtype(number))
    for size in reversed(shape):
        made = pa.list_(pa.field("item", made), size)
    return pa.list_(pa.field("item", made)) if per_token else made


def bytes_in_memory(part: PartInfo, columns: Mapping[str, str], wanted: Sequence[str]) -> int:
    """Bytes of some columns of a part.

    Args:
        part: as the manifest has it.
        columns: all of the part.
        wanted: some of them.
    """
    sizes = {name: _fixed_bytes(part, kind) for name, kind in columns.items() if kind != "string"}
    texts = max(0, part.num_bytes - sum(sizes.values())) // max(1, len(columns) - len(sizes))
    return sum(sizes.get(name, texts) for name in wanted)


def _fixed_bytes(part: PartInfo, kind: str) -> int:
    per_token, number, shape = _parsed(kind)
    values = prod(shape) * (part.num_tokens if per_token else part.num_rows)
    nbytes = -(-values // 8) if number == "bool" else values * np.dtype(number).itemsize
    return nbytes + 4 * (part.num_rows + 1) if per_token else nbytes


def _parsed(kind: str) -> tuple[bool, str, tuple[int, ...]]:
    """Returns whether it is per token, the numpy type of a number, and the shape of a value."""
    per_token = kind.startswith("list<")
    number, _, shape = kind.removeprefix("list<").rstrip(">]").partition("[")
    sizes = tuple(map(int, shape.split(","))) if shape else ()
    return per_token, number.replace("bfloat16", "uint16"), sizes
