"""Written sequences as an Arrow table.

Axes: K sequences, W tokens.
Always true:
- sequences are in the order of their source rows;
- ids and mask are not copied when they were in that order already.

A row of a pair format is written as two sequences with the same `source_row`; a column tells them apart: `chosen` is
1 for the first of a preference row, `mismatched` is 1 for the second of a row with a label (KTO).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from raysvc.chat.arrow_arrays import arrow_of, numpy_of
from raysvc.chat.select import Kept

SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("source_row", pa.int64())]
)
PAIR_COLUMN = {"preference": "chosen", "kto": "mismatched"}
FIRST_SECOND = {"chosen": (1, 0), "mismatched": (0, 1)}


def table_of(kept: list[Kept], pair: str | None = None, carried: Sequence[pa.Field] = ()) -> pa.Table:
    """The written sequences, by source row.

    Args:
        kept: of each chunk.
        pair: the column that tells the two sequences of a row apart; None: a row has no two.
        carried: fields of the columns in `Kept.carried`.
    """
    fields = [*SCHEMA, *([pa.field(pair, pa.uint8())] if pair else []), *carried]
    schema = pa.schema(fields)
    tables = [_part(part, pair, schema) for part in kept if len(part.lengths)]
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    numbers = numpy_of(table["source_row"])
    if np.all(numbers[1:] >= numbers[:-1]):
        return table
    return table.take(arrow_of(np.argsort(numbers, kind="stable")))


def _part(kept: Kept, pair: str | None, schema: pa.Schema) -> pa.Table:
    offsets = np.zeros(len(kept.lengths) + 1, np.int32)
    np.cumsum(kept.lengths, out=offsets[1:])
    columns = [
        pa.ListArray.from_arrays(arrow_of(offsets), arrow_of(kept.ids)),
        pa.ListArray.from_arrays(arrow_of(offsets), arrow_of(kept.mask)),
        arrow_of(kept.source_rows),
    ]
    if pair:
        columns.append(arrow_of(np.tile(np.array(FIRST_SECOND[pair], np.uint8), len(kept.lengths) // 2)))
    columns += [kept.carried[name] for name in schema.names[len(columns) :]]
    return pa.table(columns, schema=schema)
