"""Numbers that a source holds as text: a field of CSV or TSV, or the bytes of many numbers.

1. A column of one number a row: the text is that number, as JSON writes it, or `nan`, `inf`, `-inf`; of bool it is `true`, `false`, 1 or 0.
2. Of several: text that begins with `[` is JSON, any other is base64 of their little-endian bytes.

Always true:
- nothing is guessed: no spaces, no thousands, no `3.0` in a column of integers;
- what is no such text is the row's fault.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.chat.row_errors import RowFault
from raysvc.job.carried import CarriedColumn
from raysvc.job.column_dtypes import numpy_dtype

INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
UNBOUNDED = re.compile(r"nan|[+-]?inf(inity)?", re.IGNORECASE)
TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def is_one_number(column: CarriedColumn) -> bool:
    """Returns whether a row has one number of it."""
    return column.per == "row" and not column.shape


def value_of_text(name: str, column: CarriedColumn, text: str) -> Any:
    """Returns what a text says: a number, nested lists, or a flat array in the column's type.

    Raises:
        RowFault: it is no such text.
    """
    if is_one_number(column):
        return _number(name, column, text)
    return _listed(name, text) if text.startswith("[") else _bytes(name, column, text)


def _number(name: str, column: CarriedColumn, text: str) -> bool | int | float:
    kind = numpy_dtype(column.dtype or "string").kind
    if kind == "b" and text.lower() in TRUTHS:
        return TRUTHS[text.lower()]
    if kind in "iu" and INTEGER.fullmatch(text) and len(text) <= 40:
        return int(text)
    if kind in "fV" and UNBOUNDED.fullmatch(text):
        return float(text)
    if kind in "fV" and NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    raise RowFault(f"carried column {name!r} is not {column.dtype}", f"the text is {text[:40]!r}")


def _listed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"carried column {name!r} is no JSON list", str(error)) from None


def _bytes(name: str, column: CarriedColumn, text: str) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), numpy_dtype(column.dtype or "string"))
    except (binascii.Error, ValueError) as error:
        raise RowFault(f"carried column {name!r} is no base64 of {column.dtype}", str(error)) from None
