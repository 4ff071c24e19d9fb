"""Defines what a driver says to its server, and hears of it: plain data, which load nothing of the plan.

Axes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.ragged import Int64s


class Request(NamedTuple):
    """Holds what a driver asks for.

    Attributes:
        call: differs between two calls, and is the same when one is repeated.
        from_step: None: the first step that was not handed out.
        weights: source -> weight; None: those of the mixture stay.
        skip_rows: rows to leave out.
    """

    call: str
    from_step: int | None
    weights: Mapping[str, float] | None = None
    skip_rows: tuple[int, ...] = ()


class RowOutcomes(NamedTuple):
    """Holds what was reported of rows.

    Attributes:
        steps: int64 [N], ascending.
        row_ids: int64 [N].
        columns: name -> float32 [N], NaN where the report of a step had no such column.
    """

    steps: Int64s
    row_ids: Int64s
    columns: dict[str, npt.NDArray[np.float32]]
