"""Step-wise rows: one row per turn of a trajectory, several trajectories per prompt.

Always true:
- the rows of a trajectory have one uid, and exactly their last one is marked as last step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError


def trajectories_of(
    uids: Sequence[str], trajectory_ids: Sequence[str], is_last_step: Sequence[bool]
) -> npt.NDArray[np.int64]:
    """int64 [N], for each row the row number of its trajectory's last step.

    Raises:
        PlanError: a trajectory of two prompts, without a last step, or with rows after it.
    """
    last: dict[str, int] = {}
    uid_of: dict[str, str] = {}
    for row, (uid, name, is_last) in enumerate(zip(uids, trajectory_ids, is_last_step, strict=True)):
        if uid_of.setdefault(name, uid) != uid:
            raise _error(name, f"has rows of the prompts {uid_of[name]!r} and {uid!r}")
        if name in last:
            raise _error(name, f"has row {row} after its last step, row {last[name]}")
        if is_last:
            last[name] = row
    for name in uid_of:
        if name not in last:
            raise _error(name, "has no last step")
    return np.array([last[name] for name in trajectory_ids], np.int64)


def _error(name: str, what: str) -> PlanError:
    return PlanError(
        f"trajectory {name!r}", what, "mark exactly the last row of each trajectory, one uid each"
    )
