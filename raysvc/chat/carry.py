"""Columns that go with their row: from values of the source to Arrow, cut as the tokens are cut.

Axes: K written sequences, L tokens of a row as the source has it, W written tokens.

1. A value is read when its row is: its type, its shape and its number of tokens are those of the column.
2. A value per token is laid at the token it is about: `this_token` as it comes; `next_token` one place later, the
   first token gets the pad; `response` at the trained tokens in their order, the others get the pad.
3. What truncation leaves of a row is a beginning of its tokens: the values of the others go with them. A value per
   row stays as it is.

Always true:
- a value that does not fit quarantines its row, by the column's name;
- a row that is written has a value of every column; text that is missing is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.chat.row_errors import RowFault
from raysvc.chat.select import Kept
from raysvc.chat.source.examples import TokensExample
from raysvc.chat.source.text_numbers import value_of_text
from raysvc.errors import ConfigError
from raysvc.job.carried import MARK, CarriedColumn, pad_of
from raysvc.job.column_dtypes import BF16, bf16_of, numpy_dtype

Array = npt.NDArray[Any]
KINDS = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "V": "biuf"}


def resolved(columns: Mapping[str, CarriedColumn], row: Mapping[str, Any]) -> dict[str, CarriedColumn]:
    """The columns with the types that a first row shows.

    Raises:
        ConfigError: it shows none.
    """
    return {
        name: column.model_copy(update={"dtype": column.dtype or _seen_type(name, row.get(name))})
        for name, column in columns.items()
    }


def _seen_type(name: str, value: Any) -> str:
    kinds = {str: "string", bool: "bool", int: "int64", float: "float64"}
    if type(value) not in kinds:
        what = "is not in the first row" if value is None else f"is a {type(value).__name__} in the first row"
        raise ConfigError(f"source.carry.{name}", what, f"say what it holds: {name}: {{dtype: float32}}")
    return kinds[type(value)]


class Carrier:
    """The values of the rows of one chunk.

    Args:
        columns: with their types.
        format_name: the source knows the tokens of `pretokenized` rows, and the trained ones of `stepwise` rows, alone.
        sources: column -> its name in the source, where that is another.

    Raises:
        ConfigError: a column per token of rows whose tokens are ours.
    """

    def __init__(
        self, columns: Mapping[str, CarriedColumn], format_name: str, sources: Mapping[str, str] | None = None
    ) -> None:
        self._columns, self._sources = dict(sorted(columns.items())), dict(sources or {})
        self._rows: dict[int, dict[str, Any]] = {}
        for name, column in self._columns.items():
            of_steps = format_name == "stepwise" and column.align == "response"
            if column.per == "token" and format_name != "pretokenized" and not of_steps:
                what = f"has a value per token, and raysvc makes the tokens of {format_name} rows"
                raise ConfigError(f"source.carry.{name}", what, "use format: pretokenized, or put rollouts")

    @property
    def schema(self) -> list[pa.Field]:
        """Fields of the columns, by name."""
        return [_field(name, column) for name, column in self._columns.items()]

    def clear(self) -> None:
        """Forget the rows."""
        self._rows.clear()

    def take(self, source_row: int, data: Mapping[str, Any], tokens: TokensExample | None) -> None:
        """Read the values of a row.

        Raises:
            RowFault: one does not fit its column.
        """
        self._rows[source_row] = {
            name: _value(name, column, data.get(self._sources.get(name, name)), tokens)
            for name, column in self._columns.items()
        }

    def arrays(self, kept: Kept) -> dict[str, pa.Array]:
        """Name -> [K], the values of the sequences that are written."""
        rows = [self._rows[number] for number in kept.source_rows.tolist()]
        lengths = kept.lengths.tolist()
        out: dict[str, pa.Array] = {}
        for name, column in self._columns.items():
            dtype, values = numpy_dtype(column.dtype or "string"), [row[name] for row in rows]
            if column.dtype == "string":
                out[name] = pa.array(values, pa.string())
            elif column.per == "row":
                out[name] = arrow_values(np.array(values, dtype).reshape(len(values), *column.shape))
            else:
                cut = [value[:length] for value, length in zip(values, lengths, strict=True)]
                flat = np.concatenate([np.empty((0, *column.shape), dtype), *cut])
                offsets = np.zeros(len(cut) + 1, np.int32)
                np.cumsum(lengths, out=offsets[1:])
                out[name] = pa.ListArray.from_arrays(pa.array(offsets), arrow_values(flat))
        return out


def arrow_values(values: Array) -> pa.Array:
    """[N, *shape] as Arrow: lists of a fixed size inside lists; bfloat16 as its bits."""
    flat = np.ascontiguousarray(values).reshape(-1)
    array = pa.array(flat.view("<u2") if values.dtype == BF16 else flat)
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def text_widths(table: pa.Table) -> dict[str, int]:
    """Column of text -> characters of its longest value."""
    import pyarrow.compute as pc

    return {
        field.name: pc.max(pc.utf8_length(table.column(field.name))).as_py() or 0
        for field in table.schema
        if pa.types.is_string(field.type)
    }


def _field(name: str, column: CarriedColumn) -> pa.Field:
    if column.dtype == "string":
        return pa.field(name, pa.string())
    kind = arrow_values(np.empty((0, *column.shape), numpy_dtype(column.dtype or "string"))).type
    metadata = {MARK: b"bfloat16"} if column.dtype == "bfloat16" else None
    return pa.field(name, pa.list_(kind) if column.per == "token" else kind, metadata=metadata)


def _value(name: str, column: CarriedColumn, value: Any, tokens: TokensExample | None) -> Any:
    if column.dtype == "string":
        if value is not None and not isinstance(value, str):
            raise RowFault(f"carried column {name!r} is no text", f"it is a {type(value).__name__}")
        return value
    if value is None or (value == "" and column.per == "row"):  # a field of CSV without a value
        return _missing(name, column, tokens)
    found = _numbers(name, column, value)
    if column.per == "row":
        return _shaped(name, found, column.shape)
    assert tokens is not None
    return _laid(name, column, found, np.array(tokens.mask, np.bool_))


def _missing(name: str, column: CarriedColumn, tokens: TokensExample | None) -> Array:
    if "pad" not in column.model_fields_set:
        raise RowFault(f"no value in carried column {name!r}", "give source.carry a pad for rows without one")
    lead = () if tokens is None or column.per == "row" else (len(tokens.ids),)
    return np.full((*lead, *column.shape), pad_of(column))


def _numbers(name: str, column: CarriedColumn, value: Any) -> Array:
    """The numbers of a value, in the type of the column."""
    dtype = numpy_dtype(column.dtype or "string")
    if isinstance(value, str):
        value = value_of_text(name, column, value)
        if isinstance(value, np.ndarray):
            return (
                value
                if column.per == "row"
                else value.reshape(_tokens_in(name, value, column), *column.shape)
            )
    try:
        raw = np.asarray(value)
    except ValueError:
        raise RowFault(
            f"carried column {name!r} is ragged inside a row", "give all values one shape"
        ) from None
    if dtype == np.uint64 and raw.dtype.kind == "f":
        raw = _of_integers(value, raw)
    if raw.size and raw.dtype.kind not in KINDS[dtype.kind]:
        raise RowFault(f"carried column {name!r} is not {column.dtype}", f"it is {raw.dtype}")
    if dtype.kind in "fV":
        return _floats(name, column, raw, dtype)
    if dtype.kind in "iu" and raw.size:
        limits = np.iinfo(dtype)
        if int(raw.min()) < limits.min or int(raw.max()) > limits.max:
            raise RowFault(f"carried column {name!r} is not {column.dtype}", f"{raw.min()} to {raw.max()}")
    return raw.astype(dtype)


def _of_integers(value: Any, raw: Array) -> Array:
    """Integers below and above 2^63 beside each other, of which numpy makes floats; `raw` where there is another number."""
    whole = np.array(value, object)
    fit = all(type(one) is int and 0 <= one < 1 << 64 for one in whole.flat)
    return whole.astype(np.uint64) if fit else raw


def _floats(name: str, column: CarriedColumn, raw: Array, dtype: np.dtype[Any]) -> Array:
    """Numbers of any kind in a type of floats: what it rounds is rounded, what it has no room for is refused."""
    with np.errstate(over="ignore"):
        found: Array = bf16_of(raw) if dtype == BF16 else raw.astype(dtype)
        seen = found["bfloat16"] & 0x7FFF == 0x7F80 if dtype == BF16 else np.isinf(found)
    if seen.any() and np.any(beyond := seen & np.isfinite(raw)):
        told = f"{np.broadcast_to(raw, beyond.shape)[beyond][0]} is beyond its range"
        raise RowFault(f"carried column {name!r} is not {column.dtype}", told)
    return found


def _tokens_in(name: str, found: Array, column: CarriedColumn) -> int:
    size = int(np.prod(column.shape, dtype=np.int64))
    if found.size % size:
        raise RowFault(f"carried column {name!r} has another shape", f"{found.size} numbers in {size}s")
    return found.size // size


def _shaped(name: str, found: Array, shape: tuple[int, ...]) -> Array:
    if found.size != int(np.prod(shape, dtype=np.int64)) or (found.ndim > 1 and found.shape != shape):
        raise RowFault(f"carried column {name!r} has another shape", f"{found.shape} instead of {shape}")
    return found.reshape(shape)


def _laid(name: str, column: CarriedColumn, found: Array, mask: npt.NDArray[np.bool_]) -> Array:  # 2
    """[L, *shape], each value at the token it is about."""
    counts = {
        "this_token": (len(mask),),
        "next_token": (len(mask), len(mask) - 1),
        "response": (int(mask.sum()),),
    }
    wanted = counts[column.align]
    if found.size == 0 and wanted[-1] == 0:
        found = found.reshape(0, *column.shape)
    if found.shape[1:] != column.shape or found.shape[:1] not in [(count,) for count in wanted]:
        told = f"{found.shape} for {len(mask)} tokens, {int(mask.sum())} of them trained"
        raise RowFault(f"carried column {name!r} has another shape", told)
    if column.align == "this_token":
        return found
    out = np.full((len(mask), *column.shape), pad_of(column))
    if column.align == "next_token":
        out[1:] = found[: len(mask) - 1]
    else:
        out[mask] = found
    return out
