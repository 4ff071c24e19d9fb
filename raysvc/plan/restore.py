"""What workers return per row, back in the order of the mini-batch.

Always true:
- row n of the result belongs to `mini.row_ids[n]`; dummies are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.plan.plan import MiniBatchPlan


def restore_rows(mini: MiniBatchPlan, per_rank: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """[N, ...], outputs in row order.

    Args:
        mini: the plan that dealt the rows.
        per_rank: for each rank [S, ...], one entry for each of its rows and dummies, in the order of
            `RankPlan.rows`.
    """
    rows = np.concatenate([rank.rows for rank in mini.ranks])
    values = np.concatenate(list(per_rank))
    real = rows >= 0
    out = np.empty((len(mini.row_ids), *values.shape[1:]), values.dtype)
    out[rows[real]] = values[real]
    return out
