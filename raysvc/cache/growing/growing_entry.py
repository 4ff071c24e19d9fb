"""An entry that is read while it is built: as `Entry`, with rows that are waited for.

Axes: S slices.
Always true:
- a row has the number that `raysvc.row_ids` gives it, since how many rows other slices have may not be known;
- a slice that nobody asks for is not waited for, and what is served of it is what the finished entry will have;
- when the build has ended, all is read from the parts that its manifest names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.growing.coming import GrowingSpec
from raysvc.cache.growing.slice_receipts import SliceReceipts
from raysvc.cache.local.part_cache import PartCopies
from raysvc.cache.local.part_reader import PartReader
from raysvc.cache.manifest import Manifest
from raysvc.cache.part_info import LazyParts, PartInfo
from raysvc.cache.store.store import Store
from raysvc.row_ids import slice_base


class GrowingEntry(Entry):
    """One generation of a key that somebody builds, or has just built."""

    def __init__(self, store: Store, folder: str, spec: GrowingSpec) -> None:
        """Nothing is read.

        Args:
            store, folder: where it is built.
            spec: what is known of it.
        """
        self.coming = spec
        self.receipts = SliceReceipts(store, folder, spec.report["source_rows"], spec.contents)
        super().__init__(
            store, folder, Manifest(spec.key, (), self.receipts.columns, spec.recipe, spec.report)
        )

    def _part_reader(self, copies: PartCopies | None) -> PartReader:
        parts, columns = Parts(self.receipts), self.receipts.columns
        return PartReader(self.store, self.folder, parts, columns, copies, self._starts())

    def _starts(self) -> npt.NDArray[np.int64]:
        return slice_base(np.arange(self.receipts.num_slices + 1, dtype=np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.folder, self.coming)

    @property
    def num_rows(self) -> int:
        """Rows of the source: an entry that is not finished does not know its own."""
        return int(self.source_rows.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices that are known by now; waits for them."""
        return sum(part.num_tokens for part in self.parts.parts)

    def has(self, slices: Sequence[int]) -> bool:
        """Returns whether all of these slices are finished."""
        return self.receipts.has(slices)

    def lacks(self, slices: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [N], whether there is no such row in a slice; what is not tokenized yet may be there."""
        used, places = np.unique(slices, return_inverse=True)
        counts = [
            slice_base(1) if count is None else count for count in self.receipts.num_rows(used.tolist())
        ]
        return rows >= np.array(counts, np.int64)[places]

    def wait_for(self, slices: Sequence[int]) -> float:
        """Wait until these slices are finished; seconds.

        Raises:
            EntryError: the build has failed.
        """
        return self.receipts.wait_for(slices)

    def is_finished(self) -> bool:
        """Returns whether there is a manifest by now."""
        return names.MANIFEST in {item.name for item in self.store.scan(self.folder, names.MANY)}

    def first_row(self) -> int:
        """The number of a row that is there; waits for the first slice that has one."""
        return slice_base(self.receipts.any_part()[0])

    def row_ids(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Returns what `Entry.row_ids` does, of the slices that are known by now; waits for them."""
        ids = [slice_base(index) + np.arange(part.num_rows) for index, part in enumerate(self.parts.parts)]
        return np.concatenate([*ids, np.zeros(0, np.int64)])[first:stop]

    def fail(self, why: str) -> None:
        """Nobody builds any more; whoever waits for a slice is told why. "": somebody builds again."""
        self.receipts.fail(why)


class Parts(LazyParts):
    """Parts by slice; one that is not there yet is waited for."""

    def __init__(self, receipts: SliceReceipts) -> None:
        self._receipts = receipts

    def __len__(self) -> int:
        return self._receipts.num_slices

    def part(self, index: int) -> PartInfo:
        """That of a slice; waits for it."""
        return self._receipts.part(index)
