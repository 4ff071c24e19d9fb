"""Facts of a step of rollouts, row by row: what producers put into the per-row columns, lengths, weight versions.

Axes: N rows, as they were put: merged turns are several.
Always true:
- a number of a step is one that can be worked out by hand from the rows that were put;
- where rows name trajectories, a column of the user counts once for each of them, by its last row, as advantages do; lengths count by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.job.column_dtypes import BF16, float32_of
from raysvc.row_batch import RowBatch

Array = npt.NDArray[Any]
BY_ROW = ("length", "trained_tokens", "staleness", "withheld")
NAMES = ("trajectory", "weight_version")  # they say which, not how much


@dataclass(frozen=True, eq=False)
class RolloutFacts:
    """The rows of a step.

    Attributes:
        columns: name -> [N, *shape]: each per-row column (bfloat16 as float32), `weight_version`, `staleness` (versions between the weights that
            sampled the row and those that train it), `length`, `trained_tokens`; `withheld`, 1 for a row that was too old
            (`on_stale="withhold"`).
        is_last: bool [N], whether the row is the last one of its trajectory.
        group: int [N], the number of the row's group.
    """

    columns: Mapping[str, Array]
    is_last: npt.NDArray[np.bool_]
    group: Array

    @property
    def by_version(self) -> dict[int, dict[str, float]]:
        """Weight version -> `rows`, and what `metrics` says of the rows that it sampled."""
        versions = self.columns["weight_version"]
        return {
            version: {
                "rows": float(np.count_nonzero(versions == version)),
                **self._summary(versions == version),
            }
            for version in np.unique(versions).tolist()
        }

    def metrics(self) -> dict[str, float]:
        """`reward_mean`, `reward_min` and `reward_max`, and the same of each column of one number a row; `reward`, `reward_std` (within
        a group, without bias), `frac_reward_zero_std` (groups that teach nothing) and `completions/mean_length` as TRL's `GRPOTrainer` logs them.
        """
        whole = self._summary(np.ones(len(self.is_last), np.bool_))
        return whole | self._as_trl() if len(self.is_last) else whole

    def _as_trl(self) -> dict[str, float]:
        lengths, reward = self.columns["trained_tokens"], self.columns.get("reward")
        out = {
            f"completions/{which}_length": float(getattr(lengths, which)())
            for which in ("mean", "min", "max")
        }
        if reward is None or reward.ndim != 1:
            return out
        place = np.unique(self.group[self.is_last], return_inverse=True)[1]
        values, rows = reward[self.is_last].astype(np.float64), np.bincount(place)
        apart = values - (np.bincount(place, values) / rows)[place]
        spread = np.sqrt(np.bincount(place, apart**2) / np.maximum(rows - 1, 1))
        zero = np.isclose(spread, 0.0).mean()
        return out | {"reward": values.mean(), "reward_std": spread.mean(), "frac_reward_zero_std": zero}

    def _summary(self, mine: npt.NDArray[np.bool_]) -> dict[str, float]:
        out: dict[str, float] = {}
        for name, column in self.columns.items():
            values = column[mine if name in BY_ROW else mine & self.is_last]
            if name not in NAMES and values.ndim == 1 and len(values):
                of_name = {"mean": values.mean(dtype=np.float64), "min": values.min(), "max": values.max()}
                out |= {f"{name}_{which}": float(value) for which, value in of_name.items()}
        return out


def facts_of(
    batch: RowBatch, group_of_N: Array, trained_by: int, withheld_N: Array | None = None
) -> RolloutFacts:
    """The facts of a step.

    Args:
        batch: N rows as they were put, group after group, in the order in which they were put.
        group_of_N: int [N], number of each row's group.
        trained_by: the weight version that trains the step.
        withheld_N: bool [N], the rows that were too old to be trained; None: the server withholds none.
    """
    is_target = batch.tokens["loss_mask"] != 0
    is_target[batch.offsets[:-1]] = False  # nothing predicts a first token
    versions = batch.rows["weight_version"]
    columns = {
        name: float32_of(values) if values.dtype == BF16 else values for name, values in batch.rows.items()
    }
    columns |= {"staleness": trained_by - versions, "length": batch.lengths}
    if withheld_N is not None:
        columns["withheld"] = withheld_N.astype(np.int64)
    columns["trained_tokens"] = np.add.reduceat(is_target.astype(np.int64), batch.offsets[:-1])
    return RolloutFacts(columns, _is_last(group_of_N, batch.rows.get("trajectory")), np.asarray(group_of_N))


def _is_last(group_of_N: Array, trajectory_of_N: Array | None) -> npt.NDArray[np.bool_]:
    count = len(group_of_N)
    if trajectory_of_N is None:
        return np.ones(count, np.bool_)
    both = np.stack([group_of_N, trajectory_of_N])[:, ::-1]
    last = np.unique(both, axis=1, return_index=True)[1]
    out = np.zeros(count, np.bool_)
    out[count - 1 - last] = True
    return out
