"""The order of an epoch over slices: slices in shuffled order, their groups shuffled in a moving window.

Axes: S slices, W slices of a window, P positions asked for, U stages that they lie in.

1. The slices are permuted by a key of (salt, seed, epoch): place p of the epoch has slice pi(p).
2. The groups of a slice are permuted by a key of (epoch, slice) and dealt to W cells: cell j gets those whose new place r has
   j * n // W <= r < (j + 1) * n // W, of n groups.
3. Stage t has cell j of slice pi(t - j), for each j in [0, W) whose place is there, shuffled by a key of (epoch, t).
4. The stages 0 to S + W - 2, one after the other, are the epoch.

Always true:
- every group comes exactly once in an epoch;
- stage t, and where it begins, follow from the slices pi(0) to pi(t) alone: no other slice is asked for its groups;
- a position needs the slices of one window; time and memory of `at` depend on P and W, and on S by the ends of the stages;
- positions may be asked for in any order, from several threads: pure integers, the same on every machine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol

import numpy as np

from raysvc.plan.order import Permutation, permute_each, round_keys_each
from raysvc.plan.sliced import row_ids
from raysvc.ragged import Int64s

EPOCHS_KEPT = 2


def is_windowed(shuffle: str) -> bool:
    """Whether a checked `plan.shuffle` is `window` or `window(W)`."""
    return shuffle.startswith("window")


class SliceCounts(Protocol):
    """What the order asks of its slices."""

    @property
    def num_slices(self) -> int:
        """S."""

    @property
    def num_groups(self) -> int:
        """Groups of all slices."""

    @property
    def are_counted(self) -> bool:
        """Whether the groups of all slices are known; False: a slice has to be looked at."""

    def groups_of(self, slices: Int64s) -> Int64s:
        """Groups of each of `slices` [P]."""


class WindowOrder:
    """Order of the groups of every epoch; a group is numbered by `raysvc.plan.sliced.row_ids`.

    Args:
        counts: of the slices.
        window: W.
        seed: of the run.
        salt: tells orders of the same seed apart (the key of a mixture's source).
    """

    def __init__(self, counts: SliceCounts, window: int, seed: int, salt: str = "") -> None:
        self.counts, self.window = counts, window
        self._key = f"window/{salt}/{seed}"
        self._lock = threading.Lock()  # guards _epochs
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()

    @property
    def num_groups(self) -> int:
        """Groups of one epoch."""
        return self.counts.num_groups

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

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            if epoch not in self._epochs:
                self._epochs[epoch] = _Epoch(self.counts, self.window, f"{self._key}/{epoch}")
            self._epochs.move_to_end(epoch)
            while len(self._epochs) > EPOCHS_KEPT:
                self._epochs.popitem(last=False)
            return self._epochs[epoch]


class _Epoch:
    """Slices of an epoch by place, and where its stages end; both grow to what was asked for.

    Attributes:
        slices: int64 [S], pi.
        sizes: int64 [S], groups of the slice at each place that was reached.
        key: of (salt, seed, epoch).
    """

    def __init__(self, counts: SliceCounts, window: int, key: str) -> None:
        self._counts, self._window, self.key = counts, window, key
        num_slices = counts.num_slices
        self.slices = Permutation.keyed(num_slices, f"{key}/order").at(np.arange(num_slices))  # 1
        self.sizes = np.zeros(num_slices, np.int64)
        self._lock = threading.Lock()  # guards the lines below while they grow
        self._ends = np.zeros(num_slices + window - 1, np.int64)
        self._known = 0  # stages whose ends are known

    @property
    def last_place(self) -> int:
        """S - 1."""
        return len(self.slices) - 1

    def stages_at(self, positions: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """The stages [U] of the positions, the number of each position's stage and its place in it [P], groups of each stage [U]."""
        highest = int(positions.max())
        with self._lock:
            while self._known < len(self._ends) and (
                not self._known or self._ends[self._known - 1] <= highest
            ):
                self._grow()
            ends = self._ends[: self._known]
        stages, which = np.unique(np.searchsorted(ends, positions, side="right"), return_inverse=True)
        begins = np.where(stages > 0, ends[stages - 1], 0)
        return stages, which, positions - begins[which], ends[stages] - begins

    def _grow(self) -> None:
        """Find the ends of the next stage; of all of them, where the slices are counted."""
        start = self._known
        stop = len(self._ends) if self._counts.are_counted else start + 1
        places = slice(start, min(stop, len(self.slices)))
        self.sizes[places] = self._counts.groups_of(self.slices[places])
        stages = np.arange(start, stop)
        sizes = np.zeros(stop - start, np.int64)
        for cell in range(self._window):
            place = stages - cell
            there = (place >= 0) & (place <= self.last_place)
            n = np.where(there, self.sizes[np.clip(place, 0, self.last_place)], 0)
            sizes += (cell + 1) * n // self._window - cell * n // self._window
        self._ends[start:stop] = np.cumsum(sizes) + (self._ends[start - 1] if start else 0)
        self._known = stop
