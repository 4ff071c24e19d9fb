"""The entry of a Ray Dataset: its slices are known when they come.

Always true:
- the slices of the entry are those that the Dataset gave to this build, tokenized now or by an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from raysvc.builds.build import Build
from raysvc.builds.build_progress import BuildMeter
from raysvc.errors import SourceError
from raysvc.pipelines.ray_data.ray_source import RaySource
from raysvc.pipelines.sources.slices import Slice

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt

ALL = Slice(0, 0, 0, ())  # what is left: nobody knows how many slices there are


class StreamedBuild(Build):
    """Builds what streams by, from front to back."""

    streams = True
    _ended = False

    @property
    def _source(self) -> RaySource:
        assert isinstance(self.found.plan.source, RaySource)
        return self.found.plan.source

    def start(self, needed: Collection[int] | None = None) -> None:
        """Look at what an earlier builder has made, and start the clock."""
        from raysvc.pipelines.tokenize import is_usable

        self._began_s = time.perf_counter()
        self._made = self.writer.receipts(lambda receipt: is_usable(receipt.meta))
        self.left = [ALL]
        source = self._source
        self.meter = BuildMeter(self.progress, source.slices, (), self.found.job, source.num_bytes)

    @property
    def is_complete(self) -> bool:
        """Returns whether the Dataset came to its end."""
        return self._ended

    def receipts(self, check: Callable[[], None]) -> Iterator[tuple[int, Receipt]]:
        """Run the Dataset; each receipt with the number of this build.

        Raises:
            RaysvcError: what a slice raised on purpose, or the Dataset fails.
        """
        from raysvc.pipelines.ray_data.ray_build import receipts_of_rows

        slices: list[Slice] = []
        waiting: Receipt | None = None  # the build is complete when it takes the last one
        for piece, receipt in receipts_of_rows(self.task(), self._source, self._made, self.found.job.workers):
            check()
            if waiting is not None:
                yield 0, waiting
            slices.append(piece)
            waiting = receipt
        if waiting is None or len(slices) < len(self._source.slices):
            what = f"it gave {len(slices)} slices, and {len(self._source.slices)} when it was looked at"
            raise SourceError("source.ray", what, "give it an order and seeds, or materialize() it")
        self._source.slices = self._slices = tuple(slices)
        self._ended = True
        yield 0, waiting
