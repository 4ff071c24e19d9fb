"""The media of an entry's rows, or of a mixture's: their arrays, and how many bytes these will be.

Axes: R ranks, S sequences of a rank.
Always true:
- the processor is loaded when the first byte is asked for: a server whose collators make the steps, and whose clients ask for
  no sizes, does not load it;
- bytes are planned from patches alone, in proportion to those of a blank medium; of several kinds, to the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy.typing as npt

from raysvc.cache.rows import Rows
from raysvc.chat.row_errors import RowFault
from raysvc.collate.shard import Shard
from raysvc.collate.with_media import with_media
from raysvc.errors import EntryError
from raysvc.media.media_store import read_medium
from raysvc.media.medium import COLUMN, media_of
from raysvc.media.processor_spec import ProcessorSpec
from raysvc.media.row_pixels import RowPixels
from raysvc.plan.plan import MiniBatchPlan, Plan, PlanRows
from raysvc.row_batch import RowBatch


class EntryMedia:
    """See the module.

    Args:
        rows: that have media.
        planned: they know the patches of each.
        processor: where it is loaded from.
    """

    def __init__(self, rows: Rows, planned: PlanRows, processor: ProcessorSpec) -> None:
        self._entries, self._planned, self._processor = rows.entries, planned, processor

    @classmethod
    def of(cls, rows: Rows, plan: Plan, processor: ProcessorSpec | None) -> EntryMedia | None:
        """None where no row has media."""
        return cls(rows, plan.rows, processor) if processor is not None and plan.rows.have_media else None

    def fill(self, shard: Shard, rows: RowBatch) -> Shard:
        """The shard with the arrays of the media of its rows.

        Raises:
            EntryError: media of a row are missing, or cannot be decoded.
        """
        media = dict(zip(rows.row_ids.tolist(), rows.rows[COLUMN].tolist(), strict=True))

        def _decoded(text: str | None) -> Mapping[str, npt.NDArray[Any]]:
            try:
                return self._pixels.of(text)
            except RowFault as error:
                bad = [row for row in shard.row_ids.tolist() if media.get(row) == text]
                digests = ", ".join(one.sha256 for one in media_of(text))
                what = f"media {digests} cannot be decoded: {error}"
                remedy = f"add {bad} to plan.skip_rows and run again; it goes on from its checkpoint"
                raise EntryError(f"row {bad[0]}", what, remedy) from error

        return with_media(shard, media, _decoded, self._like)

    def planned(self, rank_bytes: Sequence[int], mini: MiniBatchPlan) -> tuple[int, ...]:
        """[R], bytes of each rank's shard, with media."""
        patches = self._planned.patches_of(mini.row_ids)
        assert patches is not None
        rows = [rank.rows[rank.rows >= 0] for rank in mini.ranks]
        of_media = [int(patches[each].sum() * self._bytes_per_patch) for each in rows]
        return tuple(own + more for own, more in zip(rank_bytes, of_media, strict=True))

    @cached_property
    def _pixels(self) -> RowPixels:
        return RowPixels(self._processor, [one.recipe for one in self._entries], self._read)

    @cached_property
    def _blanks(self) -> Sequence[tuple[Mapping[str, npt.NDArray[Any]], int]]:
        return list(self._pixels.blanks().values())

    @cached_property
    def _like(self) -> Mapping[str, npt.NDArray[Any]]:
        return {name: array for arrays, _ in self._blanks for name, array in arrays.items()}

    @cached_property
    def _bytes_per_patch(self) -> float:
        return max(sum(one.nbytes for one in arrays.values()) / patches for arrays, patches in self._blanks)

    def _read(self, sha256: str) -> bytes:
        """Reads from the store of any of the entries: most share one."""
        stores = {one.store.url: one.store for one in self._entries}
        for number, store in enumerate(stores.values()):
            try:
                return read_medium(store, sha256)
            except EntryError:
                if number + 1 == len(stores):
                    raise
        raise AssertionError("an entry has a store")
