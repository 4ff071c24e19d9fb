"""The order of an epoch over slices: slices in shuffled order, their groups shuffled in a moving window.

Axes: S slices, W slices of a window, P positions asked for, U stages that they lie in.

1. The slices are permuted by a key of (salt, seed, epoch): place p of the epoch has slice pi(p).
2. The groups of a slice are permuted by a key of (epoch, slice) and dealt to W cells: cell j gets those whose new place r has
   j * n // W <= r < (j + 1) * n // W, of n groups.
3. Stage t has cell j of slice pi(t - j), for each j in [0, W) whose place is there, shuffled by a key of (epoch, t).
4. The stages 0 to S + W - 2, one after the other, are the epoch.

Always true:
- every group comes exactly once in an epoch;
- stage t, and where it begins, follow from the numbers of groups of the slices pi(0) to pi(t) alone;
- a position needs the slices of one window; time and memory of `at` depend on P and W, and on S by the ends of the stages;
- positions may be asked for in any order, from several threads: pure integers, the same on every machine.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from raysvc import row_ids
from raysvc.plan.order import GroupOrder, Permutation, permute_each, round_keys_each
from raysvc.ragged import Int64s

EPOCHS_KEPT = 2


def is_windowed(shuffle: str) -> bool:
    """Returns whether a checked `plan.shuffle` is `window` or `window(W)`."""
    return shuffle.startswith("window")


class WindowOrder(GroupOrder):
    """Order of the groups of every epoch; a group is numbered by `raysvc.row_ids`.

    Args:
        groups: int64 [S], of each slice.
        window: W.
        seed: of the run.
        salt: tells orders of the same seed apart (the key of a mixture's source).
    """

    def __init__(self, groups: Int64s, window: int, seed: int, salt: str = "") -> None:
        self.groups, self.window = groups, window
        key = f"window/{salt}/{seed}"
        self._epoch = lru_cache(EPOCHS_KEPT)(lambda epoch: _Epoch(groups, window, f"{key}/{epoch}"))

    @property
    def num_groups(self) -> int:
        """Groups of one epoch."""
        return int(self.groups.sum())

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        """Groups at `positions` (int64 [P], each in [0, num_groups)) of `epoch`."""
        if not len(positions):
            return np.zeros(0, np.int64)
        known = self._epoch(epoch)
        stages, which, index, sizes = known.stages_at(positions)
        shuffled = permute_each(sizes, round_keys_each(f"{known.key}/stage", stages), which, index)  # 3
        place, number = self._dealt(known, stages, which, shuffled)
        places, of_place = np.unique(place, return_inverse=True)
        slices = known.slices[places]
        keys = round_keys_each(f"{known.key}/slice", slices)
        return row_ids.join(slices[of_place], permute_each(known.sizes[places], keys, of_place, number))  # 2

    def needs_from(self, epoch: int, position: int) -> tuple[Int64s, Int64s]:
        """See `GroupOrder`."""
        known = self._epoch(epoch)
        stage = int(np.searchsorted(known.ends, position, side="right"))
        first = max(0, stage - self.window + 1)
        begins = np.concatenate([[0], known.ends[: known.last_place]])  # stage p opens the slice at place p
        begins[:first] = known.ends[-1]
        return np.roll(known.slices, -first), np.roll(np.maximum(begins, position), -first)

    def _dealt(self, known: _Epoch, stages: Int64s, which: Int64s, index: Int64s) -> tuple[Int64s, Int64s]:
        """Place of the slice, and dealt number of the group in it, of the groups at `index` in stage `stages[which]`."""
        cells = np.arange(self.window)
        place_UW = stages[:, None] - cells
        there = (place_UW >= 0) & (place_UW <= known.last_place)
        n_UW = np.where(there, known.sizes[np.clip(place_UW, 0, known.last_place)], 0)
        first_UW = cells * n_UW // self.window
        end_UW = np.cumsum((cells + 1) * n_UW // self.window - first_UW, axis=1)
        offsets = np.arange(len(stages)) * (int(end_UW[:, -1].max()) + 1)  # one sorted line of all stages
        line = (end_UW + offsets[:, None]).reshape(-1)
        cell = np.searchsorted(line, index + offsets[which], side="right") - which * self.window
        before = np.where(cell > 0, end_UW[which, cell - 1], 0)
        return stages[which] - cell, first_UW[which, cell] + index - before


class _Epoch:
    """Slices of an epoch by place, and where its stages end.

    Attributes:
        slices: int64 [S], pi.
        sizes: int64 [S], groups of the slice at each place.
        ends: int64 [S + W - 1], groups of a stage and of all before it.
        key: of (salt, seed, epoch).
    """

    def __init__(self, groups: Int64s, window: int, key: str) -> None:
        self.key = key
        self.slices = Permutation.keyed(len(groups), f"{key}/order").at(np.arange(len(groups)))  # 1
        self.sizes = groups[self.slices]
        of_stage = np.zeros(len(groups) + window - 1, np.int64)
        for cell in range(window):
            of_cell = (cell + 1) * self.sizes // window - cell * self.sizes // window
            of_stage[cell : cell + len(groups)] += of_cell
        self.ends = np.cumsum(of_stage)

    @property
    def last_place(self) -> int:
        """S - 1."""
        return len(self.slices) - 1

    def stages_at(self, positions: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """The stages [U] of the positions, the number of each position's stage and its place in it [P], groups of each stage [U]."""
        stages, which = np.unique(np.searchsorted(self.ends, positions, side="right"), return_inverse=True)
        begins = np.where(stages > 0, self.ends[stages - 1], 0)
        return stages, which, positions - begins[which], self.ends[stages] - begins
