"""Written sequences as an Arrow table.

Axes: K sequences, W tokens.
Always true:
- sequences are in the order of their source rows;
- ids and mask are not copied when they were in that order already.

A preference row is written as two sequences, the chosen one first, with the same `source_row`; `chosen` tells them apart.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raysvc.chat.select import Kept
from raysvc.chat.tokens.arrow_arrays import arrow_of, numpy_of

SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("source_row", pa.int64())]
)
PREFERENCE_SCHEMA = SCHEMA.append(pa.field("chosen", pa.uint8()))


def table_of(kept: list[Kept], preference: bool) -> pa.Table:
    """The written sequences, by source row."""
    schema = PREFERENCE_SCHEMA if preference else SCHEMA
    tables = [_part(part, preference) for part in kept if len(part.lengths)]
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    numbers = numpy_of(table["source_row"])
    if np.all(numbers[1:] >= numbers[:-1]):
        return table
    return table.take(arrow_of(np.argsort(numbers, kind="stable")))


def _part(kept: Kept, preference: bool) -> pa.Table:
    offsets = np.zeros(len(kept.lengths) + 1, np.int32)
    np.cumsum(kept.lengths, out=offsets[1:])
    columns = [
        pa.ListArray.from_arrays(arrow_of(offsets), arrow_of(kept.ids)),
        pa.ListArray.from_arrays(arrow_of(offsets), arrow_of(kept.mask)),
        arrow_of(kept.source_rows),
    ]
    if preference:
        columns.append(arrow_of(np.tile(np.array([1, 0], np.uint8), len(kept.lengths) // 2)))
    return pa.table(columns, schema=PREFERENCE_SCHEMA if preference else SCHEMA)
